"""Training on an accelerator under a memory cap: time, capacity and exactness against alternatives.

Every row is measured in its own process; all allocators have the same cap.

[Note: caps]  A cap limits the allocator by `set_per_process_memory_fraction`, cached blocks
included; ``1`` is plain training's peak. Methods that count bytes use the first budget of
`HEADROOM` with which they run, since the allocator's fragmentation is not in their count.

[Note: bound]  A step takes at least as long as plain training's step in memory. It also takes at
least as long as its copies in the slower direction, at the rates measured with both at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.gpu_check import about, accelerator
from dynoffload.experiments.gpu_check_training import environment
from dynoffload.experiments.gpu_rows import MEASURED, NO_ROOM, NOT_MEASURED, measure, measure_link
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.processes import WorkerError, fresh
from dynoffload.experiments.ways import BUDGETED, CHECKPOINT, DTR, PLAIN, Spec
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_bytes, format_seconds, parse_bytes

LINK, CAPACITY = "link", "capacity"
OURS, FILES, IN_BACKWARD = "ours", "ours-file", "ours-in-backward"
COUNTED = (OURS, FILES, IN_BACKWARD, DTR)
"""Ways that take a budget in bytes; the second has a spill file below host memory."""
WAYS = {
    PLAIN: PLAIN,
    OURS: BUDGETED,
    FILES: BUDGETED,
    IN_BACKWARD: BUDGETED,
    **{name: name for name in (DTR, "save-on-cpu", CHECKPOINT)},
    **{name: name for name in ("fsdp2", "host-optimizer", "torchao")},
}
"""Way by its name in ``--ways`` -> mode of its `Spec`."""
HEADROOM = (0.9, 0.75, 0.5)
"""Budgets for methods that count bytes, as shares of a cap; tried in order until one runs."""
_FILE_AT = "1/8"  # the only cap at which the method with a spill file is measured
_MOST_LAYERS = 4096
_FOLDS = {"rows": 1, "min_length": 64, "max_length": 96, "min_depth": 16, "max_depth": 32}
PRESETS: dict[str, dict[str, Spec]] = {
    preset: {
        "moe": Spec("moe", preset, shape={"rows": 1, "length": length}),
        "evoformer": Spec("evoformer", preset, shape={**_FOLDS, "max_cycles": 3}),
        CAPACITY: Spec("moe", "tiny", sizes=layer, shape={"rows": 1, "length": length}),
    }
    for preset, length, layer in (
        ("tiny", 16, {"hidden": 64, "experts": 4, "width": 80}),
        ("base", 1024, {"hidden": 512, "heads": 8, "experts": 8, "width": 1024}),
    )
}
"""``--preset`` -> networks by name, and the one whose layers are counted."""


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    networks: tuple[str, ...] = option(
        ("moe", "evoformer", "moe:8192", "moe:32768"),
        "under caps; a number: tokens",
    )
    preset: str = option("base", "of all networks: tiny or base")
    budgets: tuple[str, ...] = option(
        ("1", "1/2", "1/4", "1/8", "1/16"), "shares of what plain training takes"
    )
    ways: tuple[str, ...] = option(tuple(WAYS), "of training, beside plain")
    steps: int = option(6, "of each row that count")
    warmup: int = option(3, "steps before them")
    cap: str = option("2GiB", "of the accelerator's memory for the largest network; 0B for none")
    host: str = option("8GiB", "host memory there of the way with a file below it")
    patience: float = option(240.0, "seconds that one row may take")
    spill_dir: Path | None = option(None, "where files lie", place=True)

    def __post_init__(self) -> None:
        check_known("preset", [self.preset], PRESETS)
        check_known("ways", self.ways, WAYS)
        named = [one for one in self.networks if not re.fullmatch(r"moe:\d+", one)]
        check_known("networks", named, ("moe", "evoformer"))
        for share in self.budgets:
            try:
                right = 0 < Fraction(share) <= 1
            except (ValueError, ZeroDivisionError):
                right = False
            if not right:
                raise ConfigError(
                    f"{share!r} in budgets is no share above 0 and at most 1: write 1/4, or 0.25"
                )
        if min(self.steps, self.warmup) < 1:
            raise ConfigError(f"steps={self.steps} and warmup={self.warmup}: take at least 1")


@dataclass(frozen=True)
class Case:
    """A method at a cap, or the largest network with a method, or the link.

    Attributes:
        part: a network of `Params`, `CAPACITY` or `LINK`.
        way: a key of `WAYS`.
        share: of plain training's peak; "" for plain training itself, without a cap.
    """

    part: str
    way: str = ""
    share: str = ""


class Gpu(Experiment[Params]):
    """A case is a `Case`; caps are shares of the plain training's peak on the same network."""

    parameters = Params

    def cases(self) -> Mapping[str, Case]:
        accelerator()
        params, found = self.params, {LINK: Case(LINK)}
        ways = [way for way in params.ways if way != PLAIN]
        shares = sorted(params.budgets, key=Fraction, reverse=True)
        for network in params.networks:
            found[f"{network}, {PLAIN}"] = Case(network, PLAIN)
            for share, way in ((share, way) for share in shares for way in ways):
                if way != FILES or Fraction(share) == Fraction(_FILE_AT):
                    found[f"{network} at {share}, {way}"] = Case(network, way, share)
        if parse_bytes(params.cap):
            found |= {f"{CAPACITY}, {way}": Case(CAPACITY, way) for way in (PLAIN, *ways)}
        return found

    def run(self, case: Case) -> Row:
        row: Row = {"part": case.part, "way": case.way, "share": case.share}
        if case.part == LINK:
            link = self._ask("the link", measure_link, str(accelerator()))
            return {**row, "state": MEASURED, "why": "", **link}
        name, _, tokens = case.part.partition(":")
        spec = PRESETS[self.params.preset][name]
        spec = replace(
            spec,
            mode=WAYS[case.way],
            shape={"rows": 1, "length": int(tokens)} if tokens else spec.shape,
            device=str(accelerator()),
            pilot="auto",
            config={"optimizer_in_backward": True} if case.way == IN_BACKWARD else {},
            spill_dir=str(self.params.spill_dir or default_spill_dir()),
        )
        if case.part == CAPACITY:
            return {**row, **self._largest(case.way, spec)}
        return {**row, **(self._at(case, spec) if case.share else self.train(case.way, spec))}

    def train(
        self, way: str, spec: Spec, cap: int = 0, steps: tuple[int, int] | None = None
    ) -> Row:
        """Return the row of a training: ``spec``, ``cap_bytes``, ``state``, ``why``, numbers."""
        measured, warmup = steps or (self.params.steps, self.params.warmup)
        found = self._ask(f"{way}, {spec.network}", measure, spec, cap, measured, warmup)
        return {"spec": asdict(spec), "cap_bytes": cap, **found}

    def _ask(self, what: str, function: Callable[..., Row], *given: Any) -> Row:
        self.report(what)
        limits: dict[str, Any] = {"patience": self.params.patience, "environment": environment()}
        try:
            return fresh(what, function, *given, **limits)
        except WorkerError as error:
            return {"state": NOT_MEASURED, "why": str(error)}

    def _at(self, case: Case, spec: Spec) -> Row:
        """Return the row of a method at a cap; skipped if it did not fit a larger cap."""
        mine = [row for row in self.rows if row["part"] == case.part]
        plain = next(row for row in mine if row["way"] == PLAIN)
        if plain["state"] != MEASURED:
            return {"state": NOT_MEASURED, "why": "plain training, whose share this is, was not"}
        for row in mine:
            if row["way"] == case.way and row["state"] == NO_ROOM:
                return {"state": NO_ROOM, "why": f"it has no room under {row['share']}"}
        whole = plain["peak_reserved"] or 16 * plain["parameters"]
        host = 4 * plain["parameters"]  # a quarter of its training state with AdamW
        spec = replace(spec, host_budget=host if case.way == FILES else 0)
        found = self._within(case.way, spec, int(Fraction(case.share) * whole))
        if found["state"] == MEASURED:
            found["losses_equal"] = found["losses"] == plain["losses"]
        return found

    def _within(self, way: str, spec: Spec, cap: int, steps: tuple[int, int] | None = None) -> Row:
        """Return the row with the first budget that runs; see [Note: caps]."""
        found: Row = {}
        for share in HEADROOM if way in COUNTED else (0.0,):
            found = self.train(way, replace(spec, budget=int(share * cap)), cap, steps)
            if found["state"] != NO_ROOM:
                break
        return found

    def _largest(self, way: str, spec: Spec) -> Row:
        """Return the row of the most layers that fit, among powers of two."""
        host = parse_bytes(self.params.host) if way == FILES else 0
        spec = replace(spec, host_budget=host, meta=way in (OURS, FILES, IN_BACKWARD))
        best: Row = {"state": NO_ROOM, "why": "one layer does not fit"}
        layers = 1
        while layers <= _MOST_LAYERS:
            sized = replace(spec, sizes={**spec.sizes, "layers": layers})
            found = self._within(way, sized, parse_bytes(self.params.cap), (2, 1))
            if found["state"] != MEASURED:
                return best if found["state"] == NO_ROOM else found
            best = {**found, "layers": layers}
            layers *= 2
        return best

    def settled(self, row: Row) -> bool:
        return bool(row["state"] != NOT_MEASURED)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"environment": about(accelerator())}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows = [*map(dict, result["rows"])]
        link = next(row for row in rows if row["part"] == LINK)
        found: list[Table | str] = []
        if link["state"] == MEASURED:
            rates = ", ".join(f"{key} {link[key] / 1e9:.2f} GB/s" for key in link if "_bps" in key)
            found.append(f"the link: {rates}{'' if link['pinned'] else ', memory NOT pinned'}")
        for part in dict.fromkeys(row["part"] for row in rows if row["part"] != LINK):
            mine = [row for row in rows if row["part"] == part]
            for row in mine:
                row |= _compared(row, mine[0], link)
            columns = _SIZES if part == CAPACITY else _TIMES
            found.append(table(part, columns, mine, ("way",)))
        lost = [row for row in rows if row["state"] != MEASURED]
        return [*found, *(f"{row['case']}: {row['state']}: {row['why']}" for row in lost)]


