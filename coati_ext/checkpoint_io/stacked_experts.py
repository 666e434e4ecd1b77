"""PEFT's stacked LoRA of an experts module, to and from the LoRAs of its experts: all of it exact.

PEFT puts one LoRA on a stacked parameter (E, out, in), with lora_A (E·r, in) and lora_B (out, r·E). Rows of lora_A are
expert by expert, columns of lora_B rank by rank with the expert fastest (`ParamWrapper.get_delta_factors` in
peft/tuners/lora/layer.py). PEFT before 0.19 took the two widths the other way round, under the same keys: lora_A is
(E·r, out), lora_B (in, r·E). Shapes tell, unless out equals in. What shapes never tell is the order of lora_B's
columns, which some tools other than PEFT write expert by expert: PEFT's is assumed.

Legend: E experts, r rank, I expert intermediate; A[e] (r, in) and B[e] (out, r) are those of expert e.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from packaging.version import InvalidVersion, Version

from coati_ext.utils.adapter_files import CONFIG_FILE

ORIENTATIONS = ("0.19", "0.18")  # the PEFT release that changed it, and the last one before

Factors = tuple[list[torch.Tensor], list[torch.Tensor]]  # A[e] and B[e] of every expert


@dataclass(frozen=True, kw_only=True)
class StackedLora:
    """The LoRA of one stacked parameter, as it is in the file."""

    path: str
    """Of the experts module, e.g. model.layers.0.mlp.experts."""
    parameter: str
    """gate_up_proj or down_proj."""
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    shape: tuple[int, int, int]
    """(E, out, in) of the parameter."""

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0] // self.shape[0]

    def fits(self, orientation: str) -> bool:
        """Whether the shapes are those of this orientation."""
        num_experts, out, in_ = self.shape
        if orientation == "0.18":
            out, in_ = in_, out
        rows = self.rank * num_experts
        return rows > 0 and self.lora_A.shape == (rows, in_) and self.lora_B.shape == (out, rows)


def stack(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """A[e], B[e] of every expert -> lora_A (E·r, in), lora_B (out, r·E) as PEFT >= 0.19 has them.

    Example:
        >>> stack(([torch.tensor([[1]]), torch.tensor([[2]])], [torch.tensor([[3]]), torch.tensor([[4]])]))
        (tensor([[1],
                [2]]), tensor([[3, 4]]))
    """
    lora_A, lora_B = factors
    return torch.cat(lora_A), torch.stack(lora_B).permute(1, 2, 0).flatten(1).contiguous()


def unstack(lora: StackedLora, orientation: str) -> Factors:
    """The inverse of `stack`; also reads PEFT 0.18, whose A[e] and B[e] are each other's transpose."""
    num_experts = lora.shape[0]
    rows = lora.lora_A.view(num_experts, lora.rank, -1).unbind()
    columns = lora.lora_B.view(-1, lora.rank, num_experts).unbind(-1)
    if orientation == "0.19":
        return list(rows), list(columns)
    return [column.T for column in columns], [row.T for row in rows]


def join_gate_up(gate: Factors, up: Factors) -> Factors:
    """Gate's and up's LoRA as one of gate_up_proj: rank 2r, B block diagonal."""
    lora_A = [torch.cat(pair) for pair in zip(gate[0], up[0], strict=True)]
    return lora_A, [torch.block_diag(*pair) for pair in zip(gate[1], up[1], strict=True)]


def join_shared(gate: Factors, up: Factors) -> Factors:
    """The same where gate and up have equal A: rank r, B one above the other."""
    return gate[0], [torch.cat(pair) for pair in zip(gate[1], up[1], strict=True)]


def split_gate_up(gate_up: Factors) -> tuple[Factors, Factors]:
    """The inverse of `join_gate_up`; only where `has_blocks`."""
    lora_A, lora_B = gate_up
    r, width = lora_A[0].shape[0] // 2, lora_B[0].shape[0] // 2
    gate = [a[:r] for a in lora_A], [b[:width, :r] for b in lora_B]
    return gate, ([a[r:] for a in lora_A], [b[width:, r:] for b in lora_B])


def split_shared(gate_up: Factors) -> tuple[Factors, Factors]:
    """The inverse of `join_shared`, right for every gate_up_proj: gate and up both have its A."""
    lora_A, lora_B = gate_up
    width = lora_B[0].shape[0] // 2
    return (lora_A, [b[:width] for b in lora_B]), (lora_A, [b[width:] for b in lora_B])


def has_blocks(gate_up: Factors) -> bool:
    """Whether every B is block diagonal, so that gate and up have r rows of A each and nothing of the other's."""
    rank, width = gate_up[1][0].shape[1], gate_up[1][0].shape[0] // 2
    r = rank // 2
    return rank % 2 == 0 and not any(torch.any(b[:width, r:]) or torch.any(b[width:, :r]) for b in gate_up[1])


def tell_orientation(
    loras: Sequence[StackedLora], *, peft_version: str | None, asked: str | None, source: str
) -> tuple[str, str]:
    """The orientation of a file, and what tells it.

    Args:
        peft_version: as the config records it (PEFT 0.18 was the first to do so).
        asked: what the user says; of `ORIENTATIONS`.
        source: the file, for the messages.

    Raises:
        ValueError: shapes of neither, shapes that the version or the user contradicts, or nothing that tells.
    """
    if asked is not None and asked not in ORIENTATIONS:
        raise ValueError(f"--peft-orientation {asked} is unknown; accepted: {', '.join(ORIENTATIONS)}")
    fitting = [o for o in ORIENTATIONS if all(lora.fits(o) for lora in loras)]
    if not fitting:
        odd = next((lora for lora in loras if not any(lora.fits(o) for o in ORIENTATIONS)), loras[0])
        experts, out, in_ = odd.shape
        raise ValueError(
            f"{source}: LoRA of {odd.path}.{odd.parameter} has lora_A {tuple(odd.lora_A.shape)} and lora_B "
            f"{tuple(odd.lora_B.shape)}; expected, for rank r, ({experts}r, {in_}) and ({out}, {experts}r), or, from "
            f"PEFT before 0.19, ({experts}r, {out}) and ({in_}, {experts}r), alike in all layers. Is it for another "
            "base model?"
        )
    recorded = _orientation_of(peft_version)
    if asked is not None:
        if asked not in fitting:
            raise ValueError(f"{source}: --peft-orientation {asked} does not fit the shapes, which are of {fitting[0]}")
        return asked, f"as --peft-orientation {asked} says"
    if recorded is not None and recorded not in fitting:
        raise ValueError(
            f"{source}: peft_version is {peft_version}, but the shapes are those of PEFT {fitting[0]}. Another tool "
            f"wrote it; if it orders lora_B as PEFT does, pass --peft-orientation {fitting[0]}."
        )
    if recorded is not None:
        return recorded, f"recorded as peft_version {peft_version}"
    if len(fitting) == 1:
        return fitting[0], "told by the shapes"
    _, out, in_ = loras[0].shape
    raise ValueError(
        f"{source}: an expert's {loras[0].parameter} is {out} x {in_} and {CONFIG_FILE} records no peft_version, so "
        "nothing tells PEFT before 0.19 from later ones: pass --peft-orientation 0.18 or 0.19"
    )


def _orientation_of(peft_version: str | None) -> str | None:
    """None also for what is no version number."""
    try:
        release = Version((peft_version or "").partition("@")[0]).release  # a development version has @commit
    except InvalidVersion:
        return None
    return "0.19" if release >= (0, 19) else "0.18"
