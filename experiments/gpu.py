"""Training on an accelerator under a cap of its memory: capacity, time and overlap against peers.

What it is: the link and the file as measured here; the largest network under one cap, plainly and
by each way; time per step at caps from all that plain training takes down to a sixteenth of it, for
the MoE language model and the Evoformer trunk; and long batches, where computing is what takes
time. Every row is a process of its own whose allocator is capped alike. What it is not: a check of
exactness (`gpu_check`), though losses are compared. It has never run on a GPU so far: what it does
was tested over an emulated one, and no number of it is published.

[Note: caps]  A cap is what `set_per_process_memory_fraction` lets the allocator take, cached
blocks included; ``1`` is what plain training took at most. What is below is never plain. Ways that
count bytes get a budget of `HEADROOM` of the cap, the first with which they run: what the allocator
keeps in pieces is not theirs. Managed memory is never asked for.

[Note: bound]  Copies take bytes over bandwidth, in the direction that takes longer, by the rates
measured with both directions at once. A step can take no less than the larger of that and of plain
training's step in memory. Overlap is what both together take more than the step, of the lesser of
them: 1 if that is hidden wholly, 0 if nothing is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.baselines import DTR
from dynoffload.experiments.gpu_link import Link
from dynoffload.experiments.gpu_rows import MEASURED, NO_ROOM, NOT_MEASURED
from dynoffload.experiments.gpu_ways import FILES, OURS, PLAIN, WAYS, Task
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_bytes, parse_bytes

LINK, STEPS, TOKENS, CAPACITY = "link", "steps", "tokens", "capacity"
PARTS = (LINK, STEPS, TOKENS, CAPACITY)
BUDGETS = ("1", "1/2", "1/4", "1/8", "1/16")
HEADROOM = (0.9, 0.75, 0.5)
"""Shares of a cap that ways which count bytes are given, one after the other until one runs."""
_LEAST_STEPS = 5
_FILE_AT = Fraction(1, 8)  # the cap at which the way with a file below is measured
_FOLDS = {"rows": 1, "min_length": 64, "max_length": 96, "min_depth": 16, "max_depth": 32}


@dataclass(frozen=True)
class Scale:
    """What is trained.

    Attributes:
        networks: by name, of the part with many caps.
        long: of the part with long batches; their tokens are an option.
        unit: one layer more or less makes the networks of the part on capacity.
    """

    networks: Mapping[str, Task]
    long: Task
    unit: Task


def _scale(preset: str, layer: Mapping[str, int], moe: Mapping[str, int]) -> Scale:
    return Scale(
        {
            "moe": Task("", "moe", preset, shape={"rows": 1, **moe}),
            "evoformer": Task("", "evoformer", preset, shape={**_FOLDS, "max_cycles": 3}),
        },
        Task("", "moe", preset),
        Task("", "moe", "tiny", sizes=dict(layer), shape={"rows": 1, **moe}, meta=True),
    )


SCALES: dict[str, Scale] = {
    "tiny": _scale("tiny", {"hidden": 64, "experts": 4, "width": 80}, {"length": 16}),
    "base": _scale(
        "base", {"hidden": 512, "heads": 8, "experts": 8, "width": 1024}, {"length": 1024}
    ),
}
"""By the name that ``--preset`` takes."""


def run(
    json_path: Path | None = None,
    *,
    parts: tuple[str, ...] = PARTS,
    preset: str = "base",
    networks: tuple[str, ...] = ("moe", "evoformer"),
    budgets: tuple[str, ...] = BUDGETS,
    ways: tuple[str, ...] = tuple(WAYS),
    steps: int = 6,
    warmup: int = 3,
    tokens: tuple[int, ...] = (1024, 8192, 32768),
    cap: str = "2GiB",
    host: str = "8GiB",
    most: int = 16,
    deterministic: bool = True,
    patience: float = 240.0,
    seconds: float = 0.0,
    resume: bool = False,
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure on this machine's accelerator.

    Args:
        json_path: where the numbers so far are written after each row; the figure beside it.
        parts: what to measure: link, steps, tokens, capacity.
        preset: of all networks: tiny or base.
        networks: of the part with many caps: moe, evoformer.
        budgets: shares of what plain training takes of the accelerator, as ``1/4``.
        ways: of training; there are no others than by default.
        steps: of each row that count, at least 5.
        warmup: steps before them.
        tokens: of the batches of the part with long ones.
        cap: of the accelerator's memory in the part on capacity.
        host: host memory there of the way with a file below it.
        most: times the layers of plain training that are tried at the most.
        deterministic: ask torch for algorithms that give the same bits again, for all ways alike.
        patience: seconds that one row may take.
        seconds: after which no other row is begun; 0 for no end.
        resume: keep what JSON_PATH has, and measure what it lacks.
        page: where a page with the tables and the figure is written.
        spill_dir: where files lie.

    Raises:
        BackendError: there is no accelerator.
        ConfigError: an option names nothing that there is, or a number is too small.
    """
    from dynoffload.experiments.gpu_check import about, accelerator

    scale = _checked(parts, preset, networks, ways, steps, warmup, most)
    shares = shares_of(budgets)
    device = accelerator()
    if page is not None:
        make_room(page, "--page")
    spill = str(spill_dir or default_spill_dir())
    common: dict[str, Any] = {
        "device": str(device),
        "steps": steps,
        "warmup": warmup,
        "deterministic": deterministic,
        "spill_dir": spill,
    }
    known = _known(json_path) if resume else []
    asker = Asker(known, patience, seconds)
    result: dict[str, Any] = {
        "environment": about(device),
        "preset": preset,
        "steps": steps,
        "warmup": warmup,
        "deterministic": deterministic,
        "cap_bytes": parse_bytes(cap),
        "link": None,
        "rows": [],
    }

    def keep(row: Mapping[str, Any]) -> None:
        from dynoffload.experiments.gpu_verdicts import judge

        result["rows"].append(dict(row))
        if row["part"] == LINK and row["state"] == MEASURED:
            result["link"] = dict(row)
        result["verdicts"] = judge(result)
        if json_path is not None:
            write_json(json_path, result)

    if LINK in parts:
        keep({"part": LINK, **asker.link(Link(str(device), spill))})
    if STEPS in parts:
        for name in networks:
            task = replace(scale.networks[name], **common)
            for row in at_caps(task, shares, ways, asker):
                keep({"part": STEPS, **row})
    if TOKENS in parts:
        for length in tokens:
            task = replace(scale.long, shape={"rows": 1, "length": length}, **common)
            for row in at_caps(task, [Fraction(1), Fraction(1, 8)], (PLAIN, OURS), asker):
                keep({"part": TOKENS, "tokens": length, **row})
    if CAPACITY in parts:
        brief: dict[str, Any] = {
            **common,
            "warmup": 1,
            "steps": 2,
            "cap_bytes": result["cap_bytes"],
        }
        unit = replace(scale.unit, **brief)
        for row in largest(unit, ways, most, parse_bytes(host), asker):
            keep({"part": CAPACITY, **row})
    _present(result, json_path, page)
    return result


