"""Adapters on a checkpoint larger than memory: paged from its files, mapped by the kernel, plain.

LoRA on a mixture of experts in bfloat16 whose checkpoint is several times as large as the memory of
a cgroup. Ways: dynoffload under ``budget``; `from_pretrained` in the same cgroup, of the files that
`save_pretrained` writes, and of files with each layer's experts as one tensor, which safetensors
maps and the kernel pages; `from_pretrained` without a limit, if the machine has the memory. The
shards are read once in the cgroup, too. All begin with a cold page cache and make the same steps.

oneDNN keeps 1,024 products' code, some 0.75 MiB each, which leaves a peer in the cgroup no room for
weights: the kernel kills it. So the peers keep 128, and make the code of others anew.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import lora_training
from dynoffload.experiments.baselines.cgroup import (
    LimitError,
    MemoryGroup,
    memory_group,
    why_unavailable,
)
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.processes import QUIET, Process, WorkerError
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import GiB, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READ, OURS, MAPPED, LOADED, PLAIN = "read", "dynoffload", "mapped", "loaded", "plain"
WAYS = {
    READ: "the shards read once",
    PLAIN: "plain PyTorch, no limit",
    OURS: "dynoffload",
    MAPPED: "from_pretrained, mapped files paged by the kernel",
    LOADED: "from_pretrained, files of save_pretrained",
}
_PEERS = {**QUIET, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_START_S, _STEP_S = 900.0, 3600.0
_SPARE = 1.4  # plain training's memory over the checkpoint
_EVERY_S = 0.25
_SAMPLES = 240
_QUOTED = 300


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    ways: tuple[str, ...] = option(tuple(WAYS), f"that are measured: {', '.join(WAYS)}")
    layers: int = option(27, "of the network")
    hidden: int = option(1024, "width of the network")
    experts: int = option(64, "in each layer")
    tokens: int = option(512, "per step")
    checkpointing: bool = option(True, "of gradients, layer by layer")
    budget: str = option("1.5GB", "of dynoffload")
    limit: str = option("2GB", "of the cgroups")
    steps: int = option(5, "that count")
    warmup: int = option(2, "steps before them")
    path: Path | None = option(
        None, "where checkpoints are kept and found again, twice the size", place=True
    )
    spill_dir: Path | None = option(None, "where the spill file lies", place=True)

    def __post_init__(self) -> None:
        check_known("ways", self.ways, WAYS, some=True)
        if min(self.steps, self.warmup) < 1:
            raise ConfigError("steps and warmup are at least 1")


class Lora(Experiment[Params]):
    """A case is a way; each runs alone, with the disk to itself."""

    parameters = Params
    height = 3.4

    def cases(self) -> Mapping[str, str]:
        if reason := why_unavailable():
            raise LimitError(f"{reason}: nothing larger than memory can be shown without a limit")
        if lacking := [name for name in ("transformers", "peft") if find_spec(name) is None]:
            raise ConfigError(f"{' and '.join(lacking)} must be installed for this")
        return {way: way for way in WAYS if way in self.params.ways}

    def run(self, case: str) -> Row:
        own = self.params
        path = self._checkpoint(fused=case == MAPPED)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        found: Row = {"checkpoint_bytes": size, "limit_bytes": parse_bytes(own.limit), "why": ""}
        if case == PLAIN and available_bytes() < (need := int(size * _SPARE)):
            return found | {"why": f"{format_bytes(need)} of memory are needed"}
        lora_training.forget(path)
        limit = None if case == PLAIN else parse_bytes(own.limit)
        with memory_group(limit) as group, _sampled(group) as samples:
            started = time.time()
            try:
                environment = _PEERS if case in (MAPPED, LOADED) else QUIET
                with Process(
                    case, group=group, patience=_START_S, environment=environment
                ) as process:
                    if case == READ:
                        found |= self._read(process, path)
                    else:
                        found |= self._train(process, case, path, started)
            except WorkerError as error:
                found["why"] = str(error).strip().splitlines()[0][-_QUOTED:]
            found["group_peak_bytes"] = group.usage().peak_bytes
        thinned = samples[:: len(samples) // _SAMPLES + 1]
        return found | {"memory": [[at - started, *kinds] for at, *kinds in thinned]}

    def _read(self, process: Process, path: Path) -> Row:
        found = {}
        for direct in (False, True):
            lora_training.forget(path)
            name = "past the page cache" if direct else "buffered"
            found[name] = process.call(lora_training.read_all, path, direct)
        return {"read_s": min(found.values()), "reads_s": found}

    def _train(self, process: Process, case: str, path: Path, started: float) -> Row:
        own = self.params
        budget = parse_bytes(own.budget) if case == OURS else None
        spill = own.spill_dir or Path(default_spill_dir())
        ready = process.call(
            lora_training.begin, path, budget, spill, own.tokens, own.checkpointing
        )
        process.patience = _STEP_S
        count = own.warmup + own.steps
        every = []
        for number in range(count):
            self.report(f"{case}: step {number + 1}", number, count)
            every.append(process.call(lora_training.step))
        steps = every[own.warmup :]
        return {
            "start_s": ready - started,
            "first_step_s": every[0]["seconds"],
            "steps_s": [step["seconds"] for step in steps],
            **{key: median(s[key] for s in steps) for key in ("seconds", "bytes_in", "bytes_out")},
            "spill_bytes": max(step["spill_bytes"] for step in every),
            "losses": [step["loss"] for step in every],
        }

    def _checkpoint(self, *, fused: bool) -> Path:
        """Return a directory with the checkpoint; write it if it is not there."""
        from dynoffload.experiments.moe_checkpoint import qwen3_moe, write

        own = self.params
        if own.path is None:
            name = tempfile.TemporaryDirectory(prefix="lora-", dir=default_spill_dir())
            own_path = Path(self.stack.enter_context(name))
        else:
            own_path = own.path / f"{own.layers}-{own.hidden}-{own.experts}"
        path = own_path / ("fused" if fused else "saved")
        config = qwen3_moe(own.layers, own.hidden, own.experts)
        if not (path / "config.json").exists():  # it is written last
            for number, total in write(path, config, fused=fused):
                what = f"writing the checkpoint, {format_bytes(total)}"
                self.report(what, number, own.layers + 1)
        return path

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        known = {row["case"]: row for row in rows}
        ours, mapped = known.get(OURS, {}), known.get(MAPPED, {})
        if "seconds" not in ours:
            return {}
        read = known.get(READ, {}).get("read_s")
        return {
            "over_bound": _over_bound(ours, known),
            "written_share": ours["bytes_out"] / max(1, ours["bytes_in"]),
            "spill_share": ours["spill_bytes"] / ours["checkpoint_bytes"],
            "start_over_reading": None if read is None else ours["start_s"] / read,
            "times_faster_than_mapped": None
            if "seconds" not in mapped
            else mapped["seconds"] / ours["seconds"],
            "losses_equal": _equal(known),
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        own, rows = result["params"], result["rows"]
        known = {row["case"]: row for row in rows}
        size = rows[0]["checkpoint_bytes"]
        lines = [row | {"known": known} for row in rows if row["case"] != READ]
        title = (
            f"LoRA on {format_bytes(size)} in bfloat16, {own['tokens']} tokens a step, a cgroup of "
            f"{own['limit']}, a budget of {own['budget']}"
        )
        found: list[Table | str] = [table(title, _COLUMNS, lines)]
        if READ in known and "read_s" in known[READ]:
            each = ", ".join(f"{format_seconds(s)} {n}" for n, s in known[READ]["reads_s"].items())
            found.append(f"the shards read once in the cgroup, by four threads: {each}")
        found += [f"{WAYS[row['case']]}: {row['why']}" for row in rows if row["why"]]
        same = {True: "equal, bit for bit", False: "NOT EQUAL", None: "not compared"}
        found.append(f"losses of all ways: {same[_equal(known)]}")
        return found

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        axes = figure.subplots()
        shades = {OURS: "fast", MAPPED: "fault", LOADED: "stall"}
        for row in result["rows"]:
            if row["case"] in shades and row["memory"]:
                at, own, cache = zip(*row["memory"], strict=True)
                shade, whole = (
                    color[shades[row["case"]]],
                    [sum(one) for one in zip(own, cache, strict=True)],
                )
                axes.plot(at, [o / GiB for o in own], color=shade, label=WAYS[row["case"]])
                axes.plot(at, [one / GiB for one in whole], color=shade, linewidth=0.7, alpha=0.5)
        first = result["rows"][0]
        for what, look in (("checkpoint_bytes", "--"), ("limit_bytes", "-")):
            axes.axhline(first[what] / GiB, color=color["budget"], linestyle=look, linewidth=1)
        axes.set(xlabel="seconds since the process began", ylabel="memory of the cgroup, GiB")
        axes.set_title("thin: with the page cache; dashed: the checkpoint", loc="left")
        axes.legend(frameon=False, fontsize=7)


@contextmanager
def _sampled(group: MemoryGroup) -> Iterator[list[tuple[float, int, int]]]:
    """Sample the group's memory during the block: time, own bytes, bytes of the page cache."""
    found: list[tuple[float, int, int]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY_S):
            found.append((time.time(), *group.memory()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _bound(row: Row, known: Mapping[str, Row]) -> float | None:
    """Return the least seconds of a step that moves the row's bytes, or None if unknown."""
    read = known.get(READ, {})
    if "read_s" not in read or "seconds" not in row:
        return None
    reading = row["bytes_in"] * read["read_s"] / read["checkpoint_bytes"]
    return float(max(reading, known.get(PLAIN, {}).get("seconds", 0.0)))


def _over_bound(row: Row, known: Mapping[str, Row]) -> float | None:
    bound = _bound(row, known)
    return row["seconds"] / bound if bound else None


def _equal(known: Mapping[str, Row]) -> bool | None:
    """Return whether all losses are equal, as far as each way ran; None if there is one way."""
    losses = [row["losses"] for row in known.values() if "losses" in row]
    if len(losses) < 2:
        return None
    return all(a == b for one in losses[1:] for a, b in zip(losses[0], one, strict=False))


def _cell(text: Any, key: str = "seconds") -> Any:
    return lambda row: text(row) if key in row else "–"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


_COLUMNS: dict[str, Any] = {
    "way": lambda row: WAYS[row["case"]],
    "a step": _cell(lambda row: format_seconds(row["seconds"])),
    "over bound": _cell(lambda row: _ratio(_over_bound(row, row["known"]))),
    "read": _cell(lambda row: format_bytes(int(row["bytes_in"]))),
    "written": _cell(lambda row: format_bytes(int(row["bytes_out"]))),
    "spill file": _cell(lambda row: f"{row['spill_bytes'] / row['checkpoint_bytes']:.1%}"),
    "start": _cell(lambda row: format_seconds(row["start_s"])),
    "over reading once": _cell(
        lambda row: _ratio(
            row["start_s"] / row["known"][READ]["read_s"]
            if "read_s" in row["known"].get(READ, {})
            else None
        )
    ),
    "peak of the group": _cell(
        lambda row: format_bytes(row["group_peak_bytes"]), "group_peak_bytes"
    ),
}
