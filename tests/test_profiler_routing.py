"""What a network predicts of its decisions is recorded, stored, and learned from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_pilot import label_of
from torch import Tensor, nn

from dynoffload.errors import TraceError
from dynoffload.experiments import zoo
from dynoffload.experiments.zoo.moe_lm import MoELM
from dynoffload.pilot.features import Example
from dynoffload.pilot.labels import encode_example
from dynoffload.pilot.train import evaluate, learn_pilot
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler import Recorder, RoutingProbe, Trace, load_trace, save_trace
from dynoffload.profiler.routing import hinted, probes_of


def _recorded(
    name: str, count: int, build: dict[str, Any] | None = None, **shape: Any
) -> list[Trace]:
    """Return the traces of the first steps of a network of the zoo."""
    torch.manual_seed(0)
    model = zoo.build(name, "tiny", **build or {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    traces: list[Trace] = []
    drawn = list(islice(zoo.samples(name, **shape), count))
    sources = iter(one.source for one in drawn)
    with Recorder(model, optimizer, on_step=traces.append, source=lambda: next(sources)):
        for one in drawn:
            model(*one.args).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return traces


@pytest.fixture(scope="module")
def moe() -> list[Trace]:
    """The steps of a routed network."""
    return _recorded("moe", 40, {"experts": 16, "width": 8}, rows=1, length=8)


def test_hints_are_no_operators(moe: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    """That they change no bit: test_profiler_recorder."""
    monkeypatch.setattr(MoELM, "routing_probes", None)
    (mute,) = _recorded("moe", 1, {"experts": 16, "width": 8}, rows=1, length=8)
    assert not mute.hints
    assert len(mute.operators) == len(moe[0].operators)


class _Two(nn.Module):
    """Two modules, and whatever probes a test wants."""

    def __init__(self, probes: Callable[[], list[RoutingProbe]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.routing_probes = probes


def test_hints_are_stored(moe: list[Trace], tmp_path: Path) -> None:
    assert len({hint.blocks for hint in moe[0].hints}) == 2
    assert len(moe[0].hints) == 3  # of the second layer by the first one's input, and by its own
    save_trace(moe[0], tmp_path / "a.trace")
    assert load_trace(tmp_path / "a.trace") == moe[0]


def _probe(path: str, blocks: tuple[str, ...], told: Any) -> RoutingProbe:
    def predict(x: Tensor) -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    return RoutingProbe(path, blocks, predict)


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ([_probe("first", ("third",), None)], r"_Two.routing_probes\(\) names \['third'\]"),
        ([_probe("first", (), None)], "decides about 0 blocks"),
        ([None], "must return a list of"),
        ([_probe("first", ("second",), None)] * 2, "names one probe twice"),
    ],
)
def test_probes_that_are_none_are_named(made: Any, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        probes_of(_Two(lambda: made))


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (torch.tensor([0.25]), (0.25,)),
        (torch.tensor([float("nan")]), (0.5,)),
        (torch.tensor([7.0]), (1.0,)),
        (None, None),
        (torch.zeros(2), None),
        (ZeroDivisionError("no"), None),
        ([0.25], (0.25,)),
        ("often", None),
    ],
)
def test_what_a_probe_says_is_checked(
    told: Any, found: tuple[float, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    table = probes_of(
        _Two(lambda: [_probe("first", ("second",), None), _probe("second", ("second",), told)])
    )
    # The first says nothing of itself; the second is asked there, and once more where it decides.
    for path in ("first", "second"):
        hints = hinted(table, path, (torch.ones(1),), 3)
        assert [hint.values for hint in hints] == ([] if found is None else [found])
    assert hinted(table, "third", (torch.ones(1),), 3) == []
    assert caplog.text.count("hints for second") <= 1  # though it was asked twice
    if found is None and told is not None:
        assert "hints for second" in caplog.text


def test_a_hint_stands_where_it_was_given_and_a_pilot_is_better_for_it(moe: list[Trace]) -> None:
    labels = [label_of(trace) for trace in moe]
    vocabulary = build_vocabulary([label.calls for label in labels])
    examples = [encode_example(vocabulary, label) for label in labels]
    blocks = vocabulary.blocks
    for example in examples[:5]:
        for hint in example.hints:
            before = [blocks[b].path for b in example.blocks[: hint.place]]
            layer = int(blocks[hint.blocks[0]].path.split(".")[1])
            assert not any(path.startswith(f"layers.{layer}.moe.experts") for path in before)
            assert any(path.startswith(f"layers.{max(layer - 1, 0)}") for path in before)
    inside, aside = examples[:30], examples[30:]
    bare = [Example(e.sample, e.blocks, e.source) for e in examples]
    with_hints = evaluate(learn_pilot(vocabulary, inside), aside).one_ahead
    alone = evaluate(learn_pilot(vocabulary, bare[:30]), bare[30:]).one_ahead
    # By those of the second of two layers, given ahead; the first's are of the decision at hand.
    assert 1 - with_hints < 0.85 * (1 - alone)


@pytest.mark.parametrize(
    ("name", "build", "shape"),
    [
        ("moe", {}, {}),
        ("switch", {}, {"rows": 1, "length": 8}),
        ("depths", {}, {"rows": 1, "length": 6}),
        ("exits", {"sure": 0.2}, {}),  # of ten classes: some images leave at once
    ],
)
def test_what_a_network_says_of_the_decision_at_hand_is_what_it_does(
    name: str, build: dict[str, Any], shape: dict[str, Any], moe: list[Trace]
) -> None:
    for trace in moe[:4] if name == "moe" else _recorded(name, 3, build, **shape):
        called = {call.path for call in trace.calls}
        at_hand = {hint.blocks: hint for hint in trace.hints}  # the last about each
        assert at_hand
        for hint in at_hand.values():
            for path, value in zip(hint.blocks, hint.values, strict=True):
                assert (value > 0.5) == (path in called), path


def test_a_probe_that_writes_into_what_it_is_given_is_refused() -> None:
    probe = RoutingProbe("first", ("second",), lambda told: told["x"][0].mul_(0.5).sum())
    table = probes_of(_Two(lambda: [probe]))
    with pytest.raises(TraceError, match="probe of 'first' writes into"):
        hinted(table, "first", ({"x": [torch.ones(1)]},), 0)