def _present(result: Mapping[str, Any], json_path: Path | None, page: Path | None) -> None:
    from dynoffload.experiments.gpu_views import page_of, show, write_figure

    show(result)
    beside = json_path or page
    if beside is None:
        return
    figure = beside.with_suffix(".svg")
    write_figure(result, figure)
    if page is not None:
        near = figure.name if figure.parent.resolve() == page.parent.resolve() else str(figure)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(page_of(result, near), encoding="utf-8")


# What is asked


def _checked(
    parts: Sequence[str],
    preset: str,
    networks: Sequence[str],
    ways: Sequence[str],
    steps: int,
    warmup: int,
    most: int,
) -> Scale:
    if preset not in SCALES:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(SCALES)}")
    scale = SCALES[preset]
    known: Mapping[str, Sequence[str]] = {
        "parts": PARTS,
        "networks": tuple(scale.networks),
        "ways": tuple(WAYS),
    }
    for option, names in (("parts", parts), ("networks", networks), ("ways", ways)):
        unknown = [name for name in names if name not in known[option]]
        if unknown or not names:
            named = ", ".join(map(repr, unknown)) or "nothing"
            raise ConfigError(f"{option} names {named}; there are {', '.join(known[option])}")
    if PLAIN not in ways:
        raise ConfigError(f"ways lacks {PLAIN}, by which all others are told: add it")
    for option, value, least in (("steps", steps, _LEAST_STEPS), ("warmup", warmup, 1)):
        if value < least:
            raise ConfigError(f"{option}={value} is too few: take at least {least}")
    if most < 1:
        raise ConfigError(f"most={most} leaves nothing to try: take at least 1")
    return scale