def _compared(row: Row, plain: Row, link: Row) -> Row:
    """Return a row's time and parameters relative to plain training's, and its time relative to
    the bound; see [Note: bound]."""
    if row["state"] != MEASURED or plain["state"] != MEASURED:
        return {}
    found = {"times": row["seconds"] / plain["seconds"]}
    found["larger"] = row["parameters"] / plain["parameters"]
    if link["state"] == MEASURED and "bytes_in" in row:
        copies = max(row["bytes_in"] / link["both_in_bps"], row["bytes_out"] / link["both_out_bps"])
        found["bound"] = row["seconds"] / max(copies, plain["seconds"])
    return found


def _cell(key: str, text: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else text(row[key])


_TIMES = {
    "cap": lambda row: row["share"] or "none",
    "way": lambda row: row["way"],
    "step": lambda row: format_seconds(row["seconds"]) if "seconds" in row else row["state"],
    "times plain": _cell("times", "{:.2f}".format),
    "times the bound": _cell("bound", "{:.2f}".format),
    "in": _cell("bytes_in", lambda nbytes: format_bytes(int(nbytes))),
    "out": _cell("bytes_out", lambda nbytes: format_bytes(int(nbytes))),
    "stalled": _cell("stall_s", format_seconds),
    "allocator's peak": _cell("peak_allocated", format_bytes),
    "budget": lambda row: format_bytes(row["spec"]["budget"]) if "bytes_in" in row else "",
    "losses equal": _cell("losses_equal", lambda equal: "yes" if equal else "NO"),
}
_SIZES = {
    "way": lambda row: row["way"],
    "layers": lambda row: str(row.get("layers", row["state"])),
    "parameters": _cell("parameters", lambda count: f"{count / 1e6:.0f} million"),
    "times plain": _cell("larger", "{:.1f}".format),
    "step": _cell("seconds", format_seconds),
    "pinned": _cell("pinned_bytes", format_bytes),
    "charged": _cell("charged_bytes", format_bytes),
}
