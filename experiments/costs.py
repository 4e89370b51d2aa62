"""Whether a cost model, fitted to some steps, tells what other steps take: its residual.

Networks of the zoo and of transformers are trained under the recorder. A cost model
(`dynoffload.profiler.costs`) is fitted to every other step. Measured is what it misses on the steps
between, on networks that it was not fitted to, and when it is written from three figures as from a
data sheet. Times are those in which torch's one thread had a core: a machine that others use too
tells the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import provenance
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.costs_networks import NETWORKS, Network
from dynoffload.experiments.harness import Experiment, Row, option, table
from dynoffload.profiler import Recorder, Trace
from dynoffload.profiler.cost_fitting import fit
from dynoffload.profiler.cost_residuals import Residual, residual
from dynoffload.profiler.costs import CostModel
from dynoffload.profiler.work import Kind, work_of
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SEED = 0
_EDGE, _LONG = 1024, 1 << 25  # elements of the large product's edge, and of the large addition
_REPEATS = 7  # of each of the three figures
REGIMES = {
    "samples": "held-out samples",
    "networks": "held-out networks",
    "three_figures": "three figures, nothing fitted",
}
"""Key of the JSON -> what it is."""
_SHADES = {"product": "compute", "memory": "fault", "call": "evict"}
"""Kind of an operator -> colour."""
_DOTS = 12.0
_clock = time.thread_time


@dataclass(frozen=True)
class Params:
    """What is measured."""

    networks: tuple[str, ...] = option((), "names; all by default, two at the least")
    samples: int = option(4, "of each network, to fit to; as many again are held out")
    model: Path | None = option(None, "where to write the model fitted to all", place=True)

    def __post_init__(self) -> None:
        if strange := [name for name in self.networks if name not in NETWORKS]:
            raise ConfigError(
                f"no network is named {strange[0]!r}; there are {', '.join(NETWORKS)}"
            )
        if len(set(self.networks or NETWORKS)) < 2 or self.samples < 1:
            raise ConfigError(
                "a residual on held-out networks takes two networks and a sample of each"
            )


@dataclass
class _Measured:
    """Traces of one network, and what the same steps took without a recorder."""

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
        return {name: name for name in self.params.networks or NETWORKS}

    def run(self, case: str) -> Row:
        found = self.measured[case] = measure(NETWORKS[case], self.params.samples)
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
        _draw(figure, color, result["summary"])


def measure(network: Network, samples: int) -> _Measured:
    """Train for some steps; every other one is to be fitted to, the ones between are held out.

    The first step makes what later ones find, such as the optimizer's state; it is left out. Held
    out samples are also trained on without a recorder, before it.
    """
    torch.manual_seed(_SEED)
    model = network.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **network.adamw)
    found = _Measured()
    traces: list[Trace] = []

    def step(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        network.loss(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for number, (args, kwargs) in enumerate(islice(network.samples(model), 2 * samples + 1)):
        if number and number % 2 == 0:
            begin = _clock()
            step(args, kwargs)
            found.plain.append(_clock() - begin)
        with Recorder(model, optimizer, on_step=traces.append, clock=_clock):
            step(args, kwargs)
        if number:
            (found.fitted if number % 2 else found.held).append(traces[-1])
    return found


def three_figures() -> CostModel:
    """Return a cost model of this machine as its data sheet would give it.

    The peak is that of one large product in single precision, the bandwidth that of one large
    addition in place, the overhead that of an addition of one element; each the best of a few.
    """
    left, right, made = (torch.rand(_EDGE, _EDGE) for _ in range(3))
    one, other = torch.rand(_LONG), torch.rand(_LONG)
    little = torch.rand(1)
    traces: list[Trace] = []
    layer = torch.nn.Identity()
    with torch.no_grad():
        product = _best(lambda: torch.mm(left, right, out=made))
        addition = _best(lambda: one.add_(other))
    with Recorder(layer, on_step=traces.append, clock=_clock):
        value = layer(little.requires_grad_())
        for _ in range(50):
            value = value + little
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


def _summary(
    measured: Mapping[str, _Measured],
    whole: CostModel,
    without: Mapping[str, CostModel],
    sheet: CostModel,
) -> dict[str, Any]:
    held = [(name, trace) for name, one in measured.items() for trace in one.held]
    return {
        "fitted_steps": sum(len(one.fitted) for one in measured.values()),
        "held_steps": len(held),
        "model": _model(whole),
        "three_figures": _model(sheet),
        "residuals": {
            "samples": _residual(residual((whole, trace) for _, trace in held)),
            "networks": _residual(residual((without[name], trace) for name, trace in held)),
            "three_figures": _residual(residual((sheet, trace) for _, trace in held)),
        },
        "networks": {
            name: {
                "samples": asdict(residual((whole, trace) for trace in one.held).steps),
                "networks": asdict(residual((without[name], trace) for trace in one.held).steps),
            }
            for name, one in measured.items()
        },
        "steps": [
            [name, _seconds(trace), whole.time(trace).seconds, without[name].time(trace).seconds]
            for name, trace in held
        ],
        "operators": _by_operator(held, whole),
    }


def _seconds(trace: Trace) -> float:
    return sum(operator.seconds for operator in trace.operators)


def _by_operator(held: Sequence[tuple[str, Trace]], model: CostModel) -> list[list[Any]]:
    """Return for each operator of each network: kind, calls, seconds measured and predicted."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for network, trace in held:
        timing = model.time(trace)
        for operator, predicted in zip(trace.operators, timing.operators, strict=True):
            row = found[network, operator.name, work_of(operator).kind.value]
            row[0] += 1
            row[1] += operator.seconds
            row[2] += predicted
    return [[*key, *row] for key, row in found.items()]


