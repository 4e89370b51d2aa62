"""What learning is worth: each part of the pilot with it and without, network by network.

Networks are watched while they train (`dynoffload.experiments.watched`), at several seeds. The
general pilot is trained once for each family that is left out, without the idioms of blocks, with
them, with shuffled ones and with shapes in place of them, and scored on the networks of that
family, step by step as a session would use it. Other networks train under a budget, where all ways
to predict take turns (`dynoffload.experiments.ablation_sessions`), with the pilot that comes with
the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.errors import ConfigError
from dynoffload.experiments.ablation_blocks import MODULES, PLANNED, compare
from dynoffload.experiments.ablation_sessions import (
    CLAIRVOYANT,
    CONTROL,
    POLICIES,
    WARMUP,
    contests,
    train_in_turns,
)
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Turns
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.material import (
    EARLY,
    IDIOMS,
    KINDS,
    PILOT,
    SHAPES,
    SHUFFLED,
    Material,
    coded,
)
from dynoffload.experiments.pilot_recording import CASES
from dynoffload.experiments.predictors import Markov, MostFrequent, Online, RepeatLast
from dynoffload.experiments.scoring import score
from dynoffload.experiments.trainer import finite
from dynoffload.experiments.watched import MATERIAL, SUBJECTS, Subject, Watched
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example
from dynoffload.pilot.general import General
from dynoffload.pilot.general_training import rows_of, train
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Vocabulary
from dynoffload.runtime.migration.gates import Silence
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATE = 200
"""The step from which the rest is scored."""
NO_PROBES, OWN, ORACLE = "pilot, no routers", "pilot of its own", "oracle"
BASELINES: dict[str, Callable[[], Online]] = {
    "last order": RepeatLast,
    "most frequent": MostFrequent,
    "Markov": Markov,
}
ROWS = (*KINDS, NO_PROBES, OWN, *BASELINES, ORACLE)
"""Predictors in tables."""
LATENCY_S = 1e-3
"""Most seconds of a prediction, in the slowest twentieth."""
_WORST = 0.01  # most points that the first steps may lose against the last order
_TODAY = {
    "early_lstm": 0.874,
    "switch_32": 0.785,
    "switch_128": 0.465,
    "moe_8": 0.715,
    "moe_64": 0.749,
    "moe_512": 0.832,
    "exits": 0.831,
}
"""Order before the step of the pilots trained for each network that were there before."""
_SHADES = ("plan", "rss", "evict", "fault", "optimizer")


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    only: tuple[str, ...] = option(
        (), "networks that are scored, by key; all are watched, to learn from the others"
    )
    sessions: tuple[str, ...] = option(("all",), "networks that train in sessions; none if empty")
    seeds: int = option(3, "how many, from 0")
    watched: int = option(320, "steps of each network, fewer where they are slow")
    material: int = option(len(MATERIAL), "architectures of transformers to learn from, at most")
    size: str = option("small", "sizes in sessions: tiny or small")
    recorded: int = option(120, "steps by which kinds of blocks are compared; none if 0")
    steps: int = option(12, "measured steps of each session, at least")
    warmup: int = option(WARMUP, "steps before them")
    jobs: int = option(-1, "processes that watch and train; -1 for one per core")
    folder: Path | None = option(
        None, "where watched steps are kept for another run of the same code", place=True
    )
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


@dataclass(frozen=True)
class Scored:
    """One network at one seed, to be scored."""

    subject: Subject
    seed: int


@dataclass(frozen=True)
class Cut:
    """One network at one seed, to be cut into blocks of both kinds."""

    key: str
    seed: int


@dataclass(frozen=True)
class Trained:
    """One network at one seed, to be trained in sessions."""

    key: str
    seed: int


class Ablation(Experiment[Params]):
    """A case is a network at a seed, watched and scored, or trained in sessions."""

    parameters = Params
    height = 9.0

    def cases(self) -> Mapping[str, Scored | Cut | Trained]:
        own = self.params
        check_known("only", own.only, SUBJECTS)
        known = contests(own.size)
        paged = tuple(known) if own.sessions == ("all",) else own.sessions
        check_known("sessions", paged, known)
        if own.seeds < 1 or own.watched <= EARLY:
            raise ConfigError(
                f"seeds={own.seeds} and watched={own.watched} are too few: take at least 1 and "
                f"{EARLY + 1}"
            )
        seeds = range(own.seeds)
        return {
            **{
                f"{key}, seed {seed}": Scored(SUBJECTS[key], seed)
                for key in own.only or SUBJECTS
                for seed in seeds
            },
            **{
                f"{key}, blocks, seed {seed}": Cut(key, seed)
                for key in own.only or CASES
                if own.recorded and key in CASES
                for seed in seeds
            },
            **{
                f"{key}, sessions, seed {seed}": Trained(key, seed)
                for seed in seeds
                for key in paged
            },
        }

    def run(self, case: Scored | Cut | Trained) -> Row:
        own = self.params
        if isinstance(case, Trained):
            contest = contests(own.size)[case.key]
            turns = Turns(-(-own.steps // 4), own.warmup, 4)
            row = train_in_turns(contest, case.seed, turns, own.spill_dir, self.report)
            return {"kind": "sessions", "network": case.key, **row}
        if isinstance(case, Cut):
            found = self._cuts[case.key, case.seed]
            return {"kind": "blocks", "network": case.key, "seed": case.seed, **found}
        key, seed = case.subject.key, case.seed
        return {"kind": "scores", "network": key, "seed": seed, **self._scores[key, seed]}

    @cached_property
    def _cuts(self) -> dict[tuple[str, int], Row]:
        """The scores with both kinds of blocks, of every network that has none yet."""
        done = {row["case"] for row in self.rows}
        cut = [c for n, c in self.cases().items() if n not in done and isinstance(c, Cut)]
        tasks = [(case.key, self.params.recorded, case.seed) for case in cut]
        found: dict[tuple[str, int], Row] = {}
        for number, row in run_tasks(compare, tasks, self.params.jobs):
            self.report("comparing kinds of blocks", len(found), len(tasks))
            found[cut[number].key, cut[number].seed] = row
        return found

    @cached_property
    def _scores(self) -> dict[tuple[str, int], Row]:
        """The scores of every network at every seed that has none yet."""
        done = {row["case"] for row in self.rows}
        cases = [case for name, case in self.cases().items() if name not in done]
        scored = [case for case in cases if isinstance(case, Scored)]
        families = sorted({case.subject.family for case in scored})
        pilots = self._material.left_out(families)
        tasks = [
            (
                self._material.watched[case.subject.key, case.seed],
                {kind: pilots[case.subject.family, kind, case.seed] for kind in KINDS},
                case.seed,
            )
            for case in scored
        ]
        found: dict[tuple[str, int], Row] = {}
        for number, row in run_tasks(scores, tasks, self.params.jobs):
            self.report("scoring", len(found), len(tasks))
            found[scored[number].subject.key, scored[number].seed] = row
        return found

    @cached_property
    def _material(self) -> Material:
        own = self.params
        return Material(own.seeds, own.watched, own.material, own.jobs, own.folder, self.report)

    # Results

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        scored = [row for row in rows if row["kind"] == "scores"]
        paged = [row for row in rows if row["kind"] == "sessions"]
        networks = {
            key: _means([row for row in scored if row["network"] == key])
            for key in dict.fromkeys(row["network"] for row in scored)
        }
        sessions = {
            key: _ratios([row for row in paged if row["network"] == key])
            for key in dict.fromkeys(row["network"] for row in paged)
        }
        cut = [row for row in rows if row["kind"] == "blocks"]
        blocks = {
            key: {
                kind: {
                    what: _spread(row[kind][what] for row in cut if row["network"] == key)
                    for what in ("blocks", "order", "missed_bytes", "wasted_bytes")
                }
                for kind in (MODULES, PLANNED)
            }
            for key in dict.fromkeys(row["network"] for row in cut)
        }
        return {"networks": networks, "blocks": blocks, "sessions": sessions}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found = result["summary"]
        networks = [{"key": key, **one} for key, one in found["networks"].items()]
        sessions = [{"key": key, **one} for key, one in found["sessions"].items()]
        parts: list[Table | str] = []
        for title, what, names in _SCORES:
            columns: dict[str, Cell] = {"network": lambda row: SUBJECTS[row["key"]].title}
            columns |= {name: _cell(name, what) for name in names}
            parts.append(table(title, columns, networks))
        columns = {
            "network": lambda row: SUBJECTS[row["key"]].title,
            "blocks": lambda row: f"{row['blocks']['mean']:.0f}",
            "distinct idiom vectors": lambda row: f"{row['distinct_idioms']['mean']:.0f}",
            "distinct shapes": lambda row: f"{row['distinct_shapes']['mean']:.0f}",
            "learning from a step": _cell(PILOT, "learning_s"),
            "silent steps": lambda row: f"{row['silent']['mean']:.0%}",
            "order foregone in them": lambda row: (
                f"{row['foregone']['mean']:+.3f}" if row["foregone"] else "–"
            ),
        }
        parts.append(table("blocks, what learning takes, and silence", columns, networks))
        cut = [{"key": key, **one} for key, one in found["blocks"].items()]
        if cut:
            columns = {"network": lambda row: SUBJECTS[row["key"]].title}
            for kind in (MODULES, PLANNED):
                for name in ("blocks", "order", "missed_bytes", "wasted_bytes"):
                    columns[f"{kind} {_KINDS[name]}"] = _cell(kind, name)
            parts.append(table("kinds of blocks", columns, cut))
        for title, what in _RATIOS.items() if sessions else ():
            columns = {"network": lambda row: row["title"]}
            columns |= {way: _ratio(way, what) for way in POLICIES}
            parts.append(table(title, columns, sessions))
        return [*parts, *verdicts(found)]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        networks, sessions = result["summary"]["networks"], result["summary"]["sessions"]
        panels = figure.subplots(1, 1 + bool(sessions), squeeze=False)[0]
        left, right = panels[0], panels[-1]
        names = ("last order", "most frequent", PILOT, ORACLE)
        for name, shade, mark in zip(
            names, ("fault", "rss", "plan", "optimizer"), "vsoD", strict=True
        ):
            what = "late" if name == ORACLE else "early"
            known = [one[name].get(what) if name in one else None for one in networks.values()]
            left.plot(
                [math.nan if one is None else one["mean"] for one in known],
                range(len(known)),
                mark,
                color=color[shade],
                markersize=4.5,
                label=f"{name}, first {EARLY} steps" if what == "early" else "oracle",
            )
        left.set_yticks(range(len(networks)), [SUBJECTS[key].title for key in networks])
        left.invert_yaxis()
        left.set_xlim(0, 1.02)
        left.set_xlabel("block-order accuracy before the step")
        left.legend(loc="lower left", fontsize=7, frameon=False)
        if sessions:
            self._draw_stalls(right, color, sessions)
        for axes in panels:
            axes.grid(visible=True, axis="x")

    def _draw_stalls(
        self, axes: Axes, color: Mapping[str, str], sessions: Mapping[str, Any]
    ) -> None:
        ways = ("last order", "pilot, no routers", "pilot", CLAIRVOYANT)
        thick = 0.8 / len(ways)
        for number, (way, shade) in enumerate(zip(ways, _SHADES, strict=False)):
            axes.barh(
                [place + (number - 1.5) * thick for place in range(len(sessions))],
                [one[way]["stall"]["mean"] for one in sessions.values()],
                height=thick,
                color=color[shade],
                label=way,
            )
        axes.set_yticks(range(len(sessions)), [one["title"] for one in sessions.values()])
        axes.invert_yaxis()
        axes.set_xlabel("stall over on demand")
        axes.legend(loc="lower right", fontsize=7, frameon=False)


class _Steered:
    """A pilot as an `Online` predictor."""

    def __init__(self, vocabulary: Vocabulary, general: General) -> None:
        self.pilot = Pilot(vocabulary, general)
        self.seconds: list[float] = []
        self.learning_s = 0.0

    def predict(self, example: Example) -> list[int]:
        found = self.pilot.predict(example.sample)
        self.seconds.append(found.seconds)
        return found.blocks

    def follow(self, example: Example) -> StepTracker:
        assert self.pilot.tracker is not None
        return self.pilot.tracker

    def observe(self, example: Example) -> None:
        begun = perf_counter()
        self.pilot.observe(example.sample, example.blocks)
        if self.pilot.due:
            self.pilot.consolidate()
        self.learning_s += perf_counter() - begun


def scores(watched: Watched, pilots: Mapping[str, General], seed: int) -> Row:
    """Return the scores of every predictor on one network's steps.

    Args:
        watched: the steps.
        pilots: general pilots that know nothing of this network's family, by kind.
        seed: of the shuffled idioms.
    """
    late = min(LATE, 2 * len(watched.examples) // 3)
    first, rest = range(1, EARLY), range(late, len(watched.examples))
    mute = replace(watched, examples=[replace(one, hints=()) for one in watched.examples])
    own = train([rows_of(coded(watched, PILOT, seed), watched.examples[:late], seed)], seed, {})
    found: Row = {}
    tried: list[tuple[str, General, Watched]] = [
        *((kind, general, watched) for kind, general in pilots.items()),
        (NO_PROBES, pilots[PILOT], mute),
        (OWN, own, watched),
    ]
    for name, general, steps in tried:
        kind = name if name in pilots else PILOT
        steered = _Steered(coded(watched, kind, seed), general)
        begun = score(steps, steered, first)
        steered = _Steered(coded(watched, kind, seed), general)
        after = score(steps, steered, rest, steered.follow)
        found[name] = {
            "early": begun.order,
            "late": after.order,
            **_plain(asdict(after)),
            "latency_s": median(steered.seconds),
            "slow_s": float(np.quantile(steered.seconds, 0.95)),
            "learning_s": steered.learning_s / len(watched.examples),
        }
    for name, make in BASELINES.items():
        after = score(watched, make(), rest)
        found[name] = {
            "early": score(watched, make(), first).order,
            "late": after.order,
            **_plain(asdict(after)),
        }
    if watched.oracle:
        ran = [one.blocks for one in watched.examples]
        right = [block_order_accuracy(*pair) for pair in zip(watched.oracle, ran, strict=True)]
        found[ORACLE] = {"early": fmean(right[1:EARLY]), "late": fmean(right[late:])}
    silent, foregone = silence(watched, pilots[PILOT], seed)
    return {
        "silent": silent,
        "foregone": foregone,
        "steps": len(watched.examples),
        "paths": len({tuple(one.blocks) for one in watched.examples}),
        "blocks": len(watched.vocabulary),
        "distinct_idioms": len({block.idioms for block in watched.vocabulary.blocks}),
        "distinct_shapes": len({block.idioms for block in watched.shaped.blocks}),
        "predictors": found,
    }


def silence(watched: Watched, general: General, seed: int) -> tuple[float, float | None]:
    """Return the share of the steps in which a session asks its pilot no more, and by how much the
    pilot would have been more accurate than the last order in these; None if there are none."""
    steered, last, rule = _Steered(coded(watched, PILOT, seed), general), RepeatLast(), Silence()
    gains: list[float] = []
    for example in watched.examples:
        pilot, repeated = (
            block_order_accuracy(one.predict(example), example.blocks) for one in (steered, last)
        )
        if rule.holds:
            gains.append(pilot - repeated)
        rule.observe(None if rule.holds else pilot - repeated, repeated)
        steered.observe(example)
        last.observe(example)
    return len(gains) / len(watched.examples), fmean(gains) if gains else None


def _plain(values: Mapping[str, float]) -> dict[str, Any]:
    return {name: finite(value) for name, value in values.items() if name != "order"}


def _spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return mean, minimum, maximum and each value; None if there are no numbers."""
    each = [*values]
    there = [value for value in each if value is not None]
    if not there:
        return None
    return {"mean": fmean(there), "min": min(there), "max": max(there), "each": each}


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    """Return each number of each predictor over the seeds."""
    return {
        name: {
            what: _spread(row["predictors"][name][what] for row in rows)
            for what in rows[0]["predictors"][name]
        }
        for name in rows[0]["predictors"]
    } | {
        what: _spread(row[what] for row in rows)
        for what in ("paths", "blocks", "distinct_idioms", "distinct_shapes", "silent", "foregone")
    }


