"""Names of networks and of call shapes."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dynoffload.profiler import fingerprint, shape_key


def _net(width: int = 8, device: str = "cpu") -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width, device=device),
        nn.BatchNorm1d(width, device=device),
        nn.Linear(width, 4, device=device),
    )


def test_fingerprint_is_of_the_architecture_not_of_the_weights() -> None:
    assert fingerprint(_net()) == fingerprint(_net())
    assert fingerprint(_net()) == fingerprint(_net(device="meta"))
    assert len(fingerprint(_net())) == 64


def test_fingerprint_tells_architectures_apart() -> None:
    base = _net()
    wider = _net(9)
    other_class = _net()
    other_class[1] = nn.SyncBatchNorm(8)
    half = _net().half()
    renamed = nn.Sequential()
    for name, module in zip("abc", _net(), strict=True):
        renamed.add_module(name, module)
    prints = {fingerprint(m) for m in (base, wider, other_class, half, renamed)}
    assert len(prints) == 5


def test_fingerprint_does_not_see_ties() -> None:
    """A model built on meta loses its ties until it is given weights; it is the same network."""
    tied, loose = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.ModuleList()
    loose = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    assert fingerprint(tied) == fingerprint(loose)


def test_fingerprint_sees_buffers_that_are_stored_and_none_that_forward_makes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = fingerprint(model)
    model[1].register_buffer("angles", torch.ones(3), persistent=False)
    assert fingerprint(model) == before
    model[1].register_buffer("mean", torch.ones(3))
    assert fingerprint(model) != before


def test_shape_key_is_exact_to_eight_and_a_power_of_two_above() -> None:
    key = shape_key((torch.empty(2, 150), torch.empty(1, 9)), {})
    assert key == "2x256,1x16"
    assert shape_key((torch.empty(8, 7),), {}) == "8x7"
    assert shape_key((torch.empty(()),), {}) == "0d"
    assert shape_key((), {}) == ""
    assert shape_key((3, None, "text"), {}) == ""


def test_shape_key_orders_keywords_by_name_and_looks_into_lists() -> None:
    a, b = torch.empty(2), torch.empty(3)
    assert shape_key((), {"b": b, "a": a}) == shape_key((), {"a": a, "b": b}) == "2,3"
    assert shape_key(([a, (b,)],), {}) == "2,3"
    assert shape_key(({"x": a},), {}) == "2"


@given(st.integers(0, 1 << 40))
def test_a_bucket_holds_its_extent_and_at_most_doubles_it(extent: int) -> None:
    bucket = int(shape_key((torch.empty(extent, 0, device="meta"),), {}).split("x")[0])
    assert extent <= bucket
    assert bucket == extent if extent <= 8 else bucket < 2 * extent


def test_importing_the_profiler_and_the_pilot_is_cheap() -> None:
    """File formats, progress bars and clients are imported where they are used."""
    code = (
        "import sys, dynoffload.profiler, dynoffload.pilot.train\n"
        "heavy = {'safetensors', 'rich', 'transformers', 'matplotlib', 'sklearn', 'lightgbm'}\n"
        "heavy |= {'scipy', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
