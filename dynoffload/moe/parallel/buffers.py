"""Memory for the rows of parts: used again for later parts, or fresh each time.

What it is: `Buffers`. What it is not: who may overwrite what when; that is the pipeline's order
(`dynoffload.moe.parallel.pipeline`).
"""

from __future__ import annotations

import torch


class Buffers:
    """Memory of one purpose, of which as much is made as is in use at one time.

    Args:
        like: dtype and device.
        width: of a row.
        rows: of the largest part.
        reuse: what is freed is taken again; otherwise it is dropped.
    """

    def __init__(self, like: torch.Tensor, width: int, rows: int, reuse: bool) -> None:
        self._like, self._width, self._rows, self._reuse = like, width, rows, reuse
        self._free: list[torch.UntypedStorage] = []

    def take(self, rows: int) -> torch.Tensor:
        """Return memory of ``rows`` rows, with whatever bytes."""
        if not self._reuse:
            return self._like.new_empty(rows, self._width)
        if self._free:
            whole = self._like.new_empty(0).set_(self._free.pop())
        else:
            whole = self._like.new_empty(self._rows * self._width)
        return whole[: rows * self._width].view(rows, self._width)

    def free(self, rows: torch.Tensor) -> None:
        """Nobody reads or writes these rows any more."""
        if self._reuse:
            self._free.append(rows.untyped_storage())
