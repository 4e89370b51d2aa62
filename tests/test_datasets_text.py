"""Source files and the byte sequences made of them: order, split, determinism, errors."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from dynoffload.datasets.sources import MAX_BYTES, MIN_BYTES, DataError, Split, source_files
from dynoffload.datasets.text import VOCABULARY, batches


def _library(folder: Path, count: int = 40, nbytes: int = MIN_BYTES) -> Path:
    """Write files whose every byte tells its place, so that a piece can be found again."""
    folder.mkdir(exist_ok=True)
    for index in range(count):
        text = bytes((index + place * 7) % VOCABULARY for place in range(nbytes))
        (folder / f"file{index:02d}.py").write_bytes(text)
    return folder


def test_the_split_is_by_file_and_complete() -> None:
    train = source_files("train")
    held_out = source_files(Split.HELD_OUT)
    names = [source.name for source in train]
    assert names == sorted(names)
    assert not {source.name for source in held_out} & set(names)
    share = len(held_out) / (len(held_out) + len(train))
    assert 0.1 < share < 0.3
    assert all(MIN_BYTES <= source.nbytes <= MAX_BYTES for source in train)
    assert not any("test" in name.split("/")[:-1] for name in names)


def test_targets_are_the_next_tokens_of_the_named_file() -> None:
    contents = {source.name: source.read() for source in source_files("train")}
    for batch in islice(batches("train", rows=3, length=64, seed=1), 5):
        assert batch.tokens.shape == batch.targets.shape == (3, 64)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        for row, after in zip(batch.tokens, batch.targets, strict=True):
            assert bytes([*row.tolist(), after[-1].item()]) in contents[batch.source]


def test_the_seed_alone_decides() -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        return [batch.tokens for batch in islice(batches(rows=2, length=32, seed=seed), 4)]

    assert all(torch.equal(one, two) for one, two in zip(draw(5), draw(5), strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(draw(5), draw(6), strict=True))


def test_a_folder_without_sources_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(DataError, match=str(tmp_path)):
        batches(root=tmp_path)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    stream = batches(length=16, root=_library(tmp_path))
    for path in tmp_path.glob("*.py"):
        path.unlink()
    with pytest.raises(DataError, match=r"cannot read the source file .*file\d\d\.py"):
        next(stream)


@pytest.mark.parametrize("shape", [{"rows": 0}, {"length": 0}])
def test_impossible_shapes_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one row of one token"):
        batches("train", **shape)
