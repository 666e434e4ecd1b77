"""The base model of a run, from its Hugging Face directory."""

import importlib.util

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_base_model(
    pretrained: str,
    precision: str,
    *,
    use_flash_attn: bool = False,
    use_grad_checkpoint: bool = False,
    show_progress: bool = True,
) -> PreTrainedModel:
    """Load on the CPU in the run's precision, ready for `enable_lora`.

    Every process reads the whole checkpoint; experts of other ranks are let go when LoRA is enabled.

    Raises:
        ValueError: flash-attn was asked for and is not installed.
    """
    if use_flash_attn and importlib.util.find_spec("flash_attn") is None:
        raise ValueError("--use_flash_attn: the package flash-attn is not installed; leave the flag out to use SDPA")
    if not show_progress:
        logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        pretrained,
        dtype=_DTYPES[precision],
        attn_implementation="flash_attention_2" if use_flash_attn else None,  # None: SDPA where the model has it
        local_files_only=True,
    )
    model.config.use_cache = False
    if use_grad_checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
