"""The cost model: its formula, its file, its fit, and what says how far it is off."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import ConfigError, TraceError
from dynoffload.experiments import zoo
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.costs import residual
from dynoffload.profiler import Recorder, Trace
from dynoffload.profiler.cost_fitting import fit
from dynoffload.profiler.costs import CostModel, Factors, Kind, Work, work_of
from dynoffload.profiler.trace import Phase

OVERHEAD = {Kind.CALL: 1e-6, Kind.MEMORY: 3e-6, Kind.PRODUCT: 8e-6}
SHEET = {
    "peak": {"float32": 1e9, "bfloat16": 4e9},
    "bandwidth": "1GB",
    "overhead": 1e-3,
}


def _product(flops: int, nbytes: int, dtype: str = "float32") -> Work:
    return Work("aten.mm.default", dtype, flops, nbytes)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Steps of a tree network and of two transformers, but for the first of each."""
    found: list[Trace] = []

    def train(model: Any, loss: Any, samples: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder(model, optimizer, on_step=found.append):
            for sample in samples:
                loss(model, sample).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(
        zoo.build("tree", "small"),
        lambda model, sample: model(*sample.args).loss,
        islice(zoo.samples("tree", seed=1, max_nodes=20), 3),
    )
    for name in ("llama", "resnet"):
        architecture = ARCHITECTURES[name]
        if name == "llama":
            wide = {"hidden_size": 128, "intermediate_size": 512}
            architecture = replace(architecture, options={**architecture.options, **wide})
        model = architecture.build()
        inputs = [architecture.sample(model, seed) for seed in range(3)]
        train(model, lambda model, sample: model(**sample).loss, inputs)
    return [trace for trace in found if trace.step]


# The formula --------------------------------------------------------------------------------------


def test_the_larger_of_arithmetic_and_traffic_after_the_overhead() -> None:
    model = CostModel.of(SHEET, "sheet")
    assert model.seconds(Work("aten.t.default", "", 0, 0)) == 1e-3
    assert model.seconds(Work("aten.add.Tensor", "float32", 0, 10**9)) == 1.001
    assert model.seconds(_product(3 * 10**9, 10**9)) == pytest.approx(3.001)
    assert model.seconds(_product(3 * 10**9, 5 * 10**9)) == pytest.approx(5.001)
    assert model.seconds(_product(12 * 10**9, 10**9, "bfloat16")) == pytest.approx(3.001)
    half = replace(model, half_intensity=20.0)
    assert half.seconds(_product(10**9, 10**9 // 20)) == pytest.approx(2.001)  # half of the peak
    assert half.seconds(_product(10**9, 1)) == pytest.approx(1.001)


def test_what_the_model_does_not_know_is_an_error(traces: list[Trace]) -> None:
    model = CostModel.of(SHEET, "sheet")
    with pytest.raises(ConfigError, match="no peak for float16, in which aten"):
        model.seconds(_product(1, 1, "float16"))
    old = replace(traces[0], operators=[op._replace(flops=None) for op in traces[0].operators])
    with pytest.raises(TraceError, match=r"^step 1: .*record it again with `dynoffload pro"):
        model.time(old)


# Files --------------------------------------------------------------------------------------------

_positive = st.floats(1e-12, 1e18)


@given(
    model=st.builds(
        CostModel,
        peak=st.dictionaries(st.text(max_size=9), _positive, max_size=3),
        bandwidth=_positive,
        overhead=st.fixed_dictionaries({kind: st.floats(0, 1) for kind in Kind}),
        half_intensity=st.floats(0, 1e6),
        operators=st.dictionaries(
            st.text(max_size=9), st.builds(Factors, _positive, _positive), max_size=4
        ),
        source=st.text(max_size=20),
    )
)
@settings(max_examples=40, deadline=None)
def test_any_model_comes_back_equal(
    model: CostModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("costs") / "model.json"
    model.save(path)
    assert CostModel.load(path) == model


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peak": {"float32": 0}}, "peak of float32 is 0"),
        ({"peak": 1e12}, "peak is no table"),
        ({"bandwidth": -1.0}, "bandwidth is -1"),
        ({"bandwidth": "3 parsecs"}, "cannot read '3 parsecs'"),
        ({"overhead": {"call": 1e-6}}, "overhead lacks 'memory'"),
        ({"overhead": {"calls": 1e-6}}, "'calls', which is none of"),
        ({"half_intensity": float("nan")}, "half_intensity is nan"),
        ({"operators": {"aten.mm.default": [1.0]}}, "give two factors"),
        ({"operators": {"aten.mm.default": [1.0, 0.0]}}, "a factor of aten.mm.default is 0"),
        ({"source": 5}, "source is 5"),
        ({"peaks": {}}, "'peaks' is no key of a cost model"),
    ],
)
def test_a_table_that_describes_no_model_is_refused(change: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CostModel.of({**SHEET, **change}, "sheet")


def test_files_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match=r"model\.json: no cost model can be read"):
        CostModel.load(path)
    for text, complaint in [
        ("{", "can be read"),
        ("[]", "is no cost model"),
        (json.dumps(SHEET), "is no cost model"),
        (json.dumps({"format": "dynoffload.costs", "version": 9}), "of version 9"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            CostModel.load(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        CostModel.of(SHEET, "sheet").save(tmp_path / "nowhere" / "model.json")


# Fit ----------------------------------------------------------------------------------------------


def _timed(traces: list[Trace], model: CostModel, *, disturbed: float = 0.0) -> list[Trace]:
    """Return ``traces`` as a machine that ``model`` describes would have recorded them, with noise,
    and with a share of calls that took ten times as long."""
    chance = np.random.default_rng(0)
    made = []
    for trace in traces:
        operators = []
        for operator, seconds in zip(trace.operators, model.time(trace).operators, strict=True):
            factor = float(chance.lognormal(0, 0.05)) * (10 if chance.random() < disturbed else 1)
            operators.append(operator._replace(seconds=seconds * factor))
        made.append(replace(trace, operators=operators))
    return made


@pytest.mark.parametrize(("bandwidth", "half", "disturbed"), [(5e9, 0.0, 0.0), (5e10, 25.0, 0.05)])
def test_a_fit_finds_the_machine_that_was_recorded(
    traces: list[Trace], bandwidth: float, half: float, disturbed: float
) -> None:
    """Whatever the machine: what it predicts is what the machine takes, also for sizes that it has
    not seen, and although some calls were disturbed."""
    own = {"aten.tanh.default": Factors(1.0, 8.0), "aten.convolution.default": Factors(3.0, 2.0)}
    machine = CostModel({"float32": 2e10}, bandwidth, OVERHEAD, half, own)
    fitted = fit(_timed(traces[::2], machine, disturbed=disturbed))
    for trace in traces[1::2]:
        wanted, found = machine.time(trace), fitted.time(trace)
        assert found.seconds == pytest.approx(wanted.seconds, rel=0.1)
        for phase in Phase:
            assert found.phases[phase] == pytest.approx(wanted.phases[phase], rel=0.15)


def test_a_dtype_has_a_peak_of_its_own(traces: list[Trace]) -> None:
    machine = CostModel({"float32": 1e10, "bfloat16": 2e9}, 1e11, OVERHEAD)

    def half(trace: Trace) -> Trace:
        changed = [
            op._replace(dtype="bfloat16") if op.flops and op.phase is Phase.FORWARD else op
            for op in trace.operators
        ]
        return replace(trace, operators=changed)

    mixed = [half(trace) for trace in traces]
    fitted = fit(_timed(mixed, machine))
    for dtype, peak in machine.peak.items():
        work = _product(10**9, 10**6, dtype)
        assert fitted.seconds(work) == pytest.approx(10**9 / peak, rel=0.15)


def test_a_fit_says_what_it_lacks(traces: list[Trace]) -> None:
    old = replace(traces[0], operators=[op._replace(flops=None) for op in traces[0].operators])
    with pytest.raises(TraceError, match=r"^step 1: .* no cost model can be fitted to it: record"):
        fit([old])
    with pytest.raises(TraceError, match="nothing to fit"):
        fit([])


def test_the_residual_is_how_far_a_model_is_off(traces: list[Trace]) -> None:
    machine = CostModel({"float32": 2e10}, 5e9, OVERHEAD)
    slow = CostModel({"float32": 1e10}, 2.5e9, {kind: 2 * s for kind, s in OVERHEAD.items()})
    exact = []
    for trace in traces:
        timed = [op._replace(seconds=machine.seconds(work_of(op))) for op in trace.operators]
        exact.append(replace(trace, operators=timed))
    for model, off in ((machine, 0.0), (slow, 1.0)):
        for errors in residual((model, trace) for trace in exact).values():
            found = (errors.median, errors.p90, errors.bias)
            assert found == pytest.approx((off, off, off), abs=1e-9)
