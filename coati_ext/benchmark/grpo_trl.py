"""TRL's GRPOTrainer on the work of `coati_ext.benchmark.grpo`, generating in the training process.

Its settings, where the work leaves a choice: `use_vllm` False, since ours has no server beside it either; the dynamic
cache of plain generation (TRL switches compilation of the decoding step off, which is what a static one would be for),
or as another engine transformers' continuous batching, with pages for what the work has (TRL's default, half of the
free memory, is taken anew for each generation, which costs time too); all completions of a step generated at once;
`steps_per_generation` equal to the accumulation steps, so that one generation serves one optimizer step and old
log-probabilities are never computed; `loss_type` grpo; on a GPU bf16 autocast, TRL's default, over bf16 weights and
fp32 adapters; the fused AdamW; nothing logged, nothing saved, no progress bar.
"""

import tempfile
import time
from typing import Any

import torch
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from coati_ext.benchmark.grpo import TARGETS, StepLog, Workload, measured, precision, text_reward

_PAGE_TOKENS = 256  # transformers' default, under whichever name a version has for it
_MOST_BATCH_TOKENS = 8192  # of one of its forward passes


class _StepEnds(TrainerCallback):
    """Closes each step, with what the trainer has noted of it."""

    def __init__(self) -> None:
        self.steps = StepLog()
        self.noted: dict[str, float] = {}
        self._begin = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.noted = {}
        self._begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        noted = self.noted
        self.steps.end_step(
            num_generated=int(noted["num_generated"]),
            num_trained=int(noted["num_trained"]),
            generate=noted["generate"],
            score=noted["experience"] - noted["generate"],
            update=time.perf_counter() - self._begin - noted["experience"],
        )


def trl(workload: Workload, *, continuous_batching: bool = False) -> dict[str, Any]:
    """The result of `coati_ext.benchmark.grpo.measured`."""
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        """Notes what a step's generation took, and all that comes before its log-probabilities."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            ends.noted["generate"] = time.perf_counter() - start
            return found

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_and_score_completions(*args, **kwargs)
            num_generated = int(found["completion_mask"].sum())
            ends.noted["num_generated"] = num_generated
            ends.noted["num_trained"] = int(found["prompt_mask"].sum()) + num_generated
            ends.noted["experience"] = time.perf_counter() - start
            return found

    ends, tokenizer = _StepEnds(), AutoTokenizer.from_pretrained(workload.pretrained, padding_side="left")
    generation = _continuous_batching(workload, tokenizer) if continuous_batching else _plain_generation(workload)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=workload.pretrained,
            reward_funcs=_reward,
            args=_arguments(workload, folder, generation),
            train_dataset=_dataset(workload),
            processing_class=tokenizer,
            callbacks=[ends],
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=workload.lora_rank, lora_alpha=workload.lora_alpha, target_modules=TARGETS
            ),
        )
        num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return measured(workload, ends.steps, num_trained_parameters=num_parameters)


def _plain_generation(workload: Workload) -> dict[str, Any]:
    return {"generation_kwargs": {"min_new_tokens": workload.max_seq_len}}


def _continuous_batching(workload: Workload, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """It drops a least length with a warning, so no token ends a completion here."""
    prompts = tokenizer.apply_chat_template(list(workload.prompts), add_generation_prompt=True, return_dict=True)
    longest = max(map(len, prompts["input_ids"])) + workload.max_seq_len
    pages = {
        "num_blocks": workload.num_rows * (-(-longest // _PAGE_TOKENS) + 1),  # one a row to spare
        "max_batch_tokens": min(workload.num_rows * longest, _MOST_BATCH_TOKENS),
    }
    return {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": pages,
        "generation_kwargs": {"eos_token_id": -1},
    }


def _arguments(workload: Workload, folder: str, generation: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    bf16 = precision() == "bf16"
    return GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        max_steps=workload.num_steps,
        num_generations=workload.num_generations,
        max_completion_length=workload.max_seq_len,
        per_device_train_batch_size=workload.batch_size,
        gradient_accumulation_steps=workload.num_rows // workload.batch_size,
        num_iterations=1,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        disable_dropout=True,
        use_vllm=False,
        **generation,
        shuffle_dataset=False,
        learning_rate=1e-5,
        seed=workload.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _dataset(workload: Workload) -> Any:
    """The prompts once for every step: an epoch's end is then none of a step."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": list(workload.prompts) * workload.num_steps})


def _reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return [text_reward(turns[0]["content"]) for turns in completions]
