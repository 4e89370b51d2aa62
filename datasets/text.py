"""Byte sequences of Python source, for language models.

An endless, seeded stream of batches of bytes with the bytes that follow them. Each batch knows the
files it was cut from, so that samples can be split by file.
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
"""How many different tokens there are: one for each byte."""


@dataclass(frozen=True)
class TextBatch:
    """Rows of consecutive bytes.

    Attributes:
        tokens: int64 ``[rows, length]``.
        targets: int64 ``[rows, length]``: for each token the one after it.
        sources: the names of the files the rows were cut from, without repetition, in row order.
    """

    tokens: Tensor
    targets: Tensor
    sources: tuple[str, ...]

    @property
    def source(self) -> str:
        """The files as one name."""
        return "+".join(self.sources)


def batches(
    split: Split | str = Split.TRAIN,
    *,
    rows: int = 1,
    length: int = 256,
    seed: int = 0,
    mixed: bool = False,
    root: Path | None = None,
) -> Iterator[TextBatch]:
    """Yield batches of source text for ever, the same ones for the same arguments.

    A file is drawn in proportion to its bytes, and the place in it uniformly.

    Args:
        split: training or held-out files.
        rows: sequences per batch.
        length: tokens per sequence.
        seed: of the draws.
        mixed: draw a file for each row; by default all rows of a batch come from one file, so that
            a batch belongs to one file.
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
    return _draw(files, rows, length, seed, mixed)


def _draw(
    files: list[SourceFile], rows: int, length: int, seed: int, mixed: bool
) -> Iterator[TextBatch]:
    """Yield the batches; apart from `batches` so that bad arguments raise at the call."""
    generator = np.random.default_rng(seed)
    chances = np.array([source.nbytes for source in files], dtype=np.float64)
    chances /= chances.sum()
    texts: dict[str, npt.NDArray[np.uint8]] = {}
    while True:
        picks = generator.choice(len(files), size=rows if mixed else 1, p=chances)
        chosen = [files[pick] for pick in picks]
        pieces = [
            _piece(texts, source, length, generator)
            for source in (chosen if mixed else chosen * rows)
        ]
        block = torch.from_numpy(np.stack(pieces).astype(np.int64))
        yield TextBatch(
            tokens=block[:, :-1].contiguous(),
            targets=block[:, 1:].contiguous(),
            sources=tuple(dict.fromkeys(source.name for source in chosen)),
        )


def _piece(
    texts: dict[str, npt.NDArray[np.uint8]],
    source: SourceFile,
    length: int,
    generator: np.random.Generator,
) -> npt.NDArray[np.uint8]:
    """Return ``length + 1`` consecutive bytes of a file from a random place on."""
    text = texts.get(source.name)
    if text is None:
        text = texts[source.name] = np.frombuffer(source.read(), dtype=np.uint8)
    if len(text) <= length:
        raise DataError(
            f"the source file {source.path} shrank from {source.nbytes} to {len(text)} bytes "
            "while it was in use; leave the folder alone during a run"
        )
    start = int(generator.integers(0, len(text) - length))
    return text[start : start + length + 1]
