"""Samples of unequal length -> few full rows: several samples end to end in a row, none of which sees another.

Only padding disappears. A micro-batch still takes `batch_size` samples, so that steps, schedule and data order, the
loss and its gradients are those of the unpacked run.

What keeps the samples of a row apart is position_ids that restart with each sample and NO attention mask: transformers
then makes the mask block-diagonal (`masking_utils.find_packed_sequence_indices`; eager, SDPA and flex attention) or
finds the sequences of flash attention (`modeling_flash_attention_utils._is_packed_sequence`). Both are conventions
that a model can miss without an error, so `check_packing_supported` proves it on the model at hand.

R rows, S tokens of the widest row, rounded up, H hidden.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from coati_ext.dataset.collator import IGNORE_INDEX, ConversationCollator

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Batch = dict[str, torch.Tensor]

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class PackedCollator(ConversationCollator):
    """Packs the samples of a micro-batch into the rows that `pack_rows` plans.

    The first token of a sample is never a label: the last token of the sample before it would have to predict it. The
    padding at a row's end is a sequence of its own, not supervised, with positions no larger than a sample's (rotary
    embeddings that scale with the largest position stay as they are).

    An EMPTY list of samples gives one unsupervised token, as in `ConversationCollator`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | int",
        max_length: int,
        *,
        pad_to_multiple_of: int = 1,
        single_row: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: a tokenizer, or the pad token's id.
            max_length: the most tokens of a sample and, before rounding up, of a row.
            single_row: put all samples in one row, however long. Flash attention needs it (it looks for packed
                samples in batches of one row only) and its cost does not grow with the row; a mask's would.
        """
        super().__init__(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; expected at least 1")
        self.max_length = max_length
        self.single_row = single_row

    def __call__(self, samples: Sequence[Batch]) -> Batch:
        """Samples {"input_ids", "labels"}, each (S_i,) -> {"input_ids", "position_ids", "labels"}, (R, S), int64.

        Besides "num_tokens", (R,): the tokens of each row that are not padding. See `num_real_tokens`.

        Raises:
            ValueError: a sample is empty or longer than `max_length`.
        """
        lengths = [len(sample["input_ids"]) for sample in samples]
        self._check(lengths)
        if not samples:
            rows: list[list[int]] = [[]]
        else:
            rows = [list(range(len(samples)))] if self.single_row else pack_rows(lengths, self.max_length)
        num_tokens_R = torch.tensor([sum(lengths[index] for index in row) for row in rows])
        longest, widest = max(lengths, default=1), max(1, int(num_tokens_R.max()))
        shape_RS = (len(rows), -(-widest // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        input_ids_RS = torch.full(shape_RS, self.pad_token_id, dtype=torch.long)
        position_ids_RS = torch.zeros(shape_RS, dtype=torch.long)
        labels_RS = torch.full(shape_RS, IGNORE_INDEX, dtype=torch.long)
        for number, row in enumerate(rows):
            start = 0
            for index in row:
                end = start + lengths[index]
                input_ids_RS[number, start:end] = samples[index]["input_ids"]
                position_ids_RS[number, start:end] = torch.arange(lengths[index])
                labels_RS[number, start + 1 : end] = samples[index]["labels"][1:]
                start = end
            position_ids_RS[number, start:] = torch.arange(shape_RS[1] - start) % longest
        if not samples:
            num_tokens_R[0] = 1
        return {
            "input_ids": input_ids_RS,
            "position_ids": position_ids_RS,
            "labels": labels_RS,
            "num_tokens": num_tokens_R,
        }

    def _check(self, lengths: list[int]) -> None:
        for index, length in enumerate(lengths):
            if not 1 <= length <= self.max_length:
                raise ValueError(
                    f"sample {index} of the micro-batch has {length} tokens; packing takes 1 to max_length "
                    f"{self.max_length}: cut the data set to the same --max_length"
                )


def pack_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Which samples (by index) go into which row: as few rows as first-fit decreasing finds, then as narrow as it can.

    First-fit decreasing takes at most 11/9 of the fewest possible rows, plus 6/9 of one (Dósa 2007). It fills the first
    rows to the brim and leaves the last one to padding, so the narrowest width that needs no more rows is searched by
    bisection (multifit: Coffman, Garey and Johnson 1978). Equal lengths keep their order; no length may pass
    `max_length`.

    Example:
        >>> pack_rows([4, 1, 6, 3], 10)
        [[2, 1], [0, 3]]
    """
    if not lengths:
        return []
    best = _first_fit_decreasing(lengths, max_length)
    narrow, wide = max(*lengths, -(-sum(lengths) // len(best))), _width(best, lengths)
    while narrow < wide:
        width = (narrow + wide) // 2
        rows = _first_fit_decreasing(lengths, width)
        if len(rows) <= len(best):
            best, wide = rows, _width(rows, lengths)
        else:
            narrow = width + 1
    return best


def num_real_tokens(batch: Batch) -> torch.Tensor:
    """Tokens of a batch that are not padding (0-dim int64), packed or not.

    Example:
        >>> sample = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, 6])}
        >>> [int(num_real_tokens(collate([sample]))) for collate in (PackedCollator(0, 4), ConversationCollator(0))]
        [2, 2]
    """
    return (batch["num_tokens"] if "num_tokens" in batch else batch["attention_mask"]).sum()


def model_inputs(batch: Batch) -> Batch:
    """What of a batch, packed or not, goes to the model; labels and counts stay behind."""
    return {name: batch[name] for name in _MODEL_INPUTS if name in batch}


def check_packing_supported(model: nn.Module, *, single_row: bool = False) -> None:
    """Prove on the model itself, in one pass over 16 tokens, that packed samples stay apart.

    Differentiates the hidden states of the second sample of each row by the embeddings. What a mask hides has a
    gradient of exactly 0 in any precision, so nothing need be known of the model: its mask, its attention, a state
    that runs along the row. The same pass shows that a sample does see itself. Parameters get no gradient.

    Args:
        model: as it is trained, with its weights, whole or a pipeline stage, before or after `boost`. All ranks that
            share experts must call this together.
        single_row: as given to `PackedCollator`.

    Raises:
        ValueError: the model takes no position_ids, or does not keep samples apart, and the likely cause.
    """
    inner = model.unwrap() if hasattr(model, "unwrap") else model
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(f"--packing: {type(inner).__name__} takes no position_ids, which packing needs; turn it off")
    samples = [{"input_ids": torch.arange(n) + n, "labels": torch.arange(n)} for n in (5, 3, 4, 2)]
    batch = PackedCollator(0, max_length=8, pad_to_multiple_of=8, single_row=single_row)(samples)
    sequence_RS = (batch["position_ids"] == 0).cumsum(dim=-1)
    second_RS = sequence_RS == 2
    last_RS = second_RS & (sequence_RS.roll(-1, dims=-1) != 2)
    from_second_RSH, from_last_RSH = _embedding_gradients(inner, batch["position_ids"], (second_RS, last_RS))
    if from_second_RSH[~second_RS].any():  # NaN counts
        raise ValueError(
            f"--packing: {type(inner).__name__} lets tokens see other samples of their row: "
            f"{_likely_cause(inner.config, single_row)}"
        )
    first_RS = second_RS & (batch["position_ids"] == 0)
    if not from_last_RSH[first_RS].any(dim=-1).all():
        raise ValueError(f"--packing: {type(inner).__name__} hides a packed sample's tokens from itself; turn it off")


def _embedding_gradients(
    model: "PreTrainedModel", position_ids_RS: torch.Tensor, masks: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Per mask (R, S): the gradient (R, S, H) of a fixed mix of the hidden states there by the token embeddings."""
    base = model.base_model
    like = next(base.parameters())
    width = model.config.get_text_config().hidden_size
    embeds_RSH = torch.arange(float(position_ids_RS.numel() * width)).sin().view(*position_ids_RS.shape, width)
    embeds_RSH = embeds_RSH.to(like.device, like.dtype).requires_grad_()
    training = {module: module.training for module in model.modules()}
    model.eval()  # no dropout: the random state stays that of a run without this check
    try:
        with torch.enable_grad():
            out_RSH = base(inputs_embeds=embeds_RSH, position_ids=position_ids_RS.to(like.device)).last_hidden_state
            mixed_RS = out_RSH.float() @ torch.arange(1.0, width + 1, device=like.device).sin()
            return [
                torch.autograd.grad(mixed_RS[mask.to(like.device)].sum(), embeds_RSH, retain_graph=True)[0].cpu()
                for mask in masks
            ]
    finally:
        for module, mode in training.items():
            module.training = mode


def _likely_cause(config: "PretrainedConfig", single_row: bool) -> str:
    config = config.get_text_config()
    if getattr(config, "use_cache", False):
        return "with a cache, transformers looks for no packed samples; set model.config.use_cache = False"
    attention = str(config._attn_implementation)
    if "flash" in attention and not single_row:
        return f"{attention} looks for packed samples in batches of one row only; collate with single_row=True"
    kinds = sorted({kind for kind in getattr(config, "layer_types", None) or () if "linear" in kind or "conv" in kind})
    if kinds:
        return f"its {', '.join(kinds)} layers run along the whole row; turn packing off"
    return (
        f"it makes its mask (attention {attention}) without position_ids, or its layers keep a state; turn packing off"
    )


def _first_fit_decreasing(lengths: Sequence[int], width: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, left in enumerate(free) if lengths[index] <= left), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def _width(rows: list[list[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)
