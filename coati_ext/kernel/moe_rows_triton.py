"""Triton kernels of `moe_rows.py`, which says what they compute: one pass over the rows, fp32 inside.

Legend: T tokens, K top-k, R rows sorted by group, E groups, H hidden, I expert intermediate, q columns of the factors,
M tiles of rows.

With factors a program has a tile of rows of one group, and keeps their product in registers while the rows go through.
Where the factors are wide, several programs do so for some columns each, and the first of them alone writes the rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coati_ext.kernel.moe_rows import LowRank

ROWS = (64, 32, 16)  # of a tile: the most of which there are ENOUGH
ENOUGH = 256  # tiles, two for each multiprocessor of an H200
WIDTH = 128  # columns of the rows that a program has at a time, beside the factors
WIDEST = 2048  # the same where a program has one row and no factors
FACTOR = 64  # columns of the factors that a program takes
NUM_WARPS, NUM_STAGES = 4, 3


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """start_E: int32, (E + 1,), where each group begins, and the end of the last.
    first_tile_E: int32, (E + 1,), the first tile of rows of each group, and the number of all.
    group_M: int32, the group of each tile; what is behind the last is not set.
    height: rows of a tile.
    """

    start_E: torch.Tensor
    first_tile_E: torch.Tensor
    group_M: torch.Tensor
    height: int


def height_for(num_rows: int) -> int:
    """Of the tiles of the passes over these rows."""
    return next((height for height in ROWS if num_rows >= ENOUGH * height), ROWS[-1])


def tiles_of(offs_E: torch.Tensor, num_rows: int, height: int) -> Tiles:
    """Tiles of at most `height` rows, each of one group, made on the device."""
    num_groups = offs_E.shape[0]
    start_E, first_tile_E = offs_E.new_empty(num_groups + 1), offs_E.new_empty(num_groups + 1)
    group_M = offs_E.new_empty(num_rows // height + num_groups)
    _tiles[(num_groups + 1,)](
        offs_E, start_E, first_tile_E, group_M, num_groups,
        GROUPS=triton.next_power_of_2(num_groups), ROWS=height, num_warps=1,
    )  # fmt: skip
    return Tiles(start_E=start_E, first_tile_E=first_tile_E, group_M=group_M, height=height)


@triton.jit
def _tiles(ends, start, first_tile, group_of, num_groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """One program a group, and one for the end: where it begins, from the sizes of all before it."""
    group = tl.program_id(0)
    e = tl.arange(0, GROUPS)
    end = tl.load(ends + e, mask=e < num_groups, other=0)
    size = end - tl.load(ends + e - 1, mask=(e > 0) & (e < num_groups), other=0)
    size = tl.where(e < num_groups, size, 0)
    num_tiles = (size + ROWS - 1) // ROWS
    first = tl.sum(tl.where(e < group, num_tiles, 0), 0)
    tl.store(start + group, tl.sum(tl.where(e < group, size, 0), 0))
    tl.store(first_tile + group, first)
    for tile in range(first, first + tl.sum(tl.where(e == group, num_tiles, 0), 0)):
        tl.store(group_of + tile, group)


@triton.jit
def _rows_of_tile(tile, start, first_tile, group_of, ROWS: tl.constexpr):
    """The tile's group, its rows, and which of them there are."""
    group = tl.load(group_of + tile)
    at = tl.load(start + group) + (tile - tl.load(first_tile + group)) * ROWS + tl.arange(0, ROWS)
    return group.to(tl.int64), at.to(tl.int64), at < tl.load(start + group + 1)


@triton.jit
def _store_low(acc, out, out_row, at, valid, q, spare, Q: tl.constexpr, SPARE: tl.constexpr, low):
    """A product on its own, and, if rows are to have it, behind them, with zeros behind all from the last program."""
    f = tl.program_id(1) * Q + tl.arange(0, Q)
    value = acc.to(low.dtype.element_ty)
    tl.store(low + at[:, None] * q + f, value, mask=valid[:, None] & (f < q))
    if SPARE > 0:
        behind = out + at[:, None] * out_row
        tl.store(behind + f, value, mask=valid[:, None] & (f < q))
        if tl.program_id(1) == tl.num_programs(1) - 1:
            rest = tl.arange(0, SPARE)
            zeros = tl.zeros((acc.shape[0], SPARE), low.dtype.element_ty)
            tl.store(behind + rest, zeros, mask=valid[:, None] & (rest >= q) & (rest < spare))