def _ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ratios of each way over the seeds: to plain, and its stall to that on demand."""
    found: dict[str, Any] = {"title": rows[0]["title"]}
    for way in POLICIES:
        runs = [row["runs"] for row in rows]
        found[way] = {
            "step": _spread(run[way]["step_s"] / run["plain"]["step_s"] for run in runs),
            "over_last": _spread(
                float(
                    np.median(np.divide(run[way]["each_step_s"], run["last order"]["each_step_s"]))
                )
                for run in runs
            ),
        }
        if way == CONTROL:
            continue
        found[way] |= {
            "stall": _spread(
                run[way]["stall_total_s"] / max(run["on demand"]["stall_total_s"], 1e-9)
                for run in runs
            ),
            "wasted": _spread(
                run[way]["wasted_bytes"] / max(1, run[way]["prefetched_bytes"]) for run in runs
            ),
            "read": _spread(run[way]["bytes_in"] / 1e6 for run in runs),
            "predicting": _spread(run[way]["predicting_share"] for run in runs),
            "replanning": _spread(run[way]["replanning_share"] for run in runs),
            "equal": _spread(float(run[way]["losses_equal"]) for run in runs),
        }
    return found


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """Return what the numbers say of each aim and each part."""
    networks, sessions = found["networks"], found["sessions"]
    lines = []
    zoo = {key: one for key, one in networks.items() if key not in _MIXTURES}
    mixtures = {key: one for key, one in networks.items() if key in _MIXTURES}
    for group, there in (("", zoo), (" mixtures of transformers", mixtures)):
        gains = [(key, _gain(one, PILOT, "last order", "early")) for key, one in there.items()]
        better = [key for key, gain in gains if gain["mean"] > 0]
        worse = [key for key, gain in gains if gain["mean"] < -_WORST]
        if gains:
            lines.append(
                f"first {EARLY} steps, family left out: better than the last order in "
                f"{len(better)} of {len(there)}{group}; worse by more than a point in "
                f"{len(worse)}{_named(worse)}"
            )
    lost = [key for key, one in networks.items() if _sign(_gain(one, PILOT, OWN, "late")) < 0]
    lines.append(
        f"from step {LATE} on: at least as good as a pilot of its own, within the spread of the "
        f"difference, in {len(networks) - len(lost)} of {len(networks)}{_not(lost)}"
    )
    for key, today in _TODAY.items():
        if key in networks:
            late = networks[key][PILOT]["late"]["mean"]
            top = networks[key].get(ORACLE)
            ceiling = f", oracle {top['late']['mean']:.3f}" if top else ""
            lines.append(f"{SUBJECTS[key].title}: {late:.3f}, before {today:.3f}{ceiling}")
    for part, name, without, what in (
        ("idioms", IDIOMS, PILOT, "early"),
        ("idioms", IDIOMS, PILOT, "late"),
        ("idioms, against shuffled ones", IDIOMS, SHUFFLED, "early"),
        ("shapes", SHAPES, PILOT, "early"),
        ("shapes", SHAPES, PILOT, "late"),
        ("routers, one block ahead", PILOT, NO_PROBES, "ahead"),
    ):
        found_gains = {
            key: _gain(one, name, without, what)
            for key, one in networks.items()
            if one[name].get(what) and one[without].get(what)
        }
        up = [key for key, value in found_gains.items() if _sign(value) > 0]
        down = [key for key, value in found_gains.items() if _sign(value) < 0]
        mean = fmean(value["mean"] for value in found_gains.values())
        lines.append(
            f"{part}, {what}: better by more than the spread in {len(up)} of "
            f"{len(found_gains)}{_named(up)}, worse in {len(down)}{_named(down)}; mean {mean:+.4f}"
        )
    cut = found["blocks"]
    if cut:
        order, less, vain = (
            [key for key, one in cut.items() if _apart(one, what) * sign > 0]
            for what, sign in (("order", 1), ("missed_bytes", -1), ("wasted_bytes", -1))
        )
        lines.append(
            f"the planner's blocks, against module-wise ones: named better in {len(order)} of "
            f"{len(cut)}{_named(order)}, fewer bytes missed in {len(less)}, fewer wasted "
            f"in {len(vain)}"
        )
    slow = [key for key, one in networks.items() if one[PILOT]["slow_s"]["mean"] > LATENCY_S]
    lines.append(
        f"slowest twentieth of the predictions at most {format_seconds(LATENCY_S)}: "
        f"{len(networks) - len(slow)} of {len(networks)}{_not(slow)}"
    )
    for part, way, without in _IN_SESSIONS if sessions else ():
        signs = {key: _sign(_gain(one, way, without, "stall")) for key, one in sessions.items()}
        less = [key for key, sign in signs.items() if sign < 0]
        more = [key for key, sign in signs.items() if sign > 0]
        lines.append(
            f"{part}, in sessions: less stall by more than the spread in {len(less)} of "
            f"{len(signs)}{_named(less)}, more in {len(more)}{_named(more)}"
        )
    if sessions:
        predicting = [way for way in POLICIES if way not in (CONTROL, CLAIRVOYANT)]
        most = max(one[way]["predicting"]["max"] for one in sessions.values() for way in predicting)
        equal = all(
            one[way]["equal"]["min"] == 1
            for one in sessions.values()
            for way in POLICIES
            if way != CONTROL
        )
        lines.append(f"host time of prediction: at most {most:.2%} of the steps of any session")
        lines.append(f"losses equal plain PyTorch's bit by bit: {'all' if equal else 'NOT ALL'}")
    return lines


_IN_SESSIONS = (
    ("the pilot, against the last order", "pilot", "last order"),
    ("routers", "pilot", "pilot, no routers"),
)
"""Parts, each with the ways to predict with it and without."""
_MIXTURES = {key for key, one in SUBJECTS.items() if one.family == "mixtures"}


def _gain(one: Mapping[str, Any], name: str, other: str, what: str) -> dict[str, float]:
    """Return by how much a predictor is better than another, seed by seed: mean and extremes."""
    pairs = zip(one[name][what]["each"], one[other][what]["each"], strict=True)
    found = _spread(None if None in pair else pair[0] - pair[1] for pair in pairs)
    assert found is not None
    return found


def _sign(gain: Mapping[str, float]) -> int:
    """Return 1 or -1 for a mean that is further from 0 than half of the range, else 0."""
    half = (gain["max"] - gain["min"]) / 2
    return (gain["mean"] > half) - (gain["mean"] < -half)


def _apart(one: Mapping[str, Any], what: str) -> float:
    """Return by how much the planner's blocks exceed module-wise ones; 0 within the spread."""
    planned, modules = one[PLANNED][what], one[MODULES][what]
    half = max(each["max"] - each["min"] for each in (planned, modules)) / 2
    gain = float(planned["mean"] - modules["mean"])
    return gain if abs(gain) > half else 0.0


