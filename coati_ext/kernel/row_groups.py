"""Which of the rows of an experts layer belong to which expert, on the device alone."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coati_ext.kernel.moe_rows_triton import Tiles


class RowGroups:
    """Rows sorted by group.

    Args:
        offs_E: int32, the end of each group (cumulative counts), on the device of the rows.
        num_rows: R; all rows belong to a group, that is offs_E[-1] == R.
    """

    def __init__(self, offs_E: torch.Tensor, num_rows: int) -> None:
        self.offs_E, self.num_rows = offs_E, num_rows

    @cached_property
    def tiles(self) -> "Tiles":
        """For the Triton kernels; made once, for all passes."""
        from coati_ext.kernel.moe_rows_triton import tiles_of

        return tiles_of(self.offs_E, self.num_rows)
