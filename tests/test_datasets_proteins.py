"""Protein families: the model they are drawn from, as samples show it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from dynoffload.datasets.proteins import (
    _COMPLEMENT,
    BINS,
    CONTACT,
    GAP,
    LONGEST,
    MASK,
    RESIDUES,
    SEPARATION,
    TOKENS,
    Alignments,
    alignments,
    family,
)
from dynoffload.datasets.sources import Split


def test_the_same_arguments_give_the_same_samples_for_ever() -> None:
    first, again, other = (list(islice(alignments(seed=s), 3)) for s in (0, 0, 1))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.hidden, two.hidden)
        assert (one.cycles, one.source) == (two.cycles, two.source)
    assert any(a.source != b.source for a, b in zip(first, other, strict=True))


def test_samples_are_what_they_say() -> None:
    bounds = {"min_depth": 2, "max_depth": 9, "min_length": 20, "max_length": 33, "max_cycles": 3}
    drawn = list(islice(alignments(rows=2, **bounds), 60))
    for sample in drawn:
        rows, depth, length = sample.tokens.shape
        assert rows == 2
        assert 2 <= depth <= 9
        assert 20 <= length <= 33
        assert 1 <= sample.cycles <= 3
        masked = sample.tokens == MASK
        assert torch.equal(masked, sample.hidden != -100)
        assert masked.flatten(1).any(dim=1).all()
        told = torch.where(masked, sample.hidden, sample.tokens)
        assert told.min() >= 0
        assert told.max() < TOKENS - 1
        assert not (told[:, 0] == GAP).any()  # the query is whole
        assert torch.equal(sample.distances, sample.distances.transpose(1, 2))
        assert sample.distances.min() >= 0
        assert sample.distances.max() < BINS
        assert (sample.distances.diagonal(dim1=1, dim2=2) == 0).all()
    assert {sample.cycles for sample in drawn} == {1, 2, 3}
    share = sum((s.hidden != -100).sum().item() for s in drawn) / _entries(drawn)
    assert 0.13 < share < 0.18


def _entries(drawn: list[Alignments]) -> int:
    return sum(sample.tokens.numel() for sample in drawn)


def test_partners_touch_and_covary() -> None:
    """A changed residue takes its partner along; places without a partner go their own ways."""
    together, apart = [], []
    for number in range(6):
        drawn = family(number)
        at = np.flatnonzero(drawn.partner >= 0)
        other = drawn.partner[at]
        assert np.array_equal(drawn.partner[other], at)
        assert (abs(at - other) >= SEPARATION).all()
        assert (np.linalg.norm(drawn.places[at] - drawn.places[other], axis=1) <= CONTACT).all()
        residues = np.where(drawn.sequences == GAP, -1, drawn.sequences)
        mirrored = np.append(_COMPLEMENT, -2)[residues]
        together.append((mirrored[:, at] == residues[:, other]).mean())
        apart.append((mirrored[:, at] == np.roll(residues[:, other], 7, axis=1)).mean())
    assert np.mean(together) > 0.7
    assert np.mean(apart) < 0.15
    assert np.array_equal(_COMPLEMENT[_COMPLEMENT], np.arange(len(RESIDUES)))


def test_splits_share_no_family() -> None:
    first, held_out = family(3), family(3, Split.HELD_OUT)
    assert len(first) != len(held_out) or (first.sequences[0] != held_out.sequences[0]).any()
    long = next(alignments("held-out", min_length=LONGEST, max_length=LONGEST, max_depth=4))
    assert long.tokens.shape[2] == LONGEST


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"min_depth": 9, "max_depth": 4}, "9 to 4 sequences"),
        ({"max_length": 4096}, "16 to 4096 residues"),
        ({"rows": 0}, "rows=0"),
        ({"split": "test"}, "'test'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_the_call(
    arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        alignments(**arguments)
    with pytest.raises(ValueError, match="no family 256"):
        family(256)
