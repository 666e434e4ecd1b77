"""Completions in the training process: the model as it is, with its adapter, its expert and its tensor parallelism.

    sampling = Sampling(max_new_tokens=256, stop_ids=(2,))
    completions = generate(model, prompts, sampling, num_samples=8, seed=(run_seed, step), group=ep_group)

A prompt goes through the model once and its cache is repeated for its samples. Rows that have ended leave the batch,
waiting prompts take their place. The noise of a token depends on (seed, prompt, sample, position) alone, so a
completion is the same whatever else is in the batch, on however many ranks (up to the rounding of the logits, which in
16 bits differs with the shape of a batch). torch's own random numbers are not touched.

Ranks that share experts meet in every MoE layer, so all ranks of `group` call the model equally often: a turn is one
call of the model, for new prompts, for the next token of all rows, or for one dummy token where a rank has no rows. On
an accelerator the host looks at the tokens every `_TURNS_BETWEEN_READS` turns only; what a row has drawn past its end
is thrown away. On a GPU a turn for the next token is a CUDA graph where it can be one (`decode_graph`). Left out:
speculative decoding, beams.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coati_ext.models.decode_engine import DecodeEngine, Row, forward
from coati_ext.models.decode_graph import StaticStep, can_capture
from coati_ext.models.sampling import Sampling, row_key
from coati_ext.models.sequence_parallel import is_sequence_sharded
from coati_ext.models.shard import PassThrough
from coati_ext.models.stop_strings import StopStrings
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.collective import errors_everywhere

__all__ = ["Completions", "Sampling", "generate"]

_TURNS_BETWEEN_READS = 8  # on an accelerator, where a read waits for the device


@dataclass(kw_only=True)
class Completions:
    """num_samples completions of prompt 0, then of prompt 1, ...

    Attributes:
        ids: tokens of each, the stop token included.
        log_probs: of each token under the distribution it was drawn from (temperature, top-k, top-p); at temperature 0
            those of temperature 1. From fp32 logits.
        finished: False for those cut at max_new_tokens.
    """

    ids: list[list[int]]
    log_probs: list[list[float]]
    finished: list[bool]


def generate(
    model: nn.Module,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    seed: tuple[int, ...],
    prompt_numbers: list[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    group: dist.ProcessGroup | None = None,
    batch_size: int | None = None,
    pad_id: int = 0,
    turns_between_reads: int | None = None,
    cuda_graphs: bool | None = None,
) -> Completions:
    """Draw `num_samples` completions of every prompt, in eval mode; leaves the model as it was.

    Without gradients, but not in inference mode: what a model keeps from its forward (rotary tables that grow) would be
    an inference tensor, which autograd refuses in the next training step.

    Args:
        model: a causal language model of transformers, or a wrapper around one.
        prompts: token ids of each; ranks of `group` may have different ones, or none. Ranks of tensor parallelism must
            have the same.
        prompt_numbers: the prompts' numbers over all ranks, for noise that does not depend on who has which; default
            their positions in the list.
        tokenizer: for stop strings.
        group: ranks that must call the model together: those of expert parallelism.
        batch_size: most rows at a time on this rank; default all.
        pad_id: any valid token; padding is masked by length, so a stop id will do.
        turns_between_reads: the same on all ranks of `group`; default 8 on accelerators, 1 on CPUs.
        cuda_graphs: whether the step for the next tokens is a CUDA graph. None: where `can_capture` allows it; if a
            capture fails, generation goes on without, with a warning. True: ValueError in both cases. False: never.

    Raises:
        ValueError: a prompt that is empty or too long for the model, arguments that do not fit, a model that cannot
            generate here (pipeline stages, a cache of an unknown class), logits that are not finite. On all ranks of
            `group`.
    """
    with errors_everywhere(group):
        inner = causal_lm(model)
        numbers = list(range(len(prompts))) if prompt_numbers is None else prompt_numbers
        _check(inner, prompts, sampling, numbers, num_samples, batch_size)
        graphs, reason = can_capture(inner, group=group)
        if cuda_graphs and not graphs:
            raise ValueError(f"cuda_graphs=True, but {reason}; use cuda_graphs=None")
        stop_strings = StopStrings(sampling.stop_strings, tokenizer)
    rows = [
        [Row(prompt=p, key=row_key(seed, number, sample)) for sample in range(num_samples)]
        for p, number in enumerate(numbers)
    ]
    device = inner.get_input_embeddings().weight.device
    if turns_between_reads is None:
        turns_between_reads = 1 if device.type == "cpu" else _TURNS_BETWEEN_READS
    batch_size = batch_size or max(1, len(prompts) * num_samples)
    common = {"model": inner, "sampling": sampling, "pad_id": pad_id, "device": device}
    static = None
    if graphs and cuda_graphs is not False:
        static = StaticStep(**common, forward=forward, most_rows=batch_size, required=bool(cuda_graphs))
    with torch.no_grad(), _as_it_was(inner):
        engine = DecodeEngine(
            **common, prompts=prompts, stop_strings=stop_strings, batch_size=batch_size, static=static
        )
        engine.submit(rows)
        while True:
            for _ in range(turns_between_reads):
                engine.turn(dummy=group is not None)
            engine.read()
            if not _any_left(engine, group):
                break
    in_order = [row for of_prompt in rows for row in of_prompt]
    return Completions(
        ids=[row.ids for row in in_order],
        log_probs=[row.log_probs for row in in_order],
        finished=[row.finished for row in in_order],
    )


def _any_left(engine: DecodeEngine, group: dist.ProcessGroup | None) -> bool:
    """Whether a rank has rows to go on with; raises on all ranks if one has met an error."""
    left, wrong = engine.num_left, bool(engine.error)
    if group is not None:
        counts = torch.tensor([left, wrong], device=engine.device)
        dist.all_reduce(counts, group=group)
        left, wrong = counts.tolist()
    if wrong:
        raise ValueError(engine.error or "generation failed on another rank, which names the prompt")
    return left > 0


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside whatever wraps it."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} holds no transformers model that could generate")
    if any(isinstance(module, PassThrough) for module in inner.modules()):
        raise ValueError(f"{type(inner).__name__} is a pipeline stage: generation needs the whole model; use pp=1")
    if is_sequence_sharded(inner):
        raise ValueError(
            f"{type(inner).__name__} has its rows spread over ranks: generation needs whole rows; use sp=1"
        )
    return inner


def _check(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: Sampling,
    numbers: list[int],
    num_samples: int,
    batch_size: int | None,
) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; accepted: 1 or more")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; accepted: 1 or more, or None for all rows at once")
    if len(numbers) != len(prompts):
        raise ValueError(f"prompt_numbers has {len(numbers)} numbers for {len(prompts)} prompts")
    config = model.config.get_text_config()
    strange = [token for token in sampling.stop_ids if token >= config.vocab_size]
    if strange:
        raise ValueError(f"stop_ids: {strange[0]} is not in the model's vocabulary of {config.vocab_size}")
    most = getattr(config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; at least a BOS token is needed")
        if most is not None and len(prompt) + sampling.max_new_tokens > most:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens: with max_new_tokens={sampling.max_new_tokens} that is over "
                f"the model's {most} positions (max_position_embeddings)"
            )


@contextmanager
def _as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode for the block; afterwards each module's own mode and the count of routed rows, which is training's."""
    modes = [(module, module.training) for module in model.modules()]
    counts = [
        (module.tokens_per_expert_E, module.tokens_per_expert_E.clone())
        for module in model.modules()
        if isinstance(module, MoeExperts)
    ]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, count in counts:
            buffer.copy_(count)