def shares_of(texts: Sequence[str]) -> list[Fraction]:
    """Return shares as numbers, the largest first; ``1`` is always one of them.

    Raises:
        ConfigError: a text is no share above 0 and at most 1.
    """
    found = {Fraction(1)}
    for text in texts:
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise ConfigError(
                f"{text!r} in budgets is no share above 0 and at most 1: write 1/4, or 0.25"
            )
        found.add(share)
    return sorted(found, reverse=True)


def _known(json_path: Path | None) -> list[dict[str, Any]]:
    """Return the rows that a run before has written."""
    import json

    if json_path is None or not json_path.exists():
        return []
    try:
        rows = json.loads(json_path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{json_path} is not what this experiment writes ({error}): leave --resume out"
        ) from error
    return [row for row in rows if row["state"] != NOT_MEASURED]


class Asker:
    """Has rows measured in processes of their own.

    Args:
        known: rows of a run before, taken where the same is asked.
        patience: seconds that one may take.
        seconds: after which no other is begun; 0 for no end.
    """

    def __init__(self, known: Sequence[Mapping[str, Any]], patience: float, seconds: float) -> None:
        self._known, self._patience, self._seconds = known, patience, seconds
        self._began = time.perf_counter()

    def link(self, link: Link) -> dict[str, Any]:
        """Return the link's row: ``task``, ``state``, ``why`` and its numbers."""
        return self._ask(link, "the link", lambda found: {"state": MEASURED, "why": "", **found})

    def train(self, task: Task) -> dict[str, Any]:
        """Return a task's row: ``task``, ``state``, ``why`` and its numbers."""
        what = f"{WAYS[task.way].title}, {task.network}"
        if task.cap_bytes:
            what += f" under {format_bytes(task.cap_bytes)}"
        return self._ask(task, what, lambda found: found)

    def _ask(
        self,
        task: Link | Task,
        what: str,
        finish: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        from dynoffload.experiments.gpu_check_cases import environment
        from dynoffload.experiments.workers import WorkerError

        asked = asdict(task)
        for row in self._known:
            if row["task"] == asked:
                kept = ("part", "way", "share", "tokens", "losses_equal", "budget_share", "layers")
                return {key: value for key, value in row.items() if key not in kept}
        _say(what)
        if self._seconds and time.perf_counter() - self._began > self._seconds:
            why = f"the {self._seconds:g} s were over"
            return {"task": asked, "state": NOT_MEASURED, "why": why}
        try:
            found = finish(answer_of("gpu_rows", task, what, self._patience, environment()))
        except WorkerError as error:
            found = {"state": NOT_MEASURED, "why": str(error)}
        return {"task": asked, **found}


def answer_of(
    module: str, task: Any, what: str, timeout_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a process answers; see `dynoffload.experiments.children.answer_of`."""
    from dynoffload.experiments import children

    return children.answer_of(module, task, what, timeout_s, environment)


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


# Rows


def at_caps(
    task: Task, shares: Sequence[Fraction], ways: Sequence[str], asker: Asker
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one network: plain training first, without a cap, which says what all the
    caps are shares of; then every way under every cap, until one has no room.

    Args:
        task: the network, without a way or a cap.
        shares: of what plain training takes, the largest first.
        ways: keys of `WAYS`.
        asker: has them measured.
    """
    plain = asker.train(replace(task, way=PLAIN))
    whole = 0 if plain["state"] != MEASURED else plain["peak_reserved"] or 16 * plain["parameters"]
    about = {"network": task.network}
    yield {**about, "way": PLAIN, "share": "1", "cap_bytes": whole, "losses_equal": None, **plain}
    if not whole:
        return
    ended: dict[str, str] = {PLAIN: "1"}
    for share in shares:
        for way in ways:
            if way == PLAIN or (way == FILES and share != _FILE_AT):
                continue
            row = {**about, "way": way, "share": str(share), "cap_bytes": int(share * whole)}
            one = replace(task, way=way, cap_bytes=int(share * whole))
            if way in ended:
                why = f"it has no room under {ended[way]}"
                found = {"task": asdict(one), "state": NO_ROOM, "why": why}
            else:
                found = _within(one, plain["parameters"], asker)
                if found["state"] == NO_ROOM:
                    ended[way] = str(share)
            yield {**row, "losses_equal": _equal(found, plain), **found}


def _within(task: Task, parameters: int, asker: Asker) -> dict[str, Any]:
    """Return the row of a task under its cap, with the first budget of [Note: caps] that runs."""
    if task.way == FILES and not task.host_bytes:
        task = replace(task, host_bytes=4 * parameters)  # a quarter of what AdamW makes it take
    if not WAYS[task.way].counts:
        return asker.train(task)
    found: dict[str, Any] = {}
    for share in HEADROOM:
        found = asker.train(replace(task, budget_bytes=int(share * task.cap_bytes)))
        found["budget_share"] = share
        if found["state"] != NO_ROOM:
            break
    return found


def _equal(found: Mapping[str, Any], plain: Mapping[str, Any]) -> bool | None:
    """Return whether the losses are plain training's, bit by bit; None where there are none."""
    if found["state"] != MEASURED or plain["state"] != MEASURED:
        return None
    return bool(found["losses"] == plain["losses"])


def largest(
    unit: Task, ways: Sequence[str], most: int, host: int, asker: Asker
) -> Iterator[dict[str, Any]]:
    """Yield a row for each size of each way that was tried under the cap of ``unit``.

    Plain training's size is found to a layer. The others are tried at halves of ``most`` times
    that, from half of it on: up while they fit, down until they do.

    Args:
        unit: the network of one layer, without a way.
        ways: keys of `WAYS`.
        most: times the layers of plain training that are tried at the most.
        host: bytes of host memory of the way with a file.
        asker: has them measured.
    """
    rows: list[dict[str, Any]] = []

    def fits(way: str, layers: int) -> bool:
        sizes = {**unit.sizes, "layers": layers}
        counts = WAYS[way].counts
        task = replace(unit, way=way, sizes=sizes, host_bytes=host if way == FILES else 0)
        task = replace(task, meta=unit.meta and counts and way != DTR)
        found = _within(task, 0, asker)
        rows.append({"way": way, "network": unit.network, "layers": layers, **found})
        return bool(found["state"] == MEASURED)

    low, high = 0, 1
    while fits(PLAIN, high):
        low, high = high, 2 * high
    while high - low > 1 and low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(PLAIN, middle) else (low, middle)
    yield from rows
    for way in ways:
        if way == PLAIN or not low:
            continue
        rows.clear()
        times = max(1, most // 2)
        if fits(way, times * low):
            if times < most:
                fits(way, most * low)
        else:
            while times > 1 and rows[-1]["state"] == NO_ROOM:
                times //= 2
                fits(way, times * low)
        yield from rows
