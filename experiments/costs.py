"""Whether a cost model, fitted to some steps, tells what other steps take: its residual.

What it is: networks of the zoo and of transformers, trained under the recorder; a cost model
(`dynoffload.profiler.costs`) fitted to every other step; what it misses on the steps between, on
networks that it was not fitted to, and when it is written from three figures as from a data sheet.
What it is not: a prediction of what plain steps take: a cost model times operators, and what the
interpreter does between them is told beside.

With ``--json PATH`` the figure and the page are written beside it, as ``PATH`` with the suffixes
``.svg`` and ``.md``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import provenance
from dynoffload.experiments.costs_networks import NETWORKS, Network
from dynoffload.experiments.costs_views import draw, page, show
from dynoffload.pilot.progress import progress_bar
from dynoffload.profiler import Recorder, Trace
from dynoffload.profiler.cost_fitting import fit
from dynoffload.profiler.cost_residuals import Residual, residual
from dynoffload.profiler.costs import CostModel
from dynoffload.profiler.work import Kind, work_of

_SEED = 0
_EDGE, _LONG = 1024, 1 << 25  # elements of the large product's edge, and of the large addition
_REPEATS = 7  # of each of the three figures
_CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}
_QUIET = 0.9  # share of the time of plain steps in which the thread must have had a core


@dataclass
class _Measured:
    """Traces of one network, and what the same steps took without a recorder."""

    fitted: list[Trace] = field(default_factory=list)
    held: list[Trace] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # seconds, of the held-out samples


def run(
    json_path: Path | None = None,
    *,
    networks: Sequence[str] = (),
    samples: int = 4,
    clock: str = "wall",
    model: Path | None = None,
) -> dict[str, Any]:
    """Measure, fit, and compare.

    Args:
        json_path: the figure and the page are written beside it.
        networks: names; all by default. Two at the least, as each is held out once.
        samples: of each network, to fit to; as many again are held out.
        clock: ``"wall"``, or ``"processor"`` for the time in which the thread had a core: on a
            machine that others use too, with one thread of torch.
        model: where to write the model that is fitted to all networks.

    Returns:
        The fitted model; what it misses on held-out samples, models without a network on that
        network, and the model of three figures; a row for each network, and for each operator.

    Raises:
        ConfigError: there is no network of a given name, too few of them, or no samples; or the
            processor's clock is asked for several threads.
    """
    names = list(networks) or list(NETWORKS)
    if strange := [name for name in names if name not in NETWORKS]:
        raise ConfigError(f"no network is named {strange[0]!r}; there are {', '.join(NETWORKS)}")
    if len(set(names)) < 2 or samples < 1:
        raise ConfigError("a residual on held-out networks takes two networks and a sample of each")
    if clock not in _CLOCKS:
        raise ConfigError(f"no clock is named {clock!r}; there are {', '.join(_CLOCKS)}")
    if clock == "processor" and torch.get_num_threads() > 1:
        raise ConfigError(
            f"torch computes with {torch.get_num_threads()} threads, and the processor's clock"
            " tells the time of one: set OMP_NUM_THREADS=1"
        )
    watch = _Watch(_CLOCKS[clock])
    measured: dict[str, _Measured] = {}
    with progress_bar(True) as report:
        total = 2 * len(names) + 1
        for done, name in enumerate(names):
            report(f"measuring {name}", done, total)
            measured[name] = _measure(NETWORKS[name], samples, watch)
        report("fitting to all", len(names), total)
        machine = provenance.machine()
        whole = fit(
            (trace for one in measured.values() for trace in one.fitted),
            source=f"{machine['cpu']}, {machine['threads']} threads",
        )
        without: dict[str, CostModel] = {}
        for done, name in enumerate(names, len(names) + 1):
            report(f"fitting to all but {name}", done, total)
            others = (one.fitted for other, one in measured.items() if other != name)
            without[name] = fit(trace for fitted in others for trace in fitted)
    result = _result(measured, whole, without, three_figures(watch), machine, clock, watch.share)
    show(result)
    if model is not None:
        whole.save(model)
    if json_path is not None:
        from dynoffload.reporting.canvas import write_figure

        write_figure(
            lambda figure, color: draw(figure, color, result),
            json_path.with_suffix(".svg"),
            height=4.6,
        )
        json_path.with_suffix(".md").write_text(page(result, json_path.stem), encoding="utf-8")
    return result


class _Watch:
    """Takes times, and knows for what share of them the thread had a core.

    Attributes:
        clock: what tells the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._wall = self._busy = 0.0

    def time(self, act: Callable[[], Any]) -> float:
        """Return the seconds that ``act`` takes."""
        busy, wall, start = time.thread_time(), time.perf_counter(), self.clock()
        act()
        took = self.clock() - start
        self._wall += time.perf_counter() - wall
        self._busy += time.thread_time() - busy
        return took

    def best(self, act: Callable[[], Any]) -> float:
        """Return the least seconds of a few times."""
        return min(self.time(act) for _ in range(_REPEATS))

    @property
    def share(self) -> float:
        """The share; 1 on a machine of its own."""
        return self._busy / max(self._wall, 1e-9)