def _residual(found: Residual) -> dict[str, Any]:
    plain = asdict(found)
    plain["kinds"] = {kind.value: errors for kind, errors in plain["kinds"].items()}
    return plain


def _model(model: CostModel) -> dict[str, Any]:
    plain = asdict(model)
    plain["overhead"] = {kind.value: seconds for kind, seconds in model.overhead.items()}
    plain["operators"] = {name: list(factors) for name, factors in sorted(model.operators.items())}
    return plain


# Tables and figure


def _tables(rows: Sequence[Row], found: Mapping[str, Any]) -> Iterator[Table]:
    errors = {
        "median": lambda row: f"{row['median']:.1%}",
        "9 of 10": lambda row: f"{row['p90']:.1%}",
        "bias": lambda row: f"{row['bias']:+.1%}",
    }
    regimes = [
        {"what": f"{what}, {label}", **found["residuals"][key][what]}
        for key, label in REGIMES.items()
        for what in ("steps", "operators")
    ]
    yield table("relative error", {"": lambda row: row["what"], **errors}, regimes)
    own = found["residuals"]["samples"]
    whole = own["operators"]["seconds"]
    kinds = [{"kind": kind, **one} for kind, one in own["kinds"].items()]
    share = {"of the time": lambda row: f"{row['seconds'] / whole:.0%}"}
    columns = {"kind": lambda row: row["kind"], **share, **errors}
    yield table("operators of held-out samples, by kind", columns, kinds)
    columns = {
        "network": lambda row: row["network"],
        "operators": lambda row: f"{row['operators']:.0f}",
        "they take": lambda row: format_seconds(row["operators_s"]),
        "plain step": lambda row: f"{row['between']:+.0%}",
        "error, samples": lambda row: f"{row['samples']['median']:.1%}",
        "error, network": lambda row: f"{row['networks']['median']:.1%}",
        "bias, network": lambda row: f"{row['networks']['bias']:+.1%}",
    }
    networks = [row | found["networks"][row["network"]] for row in rows]
    yield table("median steps", columns, networks)
    models = found["model"], found["three_figures"]
    yield Table("models", ("", "fitted", "three figures"), list(_models(models)))


def _models(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for dtype in models[0]["peak"]:
        peaks = (model["peak"].get(dtype) for model in models)
        yield (
            f"peak, {dtype}",
            *("" if peak is None else f"{peak / 1e9:.3g} GFLOP/s" for peak in peaks),
        )
    yield "half intensity", *(f"{model['half_intensity']:.3g} FLOP/B" for model in models)
    yield "bandwidth", *(f"{model['bandwidth'] / 1e9:.3g} GB/s" for model in models)
    for kind in models[0]["overhead"]:
        yield f"overhead, {kind}", *(f"{model['overhead'][kind] * 1e6:.2f} µs" for model in models)
    yield "operators with factors", *(str(len(model["operators"])) for model in models)


def _draw(figure: Figure, color: Mapping[str, str], found: Mapping[str, Any]) -> None:
    """Draw predicted against measured seconds, of steps and of operators."""
    left, right = figure.subplots(1, 2)
    steps = found["steps"]
    measured = [step[1] for step in steps]
    held, apart = ([step[column] for step in steps] for column in (2, 3))
    looks: dict[str, Any] = {"facecolors": "none", "edgecolors": color["fault"], "zorder": 2}
    left.scatter(measured, held, _DOTS, color=color["plan"], label=REGIMES["samples"], zorder=3)
    left.scatter(measured, apart, _DOTS, label=REGIMES["networks"], **looks)
    _agree(left, color, measured, [*held, *apart], (1.0, 2.0, 5.0))
    left.set_title("steps", loc="left")
    rows = found["operators"]
    for kind, shade in _SHADES.items():
        own = [row for row in rows if row[2] == kind]
        x, y = [row[4] for row in own], [row[5] for row in own]
        looks = {"color": color[shade], "alpha": 0.7, "linewidths": 0}
        right.scatter(x, y, _DOTS / 2, label=kind, **looks)
    _agree(right, color, [row[4] for row in rows], [row[5] for row in rows], (1.0,))
    right.set_title("operators of held-out samples: all calls in one network", loc="left")


def _agree(
    axes: Axes,
    color: Mapping[str, str],
    measured: Sequence[float],
    predicted: Sequence[float],
    ticks: Sequence[float],
) -> None:
    """Draw where both are equal, and where one is twice the other; ``ticks`` in each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = min(*measured, *predicted) / 1.5, max(*measured, *predicted) * 1.5
    for factor, style in ((1.0, "-"), (2.0, ":"), (0.5, ":")):
        ends = [low * factor, high * factor]
        axes.plot([low, high], ends, style, color=color["rss"], linewidth=0.8, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=ticks, numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds * 1e3:g}"))
    axes.minorticks_off()
    axes.set(xlabel="measured, ms", ylabel="predicted, ms")
    axes.grid(visible=True, which="major", axis="both")
    axes.legend(frameon=False, loc="upper left")
