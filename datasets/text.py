"""Byte sequences of Python source, for language models.

An endless, seeded stream of batches of bytes, with the next byte of each as target. Each batch
records the file it was cut from, so that samples can be split by file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynoffload.datasets.sources import DataError, SourceFile, Split, source_files

VOCABULARY = 256
"""Number of different tokens, one for each byte value."""


@dataclass(frozen=True)
class TextBatch:
    """Rows of consecutive bytes of one file.

    Attributes:
        tokens: int64 ``[rows, length]``.
        targets: int64 ``[rows, length]``: the token after each token.
        source: the name of the file.
    """

    tokens: Tensor
    targets: Tensor
    source: str


def batches(
    split: Split | str = Split.TRAIN,
    *,
    rows: int = 1,
    length: int = 256,
    seed: int = 0,
    root: Path | None = None,
) -> Iterator[TextBatch]:
    """Yield batches of source text endlessly, the same ones for the same arguments.

    A file is drawn with probability proportional to its bytes, its rows' positions uniformly.

    Args:
        split: training or held-out files.
        rows: sequences per batch.
        length: tokens per sequence.
        seed: seed of the draws.
        root: the folder of source files; the standard library by default.

    Raises:
        DataError: if no file has ``length + 1`` bytes, or a file cannot be read.
        ValueError: if rows or length is not positive.
    """
    if rows < 1 or length < 1:
        raise ValueError(f"a batch has at least one row of one token, not {rows} of {length}")
    wanted = Split(split)
    files = [source for source in source_files(wanted, root) if source.nbytes > length]
    if not files:
        raise DataError(
            f"no {wanted.value} source file has more than {length} bytes; ask for a shorter length"
        )
    return _draw(files, rows, length, seed)


def _draw(files: list[SourceFile], rows: int, length: int, seed: int) -> Iterator[TextBatch]:
    """Yield the batches; separate from `batches` so that bad arguments raise at the call."""
    generator = np.random.default_rng(seed)
    chances = np.array([source.nbytes for source in files], dtype=np.float64)
    chances /= chances.sum()
    texts: dict[str, npt.NDArray[np.uint8]] = {}
    while True:
        # An array of one: drawing a scalar consumes the stream differently.
        source = files[generator.choice(len(files), size=1, p=chances)[0]]
        if source.name not in texts:
            texts[source.name] = np.frombuffer(source.read(), dtype=np.uint8)
        text = texts[source.name]
        if len(text) <= length:
            raise DataError(
                f"the source file {source.path} shrank from {source.nbytes} to {len(text)} bytes "
                "while it was in use; leave the folder alone during a run"
            )
        starts = [int(generator.integers(0, len(text) - length)) for _ in range(rows)]
        pieces = np.stack([text[start : start + length + 1] for start in starts])
        block = torch.from_numpy(pieces.astype(np.int64))
        yield TextBatch(block[:, :-1].contiguous(), block[:, 1:].contiguous(), source.name)
