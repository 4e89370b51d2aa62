"""Time per training step over budgets, for every policy: measured beside simulated.

Dynamic networks train under shares of what their training keeps. Each policy has a process of its
own and takes turns with plain training, on the same samples. The same steps are simulated from
plain ones. A budget that a policy cannot run under is reported with its reason.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.estimation.calibration import Fitted
from dynoffload.experiments.baselines import BASELINES
from dynoffload.experiments.baselines.cgroup import LimitError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Side, Turns, Way, measure
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.experiments.simulation import PILOT_NAME, TRACES, material
from dynoffload.experiments.simulation_fit import Material
from dynoffload.experiments.step_time_policies import (
    BOUND,
    PILOT,
    POLICIES,
    SYSTEM,
    replayed,
    simulated,
)
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import charged_before, median_seconds
from dynoffload.experiments.zoo import TRUNK
from dynoffload.memory.spill import default_spill_dir
from dynoffload.simulation import Link, Machine, Workload
from dynoffload.simulation.overhead import RuntimeOverhead
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDS = {"min_length": 16, "max_length": 24, "min_depth": 4, "max_depth": 8, "max_cycles": 3}
PRESETS: dict[str, dict[str, Spec]] = {
    "tiny": {
        "moe": Spec("moe", "tiny", shape={"rows": 1, "length": 16}),
        "tree": Spec("tree", "tiny-untied", shape={"max_nodes": 16}),
        TRUNK: Spec(TRUNK, "tiny", shape={"rows": 1, **_FOLDS}),
    },
    "small": {
        "moe": Spec(
            "moe",
            "tiny",
            sizes={"hidden": 256, "width": 512, "layers": 4},
            shape={"rows": 1, "length": 24},
        ),
        "tree": Spec(
            "tree",
            "tiny-untied",
            sizes={"hidden": 512, "embedding": 256},
            shape={"max_nodes": 24},
        ),
        TRUNK: Spec(TRUNK, "small", sizes={"blocks": 2}, shape={"rows": 4, **_FOLDS}),
    },
}
"""Networks by preset and name."""
_LEARNED = 32  # recorded steps that the pilot learns from
_LEAST_STEPS = 5
_SPARE = 2.0  # of swap: pages stay in it after they were read back
_TIE = 1.1
"""Times that differ by less are equal: single steps of one policy differ by more."""
_SIDES = "measured", "simulated"
_NUMBER = re.compile(r"\d[\d.]*( [KMG]?i?B)?")
_UNDIVIDED = "no measured policy says how the runtime would divide the budget: ask for one, too"
_ALL_REFUSED = "no measured policy runs under this budget, so none says how it would be divided"
_MARKS = dict(zip(POLICIES, "os^vDP<>*", strict=True))
_COLORS = ("plan", "optimizer", "backward", "fault", "stall", "ink", "rss", "evict", "compute")
_SHADES = dict(zip(POLICIES, _COLORS, strict=True))


@dataclass(frozen=True)
class Params:
    """What is compared."""

    network: tuple[str, ...] = option(tuple(PRESETS["small"]), "networks of the zoo")
    preset: str = option("small", "of all of them: tiny or small")
    budgets: tuple[str, ...] = option(
        ("1", "1/2", "1/4", "1/8", "1/16"),
        "shares of parameters, gradients, optimizer state and what a step saves",
    )
    policies: tuple[str, ...] = option(
        tuple(POLICIES), "of which intervals, capuchin and clairvoyant are simulated only"
    )
    steps: int = option(
        6, "of each run that count, three to a turn; from the eleventh on a session may change"
    )
    calibration: Path | None = option(
        None, "what `experiment simulation --json` wrote on this machine; else that as shipped"
    )
    spill_dir: Path | None = option(None, "where spill and swap files lie", place=True)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"no preset {self.preset!r}; there are {', '.join(PRESETS)}")
        _check("network", self.network, PRESETS[self.preset])
        _check("policies", self.policies, POLICIES)
        if not self.shares:
            raise ConfigError("there are no budgets: give shares such as 1,1/2,1/4")
        if self.steps < _LEAST_STEPS:
            raise ConfigError(f"steps={self.steps} is too few: take at least {_LEAST_STEPS}")

    @property
    def shares(self) -> list[Fraction]:
        """The budgets, from the largest."""
        return sorted({_share(text) for text in self.budgets}, reverse=True)

    @property
    def turns(self) -> Turns:
        """How each policy makes its steps."""
        return Turns(-(-self.steps // Turns.per_turn))


def _check(name: str, asked: Sequence[str], known: Mapping[str, Any]) -> None:
    strange = [one for one in asked if one not in known]
    if strange or not asked:
        named = ", ".join(map(repr, strange)) or "nothing"
        raise ConfigError(f"{name} names {named}; there are {', '.join(known)}")


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise ConfigError(f"{text!r} in budgets is no share above 0: write 1/4, or 0.25")
    return share


@dataclass(frozen=True)
class _Recorded:
    """What plain training of a network shows.

    Attributes:
        spec: what plain training runs.
        material: of it.
        work: the same, operator by operator.
        pilot: the file of the pilot.
        operators: of the last step.
    """

    spec: Spec
    material: Material
    work: Workload
    pilot: Path
    operators: int


class StepTime(Experiment[Params]):
    """A case is a network under a budget."""

    parameters = Params
    one_thread = True
    height = 4.2

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._known: dict[str, _Recorded] = {}
        self._spill_dir = str(params.spill_dir or default_spill_dir())

    @cached_property
    def fit(self) -> Fitted:
        """The machine, and what the runtime takes on it; one for all rows, also resumed ones."""
        from dynoffload.estimation.calibration import Fitted

        if self.rows:
            known = self.rows[0]["fit"]
            machine, work = dict(known["machine"]), dict(known["work"])
            link, moves = Link(**machine.pop("link")), work.pop("moves")
            work["moves"] = {int(nbytes): seconds for nbytes, seconds in moves.items()}
            return Fitted(Machine(link, **machine), RuntimeOverhead(**work), known["pace_s"])
        self.report("the link")
        found = Fitted.of(self.params.calibration).measured(self._spill_dir)
        return Fitted(found.machine, found.work, found.pace_s)

    def cases(self) -> Mapping[str, tuple[str, Fraction]]:
        return {
            f"{name}, {share}": (name, share)
            for name in self.params.network
            for share in self.params.shares
        }

    def run(self, case: tuple[str, Fraction]) -> Row:
        name, share = case
        turns, found = self.params.turns, self._recorded(name)
        known = found.material
        keys = [key for key in POLICIES if key in self.params.policies]
        budget = int(share * known.footprint)
        plain = [sum(known.steps[number].seconds) for number in turns.counted]
        ways, own = self._ways(found, [key for key in keys if POLICIES[key].runs], budget)
        beside, measured, _ = measure(
            found.spec, ways, turns, lambda key: self.report(f"{name}, {share}: {key}")
        )
        own |= measured
        sides: dict[str, Any] = {}
        for key in keys:
            self.report(f"{name}, {share}: {key}, simulated")
            division = _division(own, key)
            other = simulated(key, known, found.work, budget, *division, self.fit, turns.counted)
            sides[key] = {
                "measured": _plain(own[key]) if key in own else None,
                "simulated": _plain(other),
                "losses_equal": own[key].losses_equal if key in own else None,
            }
        return {
            "network": name,
            "budget": str(share),
            "budget_bytes": budget,
            "footprint_bytes": known.footprint,
            "operators": found.operators,
            "plain_s": {"measured": median_seconds(beside), "simulated": median(plain)},
            "policies": sides,
            "fit": asdict(self.fit),
        }

    def _ways(
        self, found: _Recorded, keys: Sequence[str], budget: int
    ) -> tuple[dict[str, Way], dict[str, Side]]:
        """Return how the policies are run, and why those are not that cannot be."""
        ways: dict[str, Way] = {}
        refused: dict[str, Side] = {}
        for key in keys:
            if key != SYSTEM:
                of = {"baseline": key} if key in BASELINES else {"config": {"policy": key}}
                pilot = str(found.pilot) if key == PILOT else None
                spec = replace(found.spec, mode=BUDGETED, budget=budget, pilot=pilot, **of)
                ways[key] = Way(spec)
                continue
            try:
                base = charged_before(found.spec)
            except LimitError as error:
                refused[key] = Side(str(error))
            else:
                swap = int(_SPARE * (base + found.material.footprint))
                ways[key] = Way(found.spec, base + budget, swap)
        return ways, refused

    def _recorded(self, name: str) -> _Recorded:
        if name in self._known:
            return self._known[name]
        from dynoffload.profiler import load_trace, trace_files

        spec = PRESETS[self.params.preset][name]
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        known = material(
            name,
            self.params.turns.steps,
            folder,
            self.report,
            learn=PILOT in self.params.policies,
            zoo={key: getattr(spec, key) for key in ("network", "preset", "sizes", "shape")},
            learned=_LEARNED,
        )
        traces = [load_trace(path) for path in trace_files(folder / name / TRACES)]
        self._known[name] = _Recorded(
            replace(spec, split="held-out", threads=1, spill_dir=self._spill_dir),
            known,
            replayed(known, traces),
            folder / name / PILOT_NAME,
            len(traces[-1].operators),
        )
        return self._known[name]

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        fit = self.fit
        return {
            "link": asdict(fit.machine.link),
            "interference": fit.machine.interference,
            "work": asdict(fit.work),
            "pace_s": fit.pace_s,
            "standings": {
                row["case"]: {side: standing(row, side) for side in _SIDES} for row in rows
            },
            "errors": errors(rows),
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows = result["rows"]
        heads = ["network, budget", "policy", "measured", "times plain", "simulated", "times plain"]
        heads += ["MB in", "out", "losses equal"]
        cells = [line for row in rows for line in _cells(row)]
        parts: list[Table | str] = [
            _standings(result["summary"]["standings"]),
            Table("step times", heads, cells, words=(0, 1)),
        ]
        first = {row["network"]: row for row in reversed(rows)}
        parts += [
            f"{name} keeps {format_bytes(row['footprint_bytes'])} in {row['operators']} operators, "
            f"a plain step takes {format_seconds(row['plain_s']['simulated'])}"
            for name, row in sorted(first.items())
        ]
        parts += [
            f"{POLICIES[key].title}: simulated times over plain are off by {one['median']:.0%} in "
            f"the median of {one['cells']} cases, by {one['worst']:.0%} at worst"
            for key, one in result["summary"]["errors"].items()
        ]
        return parts + reasons(rows)

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        _draw(figure, color, result["rows"])


def _division(own: Mapping[str, Side], key: str) -> tuple[Mapping[str, int] | None, str]:
    """Return how the runtime divides the budget under a policy, and why it does not; what is not
    measured has the division of what is."""
    found = own.get(key)
    if found is None and POLICIES[key].strategy is None:
        found = next((one for one in own.values() if one.sizing is not None), None)
    if found is None:
        return None, _ALL_REFUSED if own else _UNDIVIDED
    return found.sizing, found.why


def _plain(side: Side) -> dict[str, Any]:
    known = asdict(side)
    known["seconds"] = side.seconds
    del known["losses_equal"], known["sizing"]
    return known


# What comes of it


def over_plain(row: Mapping[str, Any], key: str, side: str) -> float | None:
    """Return the time of a step of ``key`` over that of a plain one; None if it has none."""
    found = row["policies"][key][side]
    if found is None or found["seconds"] is None:
        return None
    return float(found["seconds"] / row["plain_s"][side])


def standing(row: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return the fastest policy, and how many times as fast as the best other one the pilot is.

    What knows every step is no policy. Simulated, only what is simulated as the runtime is ranked.
    """
    times = {
        key: times
        for key in row["policies"]
        if (times := over_plain(row, key, side)) is not None
        and key != BOUND
        and (side == "measured" or POLICIES[key].strategy is None)
    }
    others = [value for key, value in times.items() if key != PILOT]
    ranked = sorted(times, key=lambda key: times[key])
    return {
        "fastest": [key for key in ranked if times[key] < _TIE * times[ranked[0]]],
        "pilot_over_best": min(others) / times[PILOT] if others and PILOT in times else None,
    }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how far simulated times over plain ones are from measured ones, by policy."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for key in row["policies"]:
            own, other = (over_plain(row, key, side) for side in _SIDES)
            if own is not None and other is not None:
                found.setdefault(key, []).append(abs(other / own - 1))
    return {
        key: {"cells": len(each), "median": median(each), "worst": max(each)}
        for key, each in found.items()
    }


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why what cannot run cannot, and other notes. Policies and budgets whose reasons differ
    by no more than their numbers share a line."""
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        for key, policy in row["policies"].items():
            for side in _SIDES:
                why = policy[side] and (policy[side]["why"] or policy[side]["note"])
                if why:
                    about = row["network"], _NUMBER.sub("", why)
                    first.setdefault(about, why)
                    who = f"{POLICIES[key].title} ({side})"
                    told.setdefault(about, {}).setdefault(who, []).append(row["budget"])
    lines = []
    for about, budgets in told.items():
        same: dict[str, list[str]] = {}
        for who, under in budgets.items():
            same.setdefault(", ".join(under), []).append(who)
        lines += [
            f"{about[0]}, {under}: {', '.join(who)}: {first[about]}" for under, who in same.items()
        ]
    return lines


def _standings(found: Mapping[str, Any]) -> Table:
    heads = [head for side in _SIDES for head in (f"fastest, {side}", "pilot against best other")]
    rows = []
    for case, sides in found.items():
        cells = [case]
        for side in _SIDES:
            own = sides[side]
            ratio = own["pilot_over_best"]
            cells += [
                ", ".join(POLICIES[key].title for key in own["fastest"]) or "none runs",
                "" if ratio is None else f"{ratio:.2f} times as fast",
            ]
        rows.append(cells)
    return Table("who is fastest", ["network, budget", *heads], rows, words=(0, 1, 3))


def _cells(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for key, policy in row["policies"].items():
        cells = [row["case"], POLICIES[key].title]
        for side in _SIDES:
            ratio = over_plain(row, key, side)
            if ratio is not None:
                cells += [format_seconds(policy[side]["seconds"]), f"{ratio:.2f}"]
            else:
                why = policy[side] and policy[side]["why"]
                cells += ["cannot run" if why else f"not {side}", ""]
        shown = next((one for side in _SIDES if (one := policy[side]) and one["seconds"]), None)
        moved = ("bytes_in", "bytes_out")
        cells += ["" if shown is None else f"{shown[one] / 1e6:.1f}" for one in moved]
        yield [*cells, {True: "yes", False: "NO", None: ""}[policy["losses_equal"]]]


def _draw(figure: Figure, color: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(row["network"] for row in rows))
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        own = [row for row in rows if row["network"] == name]
        shares = [float(Fraction(row["budget"])) for row in own]
        for key in own[0]["policies"]:
            for side, style in zip(_SIDES, ("-", "--"), strict=True):
                times = [over_plain(row, key, side) for row in own]
                if any(times):
                    axes.plot(
                        shares,
                        [float("nan") if time is None else time for time in times],
                        style,
                        marker=_MARKS[key],
                        markersize=5,
                        markerfacecolor=color[_SHADES[key] if side == "measured" else "paper"],
                        color=color[_SHADES[key]],
                        label=f"{POLICIES[key].title}, {side}",
                    )
        axes.axhline(1.0, color=color["muted"], linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(shares, [row["budget"] for row in own])
        axes.invert_xaxis()
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("budget, of what training keeps")
        axes.set_title(name, loc="left")
    panels[0].set_ylabel("step, times plain in memory")
    labels: dict[str, Any] = {}
    for axes in panels:
        lines, told = axes.get_legend_handles_labels()
        labels |= dict(zip(told, lines, strict=True))
    figure.legend(
        labels.values(), labels, loc="outside upper center", ncols=4, frameon=False, fontsize=7
    )
