"""A frozen weight of the experts beside the factors of its LoRA: x·W' + (s·x·A')·B' as one product.

Legend: L experts of this rank, N and K the output and input width of the weight, r rank, q columns that the factors of
one weight take together, R rows sorted by expert.

    weight.take(lora_A, lora_B)
    out_RN = weight.forward(rows, low_Rq, groups)  # low_Rq: s·x·A'
    grad_RK = weight.backward(grad, grad_low_Rq, groups)  # grad_low_Rq: s·grad·B
"""

from collections.abc import Mapping

import torch
from torch import nn

from coati_ext.kernel.copy_matrices import copy_matrices
from coati_ext.kernel.fp8_cast import dequantize_fp8
from coati_ext.kernel.fp8_gemm import dequantize_rows, fp8_rows_by_fp8, has_fp8_kernels, quantize_rows, rows_by_fp8
from coati_ext.kernel.grouped_gemm import rows_by_weights
from coati_ext.kernel.row_groups import RowGroups

# spare is a multiple of this, for the 16 bytes of the stride rule, or of the wider one, which keeps rows on cache
# lines, where it adds at most 4 % to a row.
NARROW, WIDE = 16, 64
WIDE_FROM = 25 * WIDE


class FrozenWeight:
    """What is common: where the factors of the projections that share the input lie.

    Args:
        shape: (L, N, K).
        ranks: of these projections, by name; empty: without LoRA.

    Attributes:
        spare: columns that rows are to have behind them for their low-rank product.
        a_LqK, b_LqN: the factors A one below the other, and the factors B as they contract the output, zeros where rows
            are of another projection.
    """

    spare: int
    a_LqK: torch.Tensor | None
    b_LqN: torch.Tensor | None

    def __init__(self, shape: torch.Size, ranks: Mapping[str, int]) -> None:
        _, self.width_out, self.width_in = shape
        self.ranks = dict(ranks)

    @property
    def total(self) -> int:
        """q."""
        return sum(self.ranks.values())

    @property
    def places(self) -> dict[str, tuple[slice, slice]]:
        """Rows of the weight, and columns of the factors, of each projection."""
        found, first = {}, 0
        for name, rank in self.ranks.items():
            half = self.width_out // 2
            rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
            found[name] = (rows.get(name, slice(0, self.width_out)), slice(first, first + rank))
            first += rank
        return found

    def take(self, lora_A: Mapping[str, torch.Tensor], lora_B: Mapping[str, torch.Tensor]) -> None:
        """The factors of the products that follow, by projection."""
        raise NotImplementedError

    def forward(self, rows: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        """(R, N) of rows with `spare` columns, which hold `low_Rq`, or without either."""
        raise NotImplementedError

    def backward(self, grad: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        """(R, K), the same for gradients of the output."""
        raise NotImplementedError


class PackedWeight(FrozenWeight):
    """In a buffer with room for factors, (L, N + q, K + spare), q rounded up, the weight at the top left: a library's
    product of rows with as many columns more gives both, at the cost of spare / K.

    Args:
        parameter: (L, N, K); becomes a view of the buffer.
    """

    def __init__(self, parameter: nn.Parameter, ranks: Mapping[str, int]) -> None:
        super().__init__(parameter.shape, ranks)
        multiple = WIDE if self.width_in >= WIDE_FROM else NARROW
        self.spare = -(-self.total // multiple) * multiple
        if not self.total:
            self.buffer, self.a_LqK, self.b_LqN = parameter.data, None, None
            return
        rows = self.width_out + -(-self.total // NARROW) * NARROW  # which no cache line asks to be more
        columns = self.width_in + self.spare
        self.buffer = parameter.data.new_zeros(len(parameter), rows, columns)
        self.buffer[:, : self.width_out, : self.width_in] = parameter.data
        parameter.data = self.buffer[:, : self.width_out, : self.width_in]
        self.a_LqK = self.buffer[:, self.width_out : self.width_out + self.total, : self.width_in]
        self.b_LqN = self.buffer[:, : self.width_out, self.width_in : self.width_in + self.total].transpose(1, 2)
        self._places_A = {name: self.a_LqK[:, columns] for name, (_, columns) in self.places.items()}
        self._places_B = {name: self.b_LqN[:, columns, rows].mT for name, (rows, columns) in self.places.items()}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it still is the parameter's memory."""
        return parameter.data_ptr() == self.buffer.data_ptr() and parameter.stride() == self.buffer.stride()

    @torch.no_grad()
    def take(self, lora_A: Mapping[str, torch.Tensor], lora_B: Mapping[str, torch.Tensor]) -> None:
        """Copied into their places. (As views of them they would not be contiguous, which ZeRO asks for.)"""
        if self.total:
            of_A = [(lora_A[name], place) for name, place in self._places_A.items()]
            copy_matrices([*of_A, *((lora_B[name], place) for name, place in self._places_B.items())])

    def forward(self, rows: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        weight_LNK = self.buffer[:, : self.width_out, : rows.shape[1]]
        return rows_by_weights(rows, weight_LNK.transpose(1, 2), groups.offs_E)

    def backward(self, grad: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        contracted = self.width_out if low_Rq is None else self.buffer.shape[1]
        return rows_by_weights(grad[:, :contracted], self.buffer[:, :contracted, : self.width_in], groups.offs_E)


class Fp8Weight(FrozenWeight):
    """Kept in FP8 with the scales of blocks of 128 x 128, which count anew from the first row of each part.

    Products dequantise it as they go where there is a kernel (`fp8_gemm.py`); else each makes a 16-bit copy of the
    whole weight, which is gone after it.

    Args:
        weight_LNK, scale_LIJ: float8_e4m3fn and fp32.
        num_parts: projections that lie one below the other, each of N / num_parts rows.
        fp8_compute: whether forward products are of rows in FP8 too; gradients are what they are without it.
    """

    spare = 0

    def __init__(
        self,
        weight_LNK: torch.Tensor,
        scale_LIJ: torch.Tensor,
        num_parts: int,
        ranks: Mapping[str, int],
        *,
        fp8_compute: bool = False,
    ) -> None:
        super().__init__(weight_LNK.shape, ranks)
        self._fp8_compute = fp8_compute
        self._weight_LNK, self._scale_LIJ, self._num_parts = weight_LNK, scale_LIJ, num_parts
        self.a_LqK = self.b_LqN = None

    def take(self, lora_A: Mapping[str, torch.Tensor], lora_B: Mapping[str, torch.Tensor]) -> None:
        if not self.total:
            return
        self.a_LqK = torch.cat([lora_A[name].detach() for name in self.places], dim=1)
        self.b_LqN = self.a_LqK.new_zeros(len(self.a_LqK), self.total, self.width_out)
        for name, (rows, columns) in self.places.items():
            self.b_LqN[:, columns, rows] = lora_B[name].detach().transpose(1, 2)

    def forward(self, rows: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        if self._fp8_compute:
            codes, scale_RJ = quantize_rows(rows)
            if has_fp8_kernels(rows, self._weight_LNK, self._num_parts):
                low = None if low_Rq is None else (low_Rq, self.b_LqN)
                weight = (self._weight_LNK, self._scale_LIJ)
                return fp8_rows_by_fp8(codes, scale_RJ, *weight, groups, dtype=rows.dtype, low=low)
            rows = dequantize_rows(codes, scale_RJ, dtype=rows.dtype)
        return self._product(rows, low_Rq, self.b_LqN, groups, transposed=False)

    def backward(self, grad: torch.Tensor, low_Rq: torch.Tensor | None, groups: RowGroups) -> torch.Tensor:
        return self._product(grad, low_Rq, self.a_LqK, groups, transposed=True)

    def _product(
        self,
        rows: torch.Tensor,
        low_Rq: torch.Tensor | None,
        factor_LqN: torch.Tensor | None,
        groups: RowGroups,
        *,
        transposed: bool,
    ) -> torch.Tensor:
        if has_fp8_kernels(rows, self._weight_LNK, self._num_parts):
            low = None if low_Rq is None else (low_Rq, factor_LqN)
            return rows_by_fp8(rows, self._weight_LNK, self._scale_LIJ, groups, transposed=transposed, low=low)
        weight, scale = (each.unflatten(1, (self._num_parts, -1)) for each in (self._weight_LNK, self._scale_LIJ))
        weight_LNK = dequantize_fp8(weight, scale, dtype=rows.dtype).flatten(1, 2)
        out = rows_by_weights(rows, weight_LNK if transposed else weight_LNK.transpose(1, 2), groups.offs_E)
        return out if low_Rq is None else out + rows_by_weights(low_Rq, factor_LqN, groups.offs_E)


class FrozenProduct(torch.autograd.Function):
    """`weight.forward` of rows without LoRA; differentiable in the rows."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: FrozenWeight, groups: RowGroups) -> torch.Tensor:
        ctx.weight, ctx.groups = weight, groups
        return weight.forward(rows, None, groups)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.weight.backward(grad.contiguous(), None, ctx.groups), None, None
