"""Experts of transformers' mixtures: how well routers and pilots predict them, and what that saves.

Small mixtures of 64 experts a layer are trained on text. Then their weights stay, and steps are
recorded: a pilot learns from those on the training text, and those on other files are scored.
*Ahead* is what a router says where the experts of the layer before begin; the *first* is asked as
its own decoder layer begins. For the first seed, larger ones train under an eighth of their
footprint, in processes that take turns.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from dynoffload.experiments import zoo
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Turns, Way, measure, median_seconds
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.pilot_benefit import WARMUP, numbers, paired, plain_orders
from dynoffload.experiments.pilot_recording import learned
from dynoffload.experiments.ways import BUDGETED, PROBES, Spec, adamw, network
from dynoffload.experiments.zoo.fused_moe import FAMILIES
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.labels import Label, encode_example
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.calls import summarize_calls
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler.experts import split_path
from dynoffload.profiler.trace import Trace
from dynoffload.units import KiB, format_seconds

PAGES = {
    "tiny": {"min_paged_bytes": 20 * KiB, "page_bytes": 8 * KiB},
    "small": {"min_paged_bytes": 128 * KiB},
}
"""Preset -> options by which experts are paged one by one, and routers stay."""
SHARE = 8
"""Footprint over budget."""
_CLAIRVOYANT = "clairvoyant"
POLICIES: dict[str, dict[str, Any]] = {
    "on_demand": {"config": {"policy": "on-demand"}},
    "repeat": {"config": {"policy": "repeat"}},
    "probes": {"mode": PROBES},
    "pilot_alone": {"config": {"routing_probes": ()}, "pilot": ""},
    "pilot": {"pilot": ""},
    _CLAIRVOYANT: {"clairvoyant": True},
}
"""Run -> options of `Spec`; of the pilot its path is filled in."""
ASKED = {
    "recall ahead": 0.95,
    "precision ahead": 0.90,
    "stall over on demand": 0.25,
    "stall over repeat": 0.6,
    "wasted": 0.10,
    "step over clairvoyant": 1.05,
}
"""Result -> its aim; the first two are minima."""


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    families: tuple[str, ...] = option(tuple(FAMILIES), "mixtures")
    seeds: int = option(3, "networks of each, with other weights and texts")
    train: int = option(600, "steps of training, of 16 rows of 64 bytes")
    length: int = option(16, "bytes of the text of a recorded or paged step")
    samples: int = option(192, "recorded steps that a pilot learns from")
    held_out: int = option(96, "recorded steps on other files")
    size: str = option("small", "sizes of the paged mixtures: tiny or small; none if empty")
    steps: int = option(40, "measured steps of each paged run, at least")
    warmup: int = option(WARMUP, "steps before them")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


class Tally:
    """Predicted sets of experts, counted against those that ran."""

    def __init__(self) -> None:
        self.right = self.ran = self.named = 0.0

    def add(self, named: set[Any], ran: set[Any]) -> None:
        """Count one set."""
        self.right += len(named & ran)
        self.ran += len(ran)
        self.named += len(named)

    def scores(self) -> dict[str, float]:
        """Return recall, precision and their harmonic mean."""
        found = {"recall": self.right / self.ran, "precision": self.right / max(1, self.named)}
        return {**found, "f1": 2 * self.right / (self.ran + self.named)}


class Experts(Experiment[Params]):
    """A case is a mixture and a seed."""

    parameters = Params

    def cases(self) -> Mapping[str, tuple[str, int]]:
        own = self.params
        check_known("families", own.families, FAMILIES, some=True)
        check_known("size", [own.size] if own.size else [], PAGES)
        return {
            f"{family}, seed {seed}": (family, seed)
            for seed in range(own.seeds)  # the first takes times, best on a quiet machine
            for family in own.families
        }

    def run(self, case: tuple[str, int]) -> Row:
        (family, seed), own = case, self.params
        shape = {"rows": 1, "length": own.length}
        spec = Spec("fused", f"{family}-tiny", shape=shape, seed=seed, data_seed=seed, lr=2e-3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            row = {"family": family, **self._scored(self._trained(spec, path))}
            if own.size and not seed:
                larger = replace(spec, preset=f"{family}-{own.size}", lr=1e-3)
                row["runs"] = self._paged(self._trained(larger, path), path)
        return row

    def _trained(self, spec: Spec, folder: Path) -> Spec:
        """Train a mixture, and return it with the file of its weights."""
        from safetensors.torch import save_model

        own = self.params
        model: Any = network(spec)
        model.inner.set_experts_implementation("grouped_mm")  # several times as fast as eager
        optimizer = adamw(model, spec)
        stream = zoo.samples("fused", seed=spec.data_seed, rows=16, length=64)
        for step, sample in enumerate(islice(stream, own.train)):
            self.report(f"{spec.preset}: training", step, own.train)
            sample.call(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = folder / f"{spec.preset}.safetensors"
        save_model(model, str(weights))
        return replace(spec, weights=str(weights), lr=3e-4)

    def _scored(self, spec: Spec) -> Row:
        """Record steps, and score routers and pilots on those that no pilot has seen."""
        own = self.params
        traces = self._recorded(spec)
        labels = [Label(summarize_calls(t), t.sample, tuple(t.hints), "") for t in traces]
        vocabulary = build_vocabulary([label.calls for label in labels[: own.samples]])
        examples = [encode_example(vocabulary, label) for label in labels]
        self.report(f"{spec.preset}: learning a pilot")
        pilot = fit_pilot(vocabulary, examples[: own.samples], seed=spec.seed)
        experts = {b.index for b in vocabulary.blocks if split_path(b.path)[1] is not None}
        tallies: dict[str, Tally] = defaultdict(Tally)
        held_out = range(own.samples, len(traces))
        there = sum({n.rpartition(".")[0]: c for n, c in traces[0].slices.items()}.values())
        ran_of = [experts.intersection(example.blocks) for example in examples]
        usual = round(fmean(len(ran_of[number]) for number in held_out))
        for number in held_out:
            ran, sample = ran_of[number], examples[number].sample
            before = {
                "pilot": pilot.predict(sample).blocks,
                "last order": examples[number - 1].blocks,
                "most frequent": pilot.most_frequent,
            }
            for name, blocks in before.items():
                tallies[name].add(experts.intersection(blocks), ran)
            chance = tallies["uniform"]  # of as many experts, drawn by chance
            chance.right += usual * len(ran) / there
            chance.ran, chance.named = chance.ran + len(ran), chance.named + usual
            _score_hints(pilot, examples[number], traces[number], tallies)
        return {
            "evenness": _evenness([ran_of[number] for number in held_out], there),
            "hit": usual / there,
            **{name: tally.scores() for name, tally in tallies.items()},
        }

    def _recorded(self, spec: Spec) -> list[Trace]:
        """Return traces of steps on the training text, then on other files."""
        from dynoffload.profiler import Recorder

        own, model = self.params, network(spec)
        traces: list[Trace] = []
        with Recorder(model, on_step=traces.append):
            for split, count in (("train", own.samples), ("held-out", own.held_out)):
                stream = zoo.samples("fused", split, seed=spec.data_seed + 1, **spec.shape)
                for sample in islice(stream, count):
                    self.report(f"{spec.preset}: recording", len(traces), own.samples)
                    sample.call(model).backward()
                    model.zero_grad()
        return traces

    def _paged(self, spec: Spec, folder: Path) -> Row:
        """Train under a budget in all ways, which take turns."""
        own = self.params
        turns = Turns(-(-own.steps // 4), own.warmup, 4)
        pilot = folder / "case.pilot"
        footprint, _ = learned(spec, own.samples, self.report, pilot)
        where = None if own.spill_dir is None else str(own.spill_dir)
        spec = replace(spec, split="held-out", data_seed=1, spill_dir=where)
        orders, losses = plain_orders(spec, turns.steps, self.report)
        ways = {}
        for key, of in POLICIES.items():
            config = {**PAGES[own.size], **of.get("config", {})}
            known: dict[str, Any] = {**of, "config": config}
            if "pilot" in of:
                known["pilot"] = str(pilot)
            run = replace(spec, budget=footprint // SHARE, **{"mode": BUDGETED, **known})
            ways[key] = Way(run, orders=orders if key == _CLAIRVOYANT else ())
        found = measure(spec, ways, turns, lambda key: self.report(f"{spec.preset}: {key}"))
        return {
            "repeatable": losses == found.plain_losses,
            "footprint_bytes": footprint,
            "plain": {"step_s": median_seconds(found.plain)},
            **{key: numbers(found.steps[key], found.sides[key]) for key in POLICIES},
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            family: {**_means(own), **_ratios(next((r["runs"] for r in own if "runs" in r), None))}
            for family in dict.fromkeys(row["family"] for row in rows)
            if (own := [row for row in rows if row["family"] == family])
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        every = [{"family": family, **one} for family, one in result["summary"].items()]
        paged = [one for one in every if "runs" in one]
        runs = [
            {"family": one["family"], "run": key, **one["runs"][key]}
            for one in paged
            for key in POLICIES
        ]
        parts: list[Table | str] = [
            table("experts known within the step", _AHEAD, every),
            table("experts known before the step, F1", _BEFORE, every),
        ]
        if paged:
            parts += [table("the pilot against the others", _PAGED, paged)]
            parts += [table("runs", _RUNS, runs, words=("run", "losses"))]
        for what, aim in ASKED.items():
            known = [one for one in every if what in one]
            least = what.endswith("ahead")
            missed = [
                one["family"] for one in known if (one[what] < aim if least else one[what] > aim)
            ]
            where = f"; missed: {', '.join(missed)}" if missed else ""
            sign = "≥" if least else "≤"
            parts.append(
                f"{what} {sign} {aim:g}: {len(known) - len(missed)} of {len(known)}{where}"
            )
        return parts


def _score_hints(
    pilot: Pilot, example: Example, trace: Trace, tallies: Mapping[str, Tally]
) -> None:
    """Count what each hint says, alone and as the pilot corrects it."""
    tracker = StepTracker(pilot, example.sample)
    numbers_of, blocks = pilot.template.optional_number, pilot.template.blocks.tolist()
    always = {blocks[slot] for slot in pilot.template.always}
    layers = {name.rpartition(".")[0] for name in trace.slices}
    done, ran = 0, set(example.blocks)
    for hint, call in zip(example.hints, (h.call for h in trace.hints), strict=True):
        for block in example.blocks[done : hint.place]:
            tracker.observe(block)
        done = max(done, hint.place)
        tracker.hint(hint.blocks, hint.values)
        chances = tracker.chances
        about = ran.intersection(hint.blocks)
        told = {b for b, value in zip(hint.blocks, hint.values, strict=True) if value > 0.5}
        known = {
            b
            for b in hint.blocks
            if b in always or ((b, 0) in numbers_of and chances[numbers_of[b, 0]] > 0.5)
        }
        early = trace.calls[call].path in layers
        where = "ahead" if early else "first"
        tallies[f"routers, {where}"].add(told, about)
        tallies[where].add(known, about)


def _evenness(hits: Sequence[set[int]], experts: int) -> float:
    """Return the entropy of how often each of the ``experts`` is hit, over that of even use."""
    counts = Counter(block for hit in hits for block in hit)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values()) / math.log(experts)


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    scored = [key for key, value in rows[0].items() if isinstance(value, dict) and "f1" in value]
    found: dict[str, Any] = {
        key: {what: fmean(row[key][what] for row in rows) for what in rows[0][key]}
        for key in scored
    }
    worst = {what: min(row["ahead"][what] for row in rows) for what in ("recall", "precision")}
    better = all(
        row["pilot"]["f1"]
        > max(row[name]["f1"] for name in ("last order", "most frequent", "uniform"))
        for row in rows
    )
    return {
        **found,
        "evenness": fmean(row["evenness"] for row in rows),
        "hit": fmean(row["hit"] for row in rows),
        "recall ahead": found["ahead"]["recall"],
        "precision ahead": found["ahead"]["precision"],
        "worst": worst,
        "beats_baselines": better,
    }


def _ratios(runs: Mapping[str, Any] | None) -> dict[str, Any]:
    if runs is None:
        return {}
    pilot = runs["pilot"]
    over = paired(pilot, runs[_CLAIRVOYANT])
    assert over is not None
    return {
        "runs": runs,
        "stall over on demand": pilot["stall_total_s"] / runs["on_demand"]["stall_total_s"],
        "stall over repeat": pilot["stall_total_s"] / runs["repeat"]["stall_total_s"],
        "wasted": pilot["wasted_bytes"] / max(1, pilot["prefetched_bytes"]),
        "step over clairvoyant": over[0],
    }


def _both(key: str) -> Cell:
    return lambda row: f"{row[key]['recall']:.3f}, {row[key]['precision']:.3f}"


def _f1(key: str) -> Cell:
    return lambda row: f"{row[key]['f1']:.3f}"


def _number(key: str) -> Cell:
    return lambda row: f"{row[key]:.2f}"


_AHEAD: dict[str, Cell] = {
    "mixture": lambda row: row["family"],
    "experts hit": lambda row: f"{row['hit']:.0%}",
    "evenness of use": _number("evenness"),
    "routers ahead, recall, precision": _both("routers, ahead"),
    "with the pilot": _both("ahead"),
    "routers of the first mixture": _both("routers, first"),
    "with the pilot there": _both("first"),
}
_BEFORE: dict[str, Cell] = {
    "mixture": lambda row: row["family"],
    **{name: _f1(name) for name in ("pilot", "last order", "most frequent", "uniform")},
    "best at each seed": lambda row: "yes" if row["beats_baselines"] else "no",
}
_PAGED: dict[str, Cell] = {
    "mixture": lambda row: row["family"],
    **{name: _number(name) for name in list(ASKED)[2:]},
}
_RUNS: dict[str, Cell] = {
    "mixture": lambda row: row["family"],
    "run": lambda row: row["run"].replace("_", " "),
    "step": lambda row: format_seconds(row["step_s"]),
    "stall": lambda row: format_seconds(row["stall_s"]),
    "wasted": lambda row: f"{row['wasted_bytes'] / max(1, row['prefetched_bytes']):.1%}",
    "read": lambda row: f"{row['bytes_in'] / 1e6:.1f} MB",
    "on demand": lambda row: f"{row['steps_on_demand']} of {row['steps']}",
    "losses": lambda row: "equal" if row["losses_equal"] else "NOT EQUAL",
}
