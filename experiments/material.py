"""What general pilots learn from: watched steps of the zoo, of mixtures, and of architectures.

Each network of `dynoffload.experiments.watched` trains at several seeds, and each architecture of
transformers for some steps. Their rows (`dynoffload.pilot.general_training`) are made without the
idioms of blocks, with them, with shuffled ones, and with shapes in place of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dynoffload.experiments.pilot_recording import DATA
from dynoffload.experiments.watched import MATERIAL, SUBJECTS, Watched, watch
from dynoffload.pilot.general import General
from dynoffload.pilot.general_training import Rows, rows_of, train
from dynoffload.pilot.progress import Report
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.idioms import Idioms

PILOT, IDIOMS, SHUFFLED = "pilot", "pilot, idioms", "pilot, shuffled idioms"
SHAPES = "pilot, shapes"
"""Kinds of general pilots: the one that comes with the package knows no idioms of blocks."""
KINDS = (PILOT, IDIOMS, SHUFFLED, SHAPES)
EARLY = 50
"""First steps, of which each network is watched at least one more."""
_ARCHITECTURE_STEPS = 64
_SHARES = {"evoformer": 0.5, "esmfold": 0.25}
"""Networks with slow steps, of which fewer are watched."""


class Material:
    """Watched steps, and what general pilots learn from them.

    Args:
        seeds: of each network, from 0.
        steps: of each network.
        architectures: of transformers, at most.
        jobs: processes, as `dynoffload.pilot.workers.run_tasks` takes them.
        folder: where watched steps are kept for another run; None to keep none.
        report: receives progress.
    """

    def __init__(
        self,
        seeds: int,
        steps: int,
        architectures: int,
        jobs: int,
        folder: Path | None,
        report: Report,
    ) -> None:
        self._seeds, self._steps, self._architectures = seeds, steps, architectures
        self._jobs, self._folder, self._report = jobs, folder, report

    def _kept(self, task: Callable[..., Watched]) -> Callable[..., Watched]:
        if self._folder is None:
            return task
        import joblib

        cached: Callable[..., Watched] = joblib.Memory(self._folder, verbose=0).cache(task)
        return cached

    @cached_property
    def watched(self) -> dict[tuple[str, int], Watched]:
        """The steps of every network at every seed."""
        tasks = [(key, self._steps, seed) for seed in range(self._seeds) for key in SUBJECTS]
        found: dict[tuple[str, int], Watched] = {}
        for number, made in run_tasks(self._kept(_watch_subject), tasks, self._jobs):
            self._report("watching networks", len(found), len(tasks))
            found[tasks[number][0], tasks[number][2]] = made
        return found

    @cached_property
    def _all(self) -> list[tuple[str, str, int, Watched]]:
        """Family, name, seed and steps of all networks, architectures too."""
        there = [(SUBJECTS[key].family, key, seed, w) for (key, seed), w in self.watched.items()]
        names = [*MATERIAL][: self._architectures]
        made = run_tasks(self._kept(_watch_material), [(name,) for name in names], self._jobs)
        for done, (number, one) in enumerate(made):
            self._report("watching architectures", done, len(names))
            there.append((MATERIAL[names[number]].family, names[number], 0, one))
        return sorted(there, key=lambda one: one[:3])

    @property
    def names(self) -> list[str]:
        """All networks and architectures."""
        return sorted({name for _, name, _, _ in self._all})

    def rows(self, kind: str) -> list[tuple[str, Rows]]:
        """Return the family and the rows of each network, for a kind of pilot."""
        tasks = [(watched, seed, kind) for _, _, seed, watched in self._all]
        found: dict[int, Rows] = {}
        for number, rows in run_tasks(_rows_of, tasks, self._jobs):
            self._report(f"features of steps: {kind}", len(found), len(tasks))
            found[number] = rows
        return [(self._all[number][0], found[number]) for number in range(len(tasks))]

    def general(self, card: dict[str, Any]) -> General:
        """Return a general pilot that has learned from all of it."""
        rows = [one for _, one in self.rows(PILOT)]
        self._report("training the general pilot")
        return train(rows, 0, {"networks": self.names, "seeds": self._seeds, **card})

    def left_out(self, families: Sequence[str]) -> dict[tuple[str, str, int], General]:
        """Return general pilots by family left out, kind and seed."""
        found: dict[tuple[str, str, int], General] = {}
        total = len(families) * len(KINDS) * self._seeds
        for kind in KINDS:
            rows = self.rows(kind)
            marks = [(family, kind, seed) for family in families for seed in range(self._seeds)]
            tasks: list[tuple[Any, ...]] = [
                ([r for f, r in rows if f != family], seed, {}) for family, _, seed in marks
            ]
            for number, made in run_tasks(train, tasks, self._jobs):
                self._report("training general pilots", len(found), total)
                found[marks[number]] = made
        return found


def _watch_subject(key: str, steps: int, seed: int) -> Watched:
    subject = SUBJECTS[key]
    count = max(EARLY + 1, round(_SHARES.get(key, 1.0) * steps))
    return watch(subject, count, seed, oracle=subject.origin == DATA)


def _watch_material(name: str) -> Watched:
    return watch(MATERIAL[name], _ARCHITECTURE_STEPS, 0)


def _rows_of(watched: Watched, seed: int, kind: str) -> Rows:
    return rows_of(coded(watched, kind, seed), watched.examples, seed)


def coded(watched: Watched, kind: str, seed: int) -> Vocabulary:
    """Return the vocabulary as a kind of pilot knows it: without idioms, with them, with those of
    other blocks, or with shapes in place of them."""
    vocabulary = watched.shaped if kind == SHAPES else watched.vocabulary
    if kind in (IDIOMS, SHAPES):
        return vocabulary
    order = np.random.default_rng(seed).permutation(len(vocabulary)).tolist()

    def changed(block: Block) -> Block:
        other = vocabulary.blocks[order[block.index]].idioms
        return replace(block, idioms=other if kind == SHUFFLED else Idioms())

    return replace(vocabulary, blocks=tuple(map(changed, vocabulary.blocks)))
