"""Ask a chat model one question: load, apply the chat template, decode greedily."""

import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coati_ext.utils.peft_warnings import ignore_pattern_warnings


def load_chat_model(
    pretrained: str | Path, *, adapter: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer) from local directories: bf16 on a GPU, fp32 on a CPU; the adapter by stock PEFT.

    Raises: FileNotFoundError for a directory that is not there; ValueError for a model without a chat template, or an
    adapter that does not hold every tensor its config announces (PEFT only warns).
    """
    for directory, file in ((pretrained, "config.json"), (adapter, "adapter_config.json")):
        if directory is not None and not (Path(directory) / file).is_file():
            raise FileNotFoundError(f"{directory} has no {file}")
    tokenizer = AutoTokenizer.from_pretrained(pretrained, local_files_only=True)
    if tokenizer.chat_template is None:
        raise ValueError(f"{pretrained} has no chat template (chat_template.jinja); use a chat model")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype, local_files_only=True).to(device)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings():
            ignore_pattern_warnings()
            warnings.filterwarnings("error", message="Found missing adapter keys")
            try:
                model = PeftModel.from_pretrained(model, adapter)
            except UserWarning as warning:
                raise ValueError(f"{adapter} does not fit {pretrained}: {warning}") from warning
    return model.eval(), tokenizer


@torch.no_grad()
def greedy_reply(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    max_new_tokens: int = 40,
) -> str:
    """The assistant's greedy answer to `messages` (`{"role": ..., "content": ...}`), without special tokens."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    # The sampling settings of a generation config do nothing here, and would be warned about.
    output_ids_BS = model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
    )
    completion_ids_A = output_ids_BS[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(completion_ids_A, skip_special_tokens=True).strip()