# --- gather


@triton.jit
def _gather_rows(source, index, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    of_row = source + tl.load(index + row).to(tl.int64) * width
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        tl.store(out + row * width + columns, tl.load(of_row + columns, mask=mask), mask=mask)


@triton.jit
def _gather_rows_low(
    source, index, out, low, factor, start, first_tile, group_of, num_groups, width, q, spare,
    factor_group, factor_q, factor_k, scaling,
    Q: tl.constexpr, SPARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(first_tile + num_groups):
        group, at, valid = _rows_of_tile(tile, start, first_tile, group_of, ROWS)
        of_rows = source + tl.load(index + at, mask=valid, other=0).to(tl.int64)[:, None] * width
        out_row = width + spare
        f = tl.program_id(1) * Q + tl.arange(0, Q)
        of_factor = factor + group * factor_group + f[None, :] * factor_q
        acc = tl.zeros((ROWS, Q), tl.float32)
        for first in range(0, width, BLOCK):
            k = first + tl.arange(0, BLOCK)
            mask = valid[:, None] & (k < width)
            x = tl.load(of_rows + k, mask=mask, other=0.0)
            if tl.program_id(1) == 0:
                tl.store(out + at[:, None] * out_row + k, x, mask=mask)
            there = (k < width)[:, None] & (f < q)[None, :]
            acc = tl.dot(x, tl.load(of_factor + k[:, None] * factor_k, mask=there, other=0.0), acc)
        _store_low(acc * scaling, out + width, out_row, at, valid, q, spare, Q, SPARE, low)


def gather_rows_triton(
    source_TH: torch.Tensor, index_R: torch.Tensor, low: LowRank | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, width = index_R.shape[0], source_TH.shape[1]
    if low is None:
        out = source_TH.new_empty(num_rows, width)
        _gather_rows[(num_rows,)](source_TH, index_R, out, width, BLOCK=_block(width), num_warps=NUM_WARPS)
        return out, None
    out, low_Rq, operands = _with_low(source_TH, num_rows, width, low)
    _gather_rows_low[_grid(low)](
        source_TH, index_R, out, low_Rq, *operands, **_blocks(low), num_warps=NUM_WARPS, num_stages=NUM_STAGES
    )
    return out, low_Rq


def _with_low(like: torch.Tensor, num_rows: int, width: int, low: LowRank) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Wide rows, the low-rank product of its own, and the arguments of a kernel that makes them."""
    num_groups, q, _ = low.factor_EqK.shape
    tiles = low.groups.tiles
    out, low_Rq = like.new_empty(num_rows, width + low.spare), like.new_empty(num_rows, q)
    operands = (
        low.factor_EqK, tiles.start_E, tiles.first_tile_E, tiles.group_M, num_groups, width, q, low.spare,
        *low.factor_EqK.stride(), low.scaling,
    )  # fmt: skip
    return out, low_Rq, operands


def _grid(low: LowRank) -> tuple[int, int]:
    q = low.factor_EqK.shape[1]
    return low.groups.tiles.group_M.shape[0], triton.cdiv(q, factor_block(q))


def _blocks(low: LowRank, width: int = WIDTH) -> dict[str, int]:
    spare = triton.next_power_of_2(low.spare) if low.spare else 0
    return {
        "Q": factor_block(low.factor_EqK.shape[1]),
        "SPARE": spare,
        "ROWS": low.groups.tiles.height,
        "BLOCK": width,
    }


# --- sum


@triton.jit
def _sum_rows(rows, position, out, width, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(position + token * K + k).to(tl.int64)
        total += tl.load(rows + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=mask)


def sum_rows_triton(rows_RH: torch.Tensor, position_TK: torch.Tensor) -> torch.Tensor:
    (num_tokens, top_k), width = position_TK.shape, rows_RH.shape[1]
    out = rows_RH.new_empty(num_tokens, width)
    block = min(_block(width), 1024)
    _sum_rows[(num_tokens, triton.cdiv(width, block))](
        rows_RH, position_TK, out, width, rows_RH.stride(0), K=top_k, BLOCK=block, num_warps=NUM_WARPS
    )
    return out


# --- the gated activation


@triton.jit
def _swiglu_rows(gate_up, weight, order, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    of_row = tl.load(weight + tl.load(order + row)).to(tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(gate_up + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
        act = gate * tl.sigmoid(gate) * up * of_row
        tl.store(out + row * width + columns, act.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_rows_low(
    gate_up, weight, order, out, low, factor, start, first_tile, group_of, num_groups, width, q, spare,
    factor_group, factor_q, factor_k, scaling,
    Q: tl.constexpr, SPARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(first_tile + num_groups):
        group, at, valid = _rows_of_tile(tile, start, first_tile, group_of, ROWS)
        weight_at = tl.load(order + at, mask=valid, other=0)
        of_rows = tl.load(weight + weight_at, mask=valid, other=0.0).to(tl.float32)[:, None]
        out_row = width + spare
        f = tl.program_id(1) * Q + tl.arange(0, Q)
        of_factor = factor + group * factor_group + f[None, :] * factor_q
        acc = tl.zeros((ROWS, Q), tl.float32)
        for first in range(0, width, BLOCK):
            k = first + tl.arange(0, BLOCK)
            mask = valid[:, None] & (k < width)
            from_here = gate_up + at[:, None] * (2 * width) + k
            gate = tl.load(from_here, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(from_here + width, mask=mask, other=0.0).to(tl.float32)
            act = (gate * tl.sigmoid(gate) * up * of_rows).to(out.dtype.element_ty)
            if tl.program_id(1) == 0:
                tl.store(out + at[:, None] * out_row + k, act, mask=mask)
            there = (k < width)[:, None] & (f < q)[None, :]
            acc = tl.dot(act, tl.load(of_factor + k[:, None] * factor_k, mask=there, other=0.0), acc)
        _store_low(acc * scaling, out + width, out_row, at, valid, q, spare, Q, SPARE, low)


def swiglu_rows_triton(
    gate_up_R2I: torch.Tensor, weight_R: torch.Tensor, order_R: torch.Tensor, low: LowRank | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, width = gate_up_R2I.shape[0], gate_up_R2I.shape[1] // 2
    if low is None:
        out = gate_up_R2I.new_empty(num_rows, width)
        _swiglu_rows[(num_rows,)](gate_up_R2I, weight_R, order_R, out, width, BLOCK=_block(width), num_warps=NUM_WARPS)
        return out, None
    out, low_Rq, operands = _with_low(gate_up_R2I, num_rows, width, low)
    _swiglu_rows_low[_grid(low)](
        gate_up_R2I,
        weight_R,
        order_R,
        out,
        low_Rq,
        *operands,
        **_blocks(low),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out, low_Rq


@triton.jit
def _swiglu_gradients(grad, gate, up, of_row):
    """The gradients of gate and up, and the activation without its weight."""
    sigmoid = tl.sigmoid(gate)
    from_act = grad * of_row
    return from_act * up * sigmoid * (1 + gate * (1 - sigmoid)), from_act * gate * sigmoid, gate * sigmoid * up


@triton.jit
def _swiglu_rows_backward(grad, gate_up, weight, order, grad_gate_up, grad_weight, act_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    of_row = tl.load(weight + tl.load(order + row)).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(gate_up + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
        from_out = tl.load(grad + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        from_gate, from_up, act = _swiglu_gradients(from_out, gate, up, of_row)
        total += from_out * act
        to = grad_gate_up + row * 2 * width + columns
        tl.store(to, from_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(to + width, from_up.to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(act_out + row * width + columns, (act * of_row).to(act_out.dtype.element_ty), mask=mask)
    tl.store(grad_weight + tl.load(order + row), tl.sum(total, 0).to(grad_weight.dtype.element_ty))


@triton.jit
def _swiglu_rows_backward_low(
    grad, gate_up, weight, order, grad_weight, act_out, out, low, factor, start, first_tile, group_of, num_groups,
    width2, q, spare, factor_group, factor_q, factor_k, scaling,
    Q: tl.constexpr, SPARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(first_tile + num_groups):
        group, at, valid = _rows_of_tile(tile, start, first_tile, group_of, ROWS)
        weight_at = tl.load(order + at, mask=valid, other=0)
        of_rows = tl.load(weight + weight_at, mask=valid, other=0.0).to(tl.float32)[:, None]
        width, out_row = width2 // 2, width2 + spare
        f = tl.program_id(1) * Q + tl.arange(0, Q)
        of_factor = factor + group * factor_group + f[None, :] * factor_q
        acc = tl.zeros((ROWS, Q), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for first in range(0, width, BLOCK):
            k = first + tl.arange(0, BLOCK)
            mask = valid[:, None] & (k < width)
            from_here = gate_up + at[:, None] * width2 + k
            gate = tl.load(from_here, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(from_here + width, mask=mask, other=0.0).to(tl.float32)
            from_out = tl.load(grad + at[:, None] * width + k, mask=mask, other=0.0).to(tl.float32)
            from_gate, from_up, act = _swiglu_gradients(from_out, gate, up, of_rows)
            total += tl.sum(from_out * act, 1)
            from_gate, from_up = from_gate.to(out.dtype.element_ty), from_up.to(out.dtype.element_ty)
            if tl.program_id(1) == 0:
                to = out + at[:, None] * out_row + k
                tl.store(to, from_gate, mask=mask)
                tl.store(to + width, from_up, mask=mask)
                weighted = (act * of_rows).to(act_out.dtype.element_ty)
                tl.store(act_out + at[:, None] * width + k, weighted, mask=mask)
            there = (k < width)[:, None] & (f < q)[None, :]
            acc = tl.dot(from_gate, tl.load(of_factor + k[:, None] * factor_k, mask=there, other=0.0), acc)
            of_up = of_factor + (width + k)[:, None] * factor_k
            acc = tl.dot(from_up, tl.load(of_up, mask=there, other=0.0), acc)
        if tl.program_id(1) == 0:
            tl.store(grad_weight + weight_at, total.to(grad_weight.dtype.element_ty), mask=valid)
        _store_low(acc * scaling, out + width2, out_row, at, valid, q, spare, Q, SPARE, low)


def swiglu_rows_backward_triton(
    grad_RI: torch.Tensor, gate_up_R2I: torch.Tensor, weight_R: torch.Tensor, order_R: torch.Tensor, low: LowRank | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    num_rows, width = grad_RI.shape
    grad_weight, act = torch.empty_like(weight_R), torch.empty_like(grad_RI)
    if low is None:
        out = torch.empty_like(gate_up_R2I)
        _swiglu_rows_backward[(num_rows,)](
            grad_RI, gate_up_R2I, weight_R, order_R, out, grad_weight, act, width,
            BLOCK=min(_block(width), 1024), num_warps=NUM_WARPS,
        )  # fmt: skip
        return out, None, grad_weight, act
    out, low_Rq, operands = _with_low(grad_RI, num_rows, 2 * width, low)
    _swiglu_rows_backward_low[_grid(low)](
        grad_RI, gate_up_R2I, weight_R, order_R, grad_weight, act, out, low_Rq, *operands, **_blocks(low, WIDTH // 2),
        num_warps=NUM_WARPS, num_stages=NUM_STAGES - 1,
    )  # fmt: skip
    return out, low_Rq, grad_weight, act


def factor_block(q: int) -> int:
    """A product of Triton's has at least 16 columns."""
    return min(FACTOR, max(16, triton.next_power_of_2(q)))


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), WIDEST)