def _named(keys: Sequence[str]) -> str:
    return f" ({', '.join(keys)})" if keys else ""


def _not(keys: Sequence[str]) -> str:
    return f"; not: {', '.join(SUBJECTS[key].title for key in keys)}" if keys else ""


def _cell(name: str, what: str) -> Cell:
    def text(row: Mapping[str, Any]) -> str:
        found = row.get(name, {}).get(what)
        if found is None:
            return "–"
        if what.endswith("_s"):
            return format_seconds(found["mean"])
        if what == "blocks":
            return f"{found['mean']:.0f}"
        if what.endswith("_bytes"):
            return f"{found['mean'] / 1e6:.3f} MB"
        half = (found["max"] - found["min"]) / 2
        return f"{found['mean']:.3f}" + (f" ±{half:.3f}" if half > 5e-4 else "")

    return text


def _ratio(way: str, what: str) -> Cell:
    def text(row: Mapping[str, Any]) -> str:
        found = row[way].get(what)
        if found is None:
            return "–"
        half = (found["max"] - found["min"]) / 2
        if what in ("wasted", "predicting", "replanning"):
            return f"{found['mean']:.1%}"
        return f"{found['mean']:.2f}" + (f" ±{half:.2f}" if half > 5e-3 else "")

    return text


_KINDS = {"blocks": "blocks", "order": "order", "missed_bytes": "missed", "wasted_bytes": "wasted"}
_FIRST = (*KINDS, *BASELINES)
_PREDICTORS = (*_FIRST, OWN)
_SCORES = (
    (f"order before the step, first {EARLY} steps", "early", _FIRST),
    (f"order before the step, from step {LATE} on", "late", (*_PREDICTORS, ORACLE)),
    ("one block ahead", "ahead", (PILOT, NO_PROBES, *KINDS[1:], OWN)),
    ("recall of what varies", "recall", _PREDICTORS),
    ("precision of what varies", "precision", _PREDICTORS),
    ("bytes that were needed and not named, a step", "missed_bytes", _PREDICTORS),
    ("bytes that were wasted, a step", "wasted_bytes", _PREDICTORS),
    ("one of twenty predictions takes at least", "slow_s", (PILOT,)),
)
_RATIOS = {
    "step over plain": "step",
    "step over the last order's": "over_last",
    "stall over on demand": "stall",
    "wasted prefetch": "wasted",
    "host time of prediction": "predicting",
    "time of new plans": "replanning",
}
