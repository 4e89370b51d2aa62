"""How well a cost model, fitted to some steps, predicts the times of other steps.

Networks of the zoo and of transformers are trained under the recorder. A cost model
(`dynoffload.profiler.costs`) is fitted to every other step. Errors are measured on the steps
between, on networks that it was not fitted to, and for a model built from three figures, like those
of a data sheet. Times are CPU times of torch's one thread, so other load on the machine does not
change them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import provenance
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.networks import COSTED, Subject
from dynoffload.experiments.zoo.building import ZooSample
from dynoffload.profiler import Recorder, Trace
from dynoffload.profiler.cost_fitting import SHORTEST, fit
from dynoffload.profiler.costs import CostModel, Kind
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SEED = 0
_EDGE, _LONG = 1024, 1 << 25  # elements of the large product's edge, and of the large addition
_REPEATS = 7  # measurements of each of the three figures
REGIMES = {
    "samples": "held-out samples",
    "networks": "held-out networks",
    "three_figures": "three figures, nothing fitted",
}
"""Key of the JSON -> label."""
_DOTS = 12.0
_clock = time.thread_time


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    networks: tuple[str, ...] = option((), "names; all by default, two at the least")
    samples: int = option(4, "of each network, to fit to; as many again are held out")
    model: Path | None = option(None, "where to write the model fitted to all", place=True)

    def __post_init__(self) -> None:
        check_known("networks", self.networks, COSTED)
        if len(set(self.networks or COSTED)) < 2 or self.samples < 1:
            raise ConfigError(
                "a residual on held-out networks takes two networks and a sample of each"
            )


@dataclass
class _Measured:
    """Traces of one network, and the times of the same steps without a recorder."""

    fitted: list[Trace] = field(default_factory=list)
    held: list[Trace] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # seconds, of the held-out samples


class Costs(Experiment[Params]):
    """A case is a network; models are fitted to the traces of all."""

    parameters = Params
    resumes = False
    one_thread = True

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.measured: dict[str, _Measured] = {}

    def cases(self) -> Mapping[str, str]:
        return {name: name for name in self.params.networks or COSTED}

    def run(self, case: str) -> Row:
        found = self.measured[case] = measure(COSTED[case](), self.params.samples)
        took = [_seconds(trace) for trace in found.held]
        return {
            "network": case,
            "operators": median(len(trace.operators) for trace in found.held),
            "operators_s": median(took),
            "between": median(p / t for p, t in zip(found.plain, took, strict=True)) - 1,
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        machine = provenance.machine()
        self.report("fitting to all")
        whole = fit(
            (trace for one in self.measured.values() for trace in one.fitted),
            source=f"{machine['cpu']}, {machine['threads']} threads",
        )
        if self.params.model is not None:
            whole.save(self.params.model)
        without = {}
        for name in self.measured:
            self.report(f"fitting to all but {name}")
            others = (one.fitted for other, one in self.measured.items() if other != name)
            without[name] = fit(trace for fitted in others for trace in fitted)
        return _summary(self.measured, whole, without, three_figures())

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found = result["summary"]
        counted = f"{len(result['rows'])} networks, {found['fitted_steps']} steps to fit to, "
        return [*_tables(result["rows"], found), f"{counted}{found['held_steps']} held-out steps"]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        _draw(figure.subplots(), color, result["summary"]["steps"])


def measure(network: Subject, samples: int) -> _Measured:
    """Train for some steps; odd ones are for fitting, even ones are held out.

    The first step allocates what later ones reuse, such as the optimizer's state; it is excluded.
    Before each recorded held-out step, the same sample is trained on without a recorder.
    """
    torch.manual_seed(_SEED)
    model = network.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **network.adamw)
    found = _Measured()
    traces: list[Trace] = []

    def step(sample: ZooSample) -> None:
        sample.call(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, sample in enumerate(islice(network.samples(_SEED), 2 * samples + 1)):
        if number and number % 2 == 0:
            begin = _clock()
            step(sample)
            found.plain.append(_clock() - begin)
        with Recorder(model, optimizer, on_step=traces.append, clock=_clock):
            step(sample)
        if number:
            (found.fitted if number % 2 else found.held).append(traces[-1])
    return found


def three_figures() -> CostModel:
    """Return a cost model of this machine as from its data sheet.

    The peak comes from a large product in single precision, the bandwidth from a large addition
    in place; each is the best of a few. The overhead is the median of adding one element.
    """
    left, right, made = (torch.rand(_EDGE, _EDGE) for _ in range(3))
    one, other = torch.rand(_LONG), torch.rand(_LONG)
    scalar = torch.rand(1)
    traces: list[Trace] = []
    layer = torch.nn.Identity()
    with torch.no_grad():
        product = _best(lambda: torch.mm(left, right, out=made))
        addition = _best(lambda: one.add_(other))
    with Recorder(layer, on_step=traces.append, clock=_clock):
        value = layer(scalar.requires_grad_())
        for _ in range(50):
            value = value + scalar
        value.sum().backward()
    calls = [op.seconds for op in traces[-1].operators if op.name == "aten.add.Tensor"]
    return CostModel(
        peak={"float32": 2 * _EDGE**3 / product},
        bandwidth=3 * _LONG * one.element_size() / addition,
        overhead=dict.fromkeys(Kind, median(calls)),
        source="three figures",
    )


def _best(act: Callable[[], Any]) -> float:
    def seconds() -> float:
        begin = _clock()
        act()
        return _clock() - begin

    return min(seconds() for _ in range(_REPEATS))


@dataclass(frozen=True)
class Errors:
    """The relative error |predicted / measured - 1| of several times.

    Attributes:
        median: of steps, half have at most this error; of operators, half of the time.
        p90: the same for nine in ten.
        bias: total predicted over total measured, less 1.
        seconds: total measured.
    """

    median: float
    p90: float
    bias: float
    seconds: float


def errors(pairs: Sequence[tuple[float, float]], *, by_time: bool = False) -> Errors:
    """Return the errors of (predicted, measured) pairs in seconds, weighted equally or by measured
    time."""
    predicted, measured = np.array(pairs, np.float64).T
    relative = np.abs(predicted / measured - 1)
    weight = measured if by_time else np.ones_like(measured)
    order = np.argsort(relative)
    reached = np.cumsum(weight[order]) / weight.sum()
    median_, p90 = (
        float(relative[order][min(np.searchsorted(reached, share), len(order) - 1)])
        for share in (0.5, 0.9)
    )
    total = float(measured.sum())
    return Errors(median_, p90, float(predicted.sum()) / total - 1, total)


def residual(pairs: Iterable[tuple[CostModel, Trace]]) -> dict[str, Errors]:
    """Return the errors of models on whole steps and on operators; each model was not fitted to
    its trace."""
    steps: list[tuple[float, float]] = []
    operators: list[tuple[float, float]] = []
    for model, trace in pairs:
        timing = model.time(trace)
        steps.append((timing.seconds, _seconds(trace)))
        measured = [max(operator.seconds, SHORTEST) for operator in trace.operators]
        operators += zip(timing.operators, measured, strict=True)
    return {"steps": errors(steps), "operators": errors(operators, by_time=True)}


def _summary(
    measured: Mapping[str, _Measured],
    whole: CostModel,
    without: Mapping[str, CostModel],
    sheet: CostModel,
) -> dict[str, Any]:
    held = [(name, trace) for name, one in measured.items() for trace in one.held]
    found = {
        "samples": residual((whole, trace) for _, trace in held),
        "networks": residual((without[name], trace) for name, trace in held),
        "three_figures": residual((sheet, trace) for _, trace in held),
    }
    return {
        "fitted_steps": sum(len(one.fitted) for one in measured.values()),
        "held_steps": len(held),
        "model": _model(whole),
        "three_figures": _model(sheet),
        "residuals": {
            key: {what: asdict(one) for what, one in both.items()} for key, both in found.items()
        },
        "networks": {
            name: {
                "samples": asdict(residual((whole, trace) for trace in one.held)["steps"]),
                "networks": asdict(residual((without[name], trace) for trace in one.held)["steps"]),
            }
            for name, one in measured.items()
        },
        "steps": [
            [name, _seconds(trace), whole.time(trace).seconds, without[name].time(trace).seconds]
            for name, trace in held
        ],
    }


def _seconds(trace: Trace) -> float:
    return sum(operator.seconds for operator in trace.operators)


def _model(model: CostModel) -> dict[str, Any]:
    plain = asdict(model)
    plain["overhead"] = {kind.value: seconds for kind, seconds in model.overhead.items()}
    plain["operators"] = {name: list(factors) for name, factors in sorted(model.operators.items())}
    return plain


def _tables(rows: Sequence[Row], found: Mapping[str, Any]) -> Iterator[Table]:
    regimes = [
        {"what": f"{what}, {label}", **found["residuals"][key][what]}
        for key, label in REGIMES.items()
        for what in ("steps", "operators")
    ]
    yield table(
        "relative error",
        {
            "": lambda row: row["what"],
            "median": lambda row: f"{row['median']:.1%}",
            "9 of 10": lambda row: f"{row['p90']:.1%}",
            "bias": lambda row: f"{row['bias']:+.1%}",
        },
        regimes,
    )
    networks = [row | found["networks"][row["network"]] for row in rows]
    yield table(
        "median steps",
        {
            "network": lambda row: row["network"],
            "operators": lambda row: f"{row['operators']:.0f}",
            "they take": lambda row: format_seconds(row["operators_s"]),
            "plain step": lambda row: f"{row['between']:+.0%}",
            "error, samples": lambda row: f"{row['samples']['median']:.1%}",
            "error, network": lambda row: f"{row['networks']['median']:.1%}",
            "bias, network": lambda row: f"{row['networks']['bias']:+.1%}",
        },
        networks,
    )


def _draw(axes: Axes, color: Mapping[str, str], steps: Sequence[Sequence[Any]]) -> None:
    """Draw predicted against measured step seconds, the diagonal, and the lines of a factor of
    two."""
    measured = [step[1] for step in steps]
    held, apart = ([step[column] for step in steps] for column in (2, 3))
    looks: dict[str, Any] = {"facecolors": "none", "edgecolors": color["fault"], "zorder": 2}
    axes.scatter(measured, held, _DOTS, color=color["plan"], label=REGIMES["samples"], zorder=3)
    axes.scatter(measured, apart, _DOTS, label=REGIMES["networks"], **looks)
    every = [*measured, *held, *apart]
    low, high = min(every) / 1.5, max(every) * 1.5
    for factor, style in ((1.0, "-"), (2.0, ":"), (0.5, ":")):
        ends = [low * factor, high * factor]
        axes.plot([low, high], ends, style, color=color["rss"], linewidth=0.8, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured step, s", ylabel="predicted, s")
    axes.grid(visible=True, which="major", axis="both")
    axes.legend(frameon=False, loc="upper left")
