"""Which of the rows of an experts layer belong to which expert, on the device alone."""

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
        self._tiles: dict[int, Tiles] = {}

    @property
    def tiles(self) -> "Tiles":
        """Those of the passes over the rows."""
        from coati_ext.kernel.moe_rows_triton import height_for

        return self.tiles_of(height_for(self.num_rows))

    def tiles_of(self, height: int) -> "Tiles":
        """Tiles of at most `height` rows for the Triton kernels; made once, for all passes."""
        from coati_ext.kernel.moe_rows_triton import tiles_of

        if height not in self._tiles:
            self._tiles[height] = tiles_of(self.offs_E, self.num_rows, height)
        return self._tiles[height]
