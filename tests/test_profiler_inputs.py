"""What identifies a network and a call, and what a sample says about itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from reference_work import times_reference
from torch import nn

from dynoffload.errors import TraceError
from dynoffload.profiler import InputFeatures, describe_input, fingerprint, shape_key
from dynoffload.profiler.input_features import MAX_ELEMENTS, MAX_OBJECTS, merge_inputs


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
    tied, loose = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
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


def test_importing_the_profiler_and_the_pilot_is_cheap() -> None:
    """File formats, progress bars and clients are imported where they are used."""
    code = (
        "import sys, dynoffload.profiler, dynoffload.pilot.train\n"
        "heavy = {'safetensors', 'rich', 'transformers', 'matplotlib', 'sklearn'}\n"
        "heavy |= {'scipy', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclass
class _Batch:
    tokens: torch.Tensor
    extra: dict[str, object]


def test_default_keeps_shapes_numbers_masks_and_codes() -> None:
    tokens = torch.arange(6).reshape(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    flags = torch.tensor([True, False, True])
    sample = describe_input(
        None, (tokens,), {"attention_mask": mask, "flags": flags, "scale": 0.5, "name": "x"}
    )
    assert sample.values["arg0.numel"] == 6
    assert (sample.values["arg0.shape0"], sample.values["arg0.shape1"]) == (2, 3)
    assert sample.values["arg0.itemsize"] == 8
    assert sample.values["attention_mask.sum"] == 3
    assert sample.values["flags.sum"] == 2
    assert sample.values["scale"] == 0.5
    assert "name" not in sample.values
    assert sample.elements.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.elements.dtype == np.int64
    tokens.zero_()  # the sample does not alias the batch
    assert sample.elements.tolist() == [0, 1, 2, 3, 4, 5]
    batch = _Batch(torch.tensor([7, 8], dtype=torch.int32), {"more": [torch.zeros(4), 3]})
    sample = describe_input(None, (batch,), {})
    assert sample.elements.tolist() == [7, 8]
    assert sample.values["arg0.extra.more.len"] == 2
    assert sample.values["arg0.extra.more.0.shape0"] == 4
    assert sample.values["arg0.extra.more.1"] == 3


def test_default_is_bounded() -> None:
    """A graph that refers to itself, a long list and a long tensor all end."""
    loop: list[object] = []
    loop.append(loop)
    describe_input(None, (loop,), {})
    many = describe_input(None, (list(range(100_000)),), {})
    assert len(many.values) <= MAX_OBJECTS
    long = describe_input(None, (torch.ones(MAX_ELEMENTS + 5, dtype=torch.int64),), {})
    assert len(long.elements) == MAX_ELEMENTS


class _Speaking(nn.Module):
    def sample_features(self, x: torch.Tensor) -> dict[str, float]:
        return {"own": float(x.shape[0])}


def test_features_come_before_the_module_and_the_module_before_the_default() -> None:
    x = torch.zeros(5)
    chosen = InputFeatures({"chosen": 1.0}, np.array([[1, 2], [3, 4]]))
    assert describe_input(_Speaking(), (x,), {}, features=lambda x: chosen) == chosen
    assert describe_input(_Speaking(), (x,), {}, features=lambda x: {"n": 2}).values == {"n": 2.0}
    assert describe_input(_Speaking(), (x,), {}).values == {"own": 5.0}
    assert "arg0.numel" in describe_input(nn.Identity(), (x,), {}).values


@pytest.mark.parametrize(
    "made",
    [
        3.0,
        None,
        {"a": "text"},
        InputFeatures({}, np.zeros(3)),
        InputFeatures({}, np.zeros((1, 1, 1), np.int64)),
    ],
)
def test_a_featurizer_that_returns_nonsense_is_named(made: object) -> None:
    with pytest.raises(TraceError, match="features"):
        describe_input(None, (), {}, features=lambda: made)  # type: ignore[arg-type, return-value]


def test_samples_of_one_step_are_merged() -> None:
    one = InputFeatures({"a": 1.0}, np.array([1, 2]))
    two = InputFeatures({"a": 9.0}, np.array([3]))
    merged = merge_inputs([one, two])
    assert merged.values == {"a": 1.0, "samples": 2.0}
    assert merged.elements.tolist() == [1, 2, 3]
    assert merge_inputs([one]) is one


@pytest.mark.alone
def test_describing_takes_less_than_half_of_the_reference() -> None:
    """The limit is half a millisecond where the reference takes one."""
    batch = {
        "input_ids": torch.randint(0, 1000, (8, 1024)),
        "attention_mask": torch.ones(8, 1024, dtype=torch.int64),
        "labels": torch.randint(0, 1000, (8, 1024)),
    }
    assert times_reference(lambda: describe_input(None, (), batch), 50) < 0.5


def test_a_featurizer_draws_nothing_of_the_training_s_and_keeps_no_graph() -> None:
    seen: list[torch.Tensor] = []

    def features(x: torch.Tensor) -> dict[str, float]:
        seen.append(x * 2)
        return {"drawn": float(torch.rand(()))}

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = describe_input(None, (torch.ones(2, requires_grad=True),), {}, features)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == describe_input(None, (torch.ones(2),), {}, features)
    assert not seen[0].requires_grad


@pytest.mark.parametrize("nested", [False, True])
def test_a_featurizer_that_writes_into_what_it_is_given_is_refused(nested: bool) -> None:
    def features(x: torch.Tensor | list[torch.Tensor]) -> dict[str, float]:
        tensor = x[0] if isinstance(x, list) else x
        return {"sum": float(tensor.add_(1).sum())}

    x = torch.ones(2)
    with pytest.raises(TraceError, match="`features` writes into what its module is given"):
        describe_input(None, ([x] if nested else x,), {}, features)
