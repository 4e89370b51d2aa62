"""Time per training step over budgets, for every policy, compared with plain PyTorch.

Dynamic networks train under shares of their training footprint. Each policy runs in its own process
and takes turns with plain training, on the same samples. A budget under which a policy cannot run
is reported with its reason.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.baselines.cgroup import LimitError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Side, Turns, Way, charged_before, measure, median_seconds
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.pilot_recording import learned
from dynoffload.experiments.ways import BUDGETED, CHECKPOINT, DTR, REPLAY, Spec
from dynoffload.experiments.zoo import TRUNK
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDS = {"min_length": 16, "max_length": 24, "min_depth": 4, "max_depth": 8, "max_cycles": 3}
_TREES = {"hidden": 512, "embedding": 256}
_MOE = {"hidden": 256, "width": 512, "layers": 4}
PRESETS: dict[str, dict[str, Spec]] = {
    "tiny": {
        "moe": Spec("moe", "tiny", shape={"rows": 1, "length": 16}),
        "tree": Spec("tree", "tiny-untied", shape={"max_nodes": 16}),
        TRUNK: Spec(TRUNK, "tiny", shape={"rows": 1, **_FOLDS}),
    },
    "small": {
        "moe": Spec("moe", "tiny", sizes=_MOE, shape={"rows": 1, "length": 24}),
        "tree": Spec("tree", "tiny-untied", sizes=_TREES, shape={"max_nodes": 24}),
        TRUNK: Spec(TRUNK, "small", sizes={"blocks": 2}, shape={"rows": 4, **_FOLDS}),
    },
}
"""Networks by preset and name."""
PILOT, SYSTEM = "pilot", "os-paging"
POLICIES = {
    PILOT: ("pilot", "o", "plan"),
    "repeat": ("last order", "s", "optimizer"),
    REPLAY: ("recorded order, strict", "^", "backward"),
    "on-demand": ("on demand", "v", "fault"),
    DTR: ("rematerialisation (DTR)", "D", "stall"),
    CHECKPOINT: ("activation checkpointing", "X", "rss"),
    SYSTEM: ("paging by the system", "P", "ink"),
}
"""Name in ``--policies`` -> title, marker and colour in the figure. Each is a policy of
`OffloadConfig`, strict replay, DTR, or plain training in a memory group: with swap, or with
activation checkpointing and without swap."""
_LEARNED = 32  # recorded steps on which the pilot is trained
_LEAST_STEPS = 5
_SPARE = 2.0  # factor of swap: pages keep their slot after they are read back
_TIE = 1.1
"""Ratio below which times count as equal: single steps of one policy vary by more."""
_NUMBER = re.compile(r"\d[\d.]*( [KMG]?i?B)?")


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    network: tuple[str, ...] = option(tuple(PRESETS["small"]), "networks of the zoo")
    preset: str = option("small", "of all of them: tiny or small")
    budgets: tuple[str, ...] = option(
        ("1", "1/2", "1/4", "1/8", "1/16"),
        "shares of parameters, gradients, optimizer state and what a step saves",
    )
    policies: tuple[str, ...] = option(tuple(POLICIES), "how the budgets are kept")
    steps: int = option(
        6, "of each run that count, three to a turn; from the eleventh on a session may change"
    )
    warmup: int = option(
        2, "first steps, which do not count; by the twelfth a session finds whether all fits"
    )
    spill_dir: Path | None = option(None, "where spill and swap files lie", place=True)

    def __post_init__(self) -> None:
        check_known("preset", [self.preset], PRESETS)
        check_known("network", self.network, PRESETS[self.preset], some=True)
        check_known("policies", self.policies, POLICIES, some=True)
        if not self.shares:
            raise ConfigError("there are no budgets: give shares such as 1,1/2,1/4")
        if self.steps < _LEAST_STEPS:
            raise ConfigError(f"steps={self.steps} is too few: take at least {_LEAST_STEPS}")

    @property
    def shares(self) -> list[Fraction]:
        """The budgets, in descending order."""
        return sorted({_share(text) for text in self.budgets}, reverse=True)


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise ConfigError(f"{text!r} in budgets is no share above 0: write 1/4, or 0.25")
    return share


class StepTime(Experiment[Params]):
    """A case is a network under a budget."""

    parameters = Params
    one_thread = True
    height = 4.2

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._known: dict[str, tuple[Spec, int]] = {}  # name -> plain spec, footprint in bytes

    def cases(self) -> Mapping[str, tuple[str, Fraction]]:
        return {
            f"{name}, {share}": (name, share)
            for name in self.params.network
            for share in self.params.shares
        }

    def run(self, case: tuple[str, Fraction]) -> Row:
        name, share = case
        spec, footprint = self._recorded(name)
        budget = int(share * footprint)
        ways: dict[str, Way] = {}
        sides: dict[str, Side] = {}
        for key in (key for key in POLICIES if key in self.params.policies):
            try:
                ways[key] = _way(key, spec, budget, footprint)
            except LimitError as error:
                sides[key] = Side(str(error))
        turns = Turns(-(-self.params.steps // Turns.per_turn), self.params.warmup)
        found = measure(
            replace(spec, pilot=None),
            ways,
            turns,
            lambda key: self.report(f"{name}, {share}: {key}"),
        )
        sides |= found.sides
        return {
            "network": name,
            "budget": str(share),
            "budget_bytes": budget,
            "footprint_bytes": footprint,
            "plain_s": {"measured": median_seconds(found.plain)},
            "policies": {
                key: {
                    "measured": asdict(sides[key]) | {"seconds": sides[key].seconds},
                    "losses_equal": sides[key].losses_equal,
                }
                for key in POLICIES
                if key in sides
            },
        }

    def _recorded(self, name: str) -> tuple[Spec, int]:
        if name not in self._known:
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            spec = PRESETS[self.params.preset][name]
            footprint, _ = learned(spec, _LEARNED, self.report, folder / "trained.pilot")
            spill_dir = str(self.params.spill_dir or default_spill_dir())
            made: dict[str, Any] = {"split": "held-out", "threads": 1, "spill_dir": spill_dir}
            spec = replace(spec, pilot=str(folder / "trained.pilot"), **made)
            self._known[name] = spec, footprint
        return self._known[name]

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows = result["rows"]
        lines = [
            {"case": row["case"], "plain_s": row["plain_s"]["measured"], "policy": key} | one
            for row in rows
            for key, one in row["policies"].items()
            if key in POLICIES  # older results have others
        ]
        first = {row["network"]: row for row in reversed(rows)}
        return [
            table("who is fastest", _STANDINGS, rows, ["fastest"]),
            table("step times", _COLUMNS, lines, ["policy"]),
            *(
                f"{name} keeps {format_bytes(row['footprint_bytes'])}, a plain step takes "
                f"{format_seconds(row['plain_s']['measured'])}"
                for name, row in sorted(first.items())
            ),
            *reasons(rows),
        ]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        rows = result["rows"]
        names = list(dict.fromkeys(row["network"] for row in rows))
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, names, strict=True):
            own = [row for row in rows if row["network"] == name]
            shares = [float(Fraction(row["budget"])) for row in own]
            for key, (title, mark, shade) in POLICIES.items():
                times = [over_plain(row, key) for row in own]
                known = [float("nan") if time is None else time for time in times]
                axes.plot(shares, known, marker=mark, ms=5, color=color[shade], label=title)
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
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
            frameon=False,
        )  # fmt: skip


def _way(key: str, spec: Spec, budget: int, footprint: int) -> Way:
    if key in (SYSTEM, CHECKPOINT):
        plain = replace(spec, pilot=None)
        base = charged_before(plain)
        if key == CHECKPOINT:
            return Way(replace(plain, mode=CHECKPOINT), base + budget)
        return Way(plain, base + budget, int(_SPARE * (base + footprint)))
    if key in (REPLAY, DTR):
        return Way(replace(spec, mode=key, budget=budget, pilot=None))
    pilot, config = spec.pilot if key == PILOT else None, {"policy": key}
    return Way(replace(spec, mode=BUDGETED, budget=budget, pilot=pilot, config=config))


# Results


def over_plain(row: Mapping[str, Any], key: str) -> float | None:
    """Return the step time of ``key`` over the plain one; None if it has none."""
    found = row["policies"].get(key, {}).get("measured")
    if found is None or found["seconds"] is None:
        return None
    return float(found["seconds"] / row["plain_s"]["measured"])


def standing(row: Mapping[str, Any]) -> tuple[list[str], float | None]:
    """Return the fastest policies, and the pilot's speed relative to the best other one."""
    times = {key: took for key in POLICIES if (took := over_plain(row, key)) is not None}
    others = [value for key, value in times.items() if key != PILOT]
    ranked = sorted(times, key=lambda key: times[key])
    fastest = [key for key in ranked if times[key] < _TIE * times[ranked[0]]]
    return fastest, min(others) / times[PILOT] if others and PILOT in times else None


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why policies cannot run, and other notes. Budgets whose reasons differ only in their
    numbers share a line."""
    grouped: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for row in rows:
        for key, policy in row["policies"].items():
            side = policy["measured"]
            if key in POLICIES and (why := side["why"] or side["note"]):
                about = row["network"], POLICIES[key][0], _NUMBER.sub("", why)
                grouped.setdefault(about, (why, []))[1].append(row["budget"])
    return [
        f"{network}, {', '.join(budgets)}: {title}: {why}"
        for (network, title, _), (why, budgets) in grouped.items()
    ]


def _pilot_over_best(row: Mapping[str, Any]) -> str:
    ratio = standing(row)[1]
    return "" if ratio is None else f"{ratio:.2f} times as fast"


def _moved(key: str) -> Cell:
    return lambda row: f"{row['measured'][key] / 1e6:.1f}" if row["measured"]["seconds"] else ""


def _time(text: Any) -> Cell:
    return lambda row: text(row) if row["measured"]["seconds"] else "cannot run"


_STANDINGS: dict[str, Cell] = {
    "network, budget": lambda row: row["case"],
    "fastest": lambda row: ", ".join(POLICIES[key][0] for key in standing(row)[0]) or "none runs",
    "pilot against best other": _pilot_over_best,
}
_COLUMNS: dict[str, Cell] = {
    "network, budget": lambda row: row["case"],
    "policy": lambda row: POLICIES[row["policy"]][0],
    "a step": _time(lambda row: format_seconds(row["measured"]["seconds"])),
    "times plain": _time(lambda row: f"{row['measured']['seconds'] / row['plain_s']:.2f}"),
    "MB in": _moved("bytes_in"),
    "out": _moved("bytes_out"),
    "losses equal": lambda row: {True: "yes", False: "NO", None: ""}[row["losses_equal"]],
}