def _measure(network: Network, samples: int, watch: _Watch) -> _Measured:
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
            found.plain.append(watch.time(lambda a=args, k=kwargs: step(a, k)))  # type: ignore[misc]
        with Recorder(model, optimizer, on_step=traces.append, clock=watch.clock):
            step(args, kwargs)
        if number:
            (found.fitted if number % 2 else found.held).append(traces[-1])
    return found


def three_figures(watch: _Watch) -> CostModel:
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
        product = watch.best(lambda: torch.mm(left, right, out=made))
        addition = watch.best(lambda: one.add_(other))
    with Recorder(layer, on_step=traces.append, clock=watch.clock):
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


def _result(
    measured: Mapping[str, _Measured],
    whole: CostModel,
    without: Mapping[str, CostModel],
    sheet: CostModel,
    machine: Mapping[str, Any],
    clock: str,
    share: float,
) -> dict[str, Any]:
    held = [(name, trace) for name, one in measured.items() for trace in one.held]
    rows = []
    for name, one in measured.items():
        took = [sum(operator.seconds for operator in trace.operators) for trace in one.held]
        rows.append(
            {
                "network": name,
                "operators": median(len(trace.operators) for trace in one.held),
                "operators_s": median(took),
                "between": median(p / t for p, t in zip(one.plain, took, strict=True)) - 1,
                "samples": asdict(residual((whole, trace) for trace in one.held).steps),
                "networks": asdict(residual((without[name], trace) for trace in one.held).steps),
            }
        )
    return {
        "machine": machine,
        "clock": clock,
        "core_share": share,
        "quiet": share >= _QUIET,
        "fitted_steps": sum(len(one.fitted) for one in measured.values()),
        "held_steps": len(held),
        "model": _plain(whole),
        "three_figures": _plain(sheet),
        "residuals": {
            "samples": _told(residual((whole, trace) for _, trace in held)),
            "networks": _told(residual((without[name], trace) for name, trace in held)),
            "three_figures": _told(residual((sheet, trace) for _, trace in held)),
        },
        "rows": rows,
        "steps": [
            [
                name,
                sum(operator.seconds for operator in trace.operators),
                whole.time(trace).seconds,
                without[name].time(trace).seconds,
            ]
            for name, trace in held
        ],
        "operators": _by_operator(held, whole),
    }


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


def _told(found: Residual) -> dict[str, Any]:
    plain = asdict(found)
    plain["kinds"] = {kind.value: errors for kind, errors in plain["kinds"].items()}
    return plain


def _plain(model: CostModel) -> dict[str, Any]:
    plain = asdict(model)
    plain["overhead"] = {kind.value: seconds for kind, seconds in model.overhead.items()}
    plain["operators"] = {name: list(factors) for name, factors in sorted(model.operators.items())}
    return plain
