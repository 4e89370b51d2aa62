"""Training in a third of its memory: plain, under a budget in a cgroup, and by the system's swap.

Trains one network in three ways: with plain PyTorch and unlimited memory; with dynoffload under
``budget`` in a cgroup of ``limit`` without swap, built on the meta device; with plain PyTorch in
such a cgroup with a swap file. The first two take turns; the third runs after them. All make the
same steps on the same samples, and their losses are compared bit by bit.

`PEERS` are other libraries' ways. Activation checkpointing keeps weights and state in memory, and
DeepSpeed all gradients, so their cgroups are larger: see the peaks. The offloads of torch move from
an accelerator to the host's memory: on the CPU there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from dynoffload.doctor import measure_tiers
from dynoffload.errors import ConfigError
from dynoffload.experiments import contest
from dynoffload.experiments.baselines.cgroup import LimitError, why_unavailable
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Side, Step, Turns, Way, median_seconds
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.ways import (
    ACCELERATE,
    BUDGETED,
    CHECKPOINT,
    DEEPSPEED,
    DTR,
    REPLAY,
    Spec,
)
from dynoffload.experiments.zoo import FUSED
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.spill import default_spill_dir
from dynoffload.simulation.machine import Link
from dynoffload.units import format_bytes, format_seconds, parse_bytes

_TIER_SECONDS = 0.5
_ROW_LENGTH = 256  # tokens of one sequence; a step has enough rows for its tokens
_BYTES_PER_PARAMETER = 16  # parameter, gradient and two tensors of state in fp32
_SPARE = 1.35  # factor for plain training's other memory: activations, temporaries, libraries
SYSTEM = "system"
"""Plain training, paged by the system."""


@dataclass(frozen=True)
class Variant:
    """One method of training under the budget; see `Spec`.

    Attributes:
        tokens: tokens per step as a share of the experiment's.
        beyond: memory of its cgroup beyond the limit, as a share of plain training's.
    """

    network: str = "moe"
    optimizer: str = "fused"
    tokens: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    mode: str = BUDGETED
    pilot: str | None = "auto"
    beyond: float = 0.0


MAIN = "main"
VARIANTS: dict[str, Variant] = {
    MAIN: Variant(),
    "mapped": Variant(config={"backend": "mapped"}),
    "repeat": Variant(config={"policy": "repeat"}, pilot=None),
    "on_demand": Variant(config={"policy": "on-demand"}, pilot=None),
    "replay": Variant(mode=REPLAY, pilot=None),
    "dtr": Variant(mode=DTR, pilot=None),
    "rollback": Variant(config={"rollback": True}),
    "in_backward": Variant(config={"optimizer_in_backward": True}),
    "foreach": Variant(optimizer="foreach"),
    "tokens_512": Variant(tokens=0.5),
    "fused": Variant(network=FUSED),
    CHECKPOINT: Variant(mode=CHECKPOINT, pilot=None, beyond=1.0),
    DEEPSPEED: Variant(mode=DEEPSPEED, pilot=None, beyond=0.5),
    ACCELERATE: Variant(mode=ACCELERATE, pilot=None),
}
"""Variant by its name in ``--rows``."""
PEERS = (CHECKPOINT, DEEPSPEED, ACCELERATE)
"""Ways of other libraries; what is not installed says so."""
ROWS = tuple(row for row in VARIANTS if row not in (DTR, *PEERS))
"""Without DTR, which refuses the budget: the weights alone take more."""


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    rows: tuple[str, ...] = option(ROWS, f"ways under the budget: {', '.join(VARIANTS)}")
    preset: str = option("base", "sizes of the mixture of experts")
    tokens: int = option(1024, "per step")
    budget: str = option("1GB", "of dynoffload")
    limit: str = option("2GB", "of the cgroups")
    steps: int = option(6, "that count of each way under the budget, two per turn")
    warmup: int = option(3, "steps before them")
    paged_steps: int = option(5, "that count of the system's paging; 0 leaves it out")
    limited: bool = option(True, "no measures without cgroups, where those cannot be had")
    spill_dir: Path | None = option(None, "where the spill file and the swap file lie", place=True)

    def __post_init__(self) -> None:
        check_known("rows", self.rows, VARIANTS, some=True)
        if self.steps < 1 or self.warmup < 1 or self.paged_steps < 0:
            raise ConfigError("steps and warmup are at least 1, paged_steps at least 0")


class Paged(Experiment[Params]):
    """A case is the variants with equal network, optimizer and tokens: they share a plain run."""

    parameters = Params

    def cases(self) -> Mapping[str, list[str]]:
        own, found = self.params, dict[str, list[str]]()
        for name in (name for name in VARIANTS if name in own.rows):
            of = VARIANTS[name]
            case = f"{of.network}, {of.optimizer}, {int(own.tokens * of.tokens)} tokens"
            found.setdefault(case, []).append(name)
        if "fused" in own.rows and find_spec("transformers") is None:
            others = ",".join(row for row in own.rows if row != "fused")
            raise ConfigError(
                "the row 'fused' takes a network of transformers, which is not installed: install "
                f"it, or measure --rows {others or MAIN}"
            )
        if own.limited and (reason := why_unavailable(swap=own.paged_steps > 0)):
            raise LimitError(
                f"{reason}: neither dynoffload within a hard limit nor the system's paging can be "
                "measured. Run as root on a system with memory cgroups, or pass --no-limited to "
                "measure the step times alone"
            )
        return found

    def run(self, case: list[str]) -> Row:
        own = self.params
        spec, budget = self._spec(VARIANTS[case[0]]), parse_bytes(own.budget)
        limit = parse_bytes(own.limit) if own.limited else None
        weights = self._bytes_of(spec)
        every = int(weights * _SPARE)
        beyond = {name: int(every * VARIANTS[name].beyond) for name in case}
        _require_memory(every, [more or limit or budget for more in beyond.values()])
        per_turn = min(2, own.steps)
        turns = Turns(-(-own.steps // per_turn), own.warmup, per_turn)
        ways = {
            name: Way(self._budgeted(spec, VARIANTS[name], budget), limit and limit + more)
            for name, more in beyond.items()
        }
        found = contest.measure(spec, ways, turns, self.report, describe=True)
        sides = found.sides
        if limit is not None and own.paged_steps:
            # Swap for the whole process, and more: pages keep their slot after they are read back.
            paged = {SYSTEM: Way(spec, limit, swap_bytes=every + limit)}
            alone = Turns(own.paged_steps, warmup=1, per_turn=1, lead=0)
            sides |= contest.measure(spec, paged, alone, self.report).sides
        return {
            "plain_s": median_seconds(found.plain),
            "plain_steps_s": [step.seconds for step in found.plain],
            "budget_bytes": budget,
            "limit_bytes": limit,
            **_bound(found.described, found.plain, budget, Path(spec.spill_dir or "")),
            "ways": {
                name: asdict(side) | {"seconds": side.seconds} for name, side in sides.items()
            },
        }

    def _spec(self, variant: Variant) -> Spec:
        """Return the plain training to compare ``variant`` with."""
        tokens = int(self.params.tokens * variant.tokens)
        length = min(_ROW_LENGTH, tokens)
        folder = TemporaryDirectory(dir=self.params.spill_dir or default_spill_dir())
        return Spec(
            variant.network,
            self.params.preset,
            shape={"rows": max(1, tokens // length), "length": length},
            optimizer=variant.optimizer,
            spill_dir=self.stack.enter_context(folder),  # other libraries leave files there
        )

    def _budgeted(self, spec: Spec, variant: Variant, budget: int) -> Spec:
        return replace(
            spec,
            mode=variant.mode,
            budget=budget,
            config=variant.config,
            pilot=variant.pilot,
            meta=variant.mode in (BUDGETED, REPLAY),
        )

    def _bytes_of(self, spec: Spec) -> int:
        """Return the bytes of weights, gradients and optimizer state."""
        from dynoffload.experiments import zoo

        model = zoo.build(spec.network, spec.preset, device="meta")
        return sum(p.numel() for p in model.parameters()) * _BYTES_PER_PARAMETER

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        preset = result["params"]["preset"]
        return [
            *(
                table(f"{row['case']}, preset {preset}, AdamW in fp32", _COLUMNS, _lines(row))
                for row in result["rows"]
            ),
            *(
                f"{name} cannot run: {side['why']}"
                for row in result["rows"]
                for name, side in row["ways"].items()
                if side["why"]
            ),
            "medians of a step; the bound is the least time of any plan that makes updates in "
            "forward; spread, of any plan at all",
        ]


def _bound(described: Mapping[str, Any], plain: Sequence[Step], budget: int, where: Path) -> Row:
    """Return the least time of a step under the budget, and the measured tiers it is based on.

    As a phase begins or ends, at most the budget is resident. So each plan reads in a phase what it
    uses beyond the budget, and writes what is modified beyond it. An update may be deferred to the
    parameter's next use: forward and optimizer are one phase, backward is the other. For plans that
    update in backward only the sum over both is a bound, ``spread_s``.
    """
    tiers = measure_tiers(where, _TIER_SECONDS)
    link = Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps)
    names = {name for names, _ in described["visits"] for name in names}
    weights = sum(described["parameters"][name] for name in names)
    saved = sum(nbytes for _, nbytes in described["visits"])
    forward_s = median(step.forward_s for step in plain) + median(s.optimizer_s for s in plain)
    found: dict[str, Any] = {
        # reads weights, gradients and two moments; leaves all but gradients, and activations
        "forward": _phase(forward_s, 4 * weights - budget, 3 * weights + saved - budget),
        # reads weights and activations; leaves gradients
        "backward": _phase(
            median(step.backward_s for step in plain), weights + saved - budget, weights - budget
        ),
    }
    phases = list(found.values())
    both = {key: sum(phase[key] for phase in phases) for key in phases[0]}
    found["seconds"] = sum(_seconds(phase, link) for phase in phases)
    found["spread_s"] = _seconds(both, link)
    rates = ("read_bps", "write_bps", "mixed_bps", "memory_bps")
    return {"bound": found, "tiers": {name: getattr(tiers, name) for name in rates}}


def _phase(compute_s: float, reads: int, writes: int) -> dict[str, float]:
    return {"compute_s": compute_s, "bytes_in": max(0, reads), "bytes_out": max(0, writes)}


def _seconds(phase: Mapping[str, float], link: Link) -> float:
    """Return the least time of a phase; on a link without duplex, reads and writes alternate."""
    reads, writes = phase["bytes_in"] / link.read_bps, phase["bytes_out"] / link.write_bps
    moving = reads + writes if link.in_turns else max(reads, writes)
    return max(phase["compute_s"], moving)


def _lines(row: Row) -> list[Row]:
    """Return table rows for plain training and for each method."""
    plain = asdict(Side(steps_s=tuple(row["plain_steps_s"]))) | {"seconds": row["plain_s"]}
    return [
        {"way": way, "plain": row["plain_s"], "bound": row["bound"], **side}
        for way, side in {"plain": plain, **row["ways"]}.items()
    ]


def _over(row: Mapping[str, Any], what: float) -> str:
    return "–" if row["seconds"] is None else f"{row['seconds'] / what:.2f}×"


def _bytes(key: str) -> Any:
    return lambda row: "–" if row["why"] or row[key] is None else format_bytes(int(row[key]))


_COLUMNS: dict[str, Any] = {
    "way": lambda row: row["way"],
    "a step": lambda row: "–" if row["seconds"] is None else format_seconds(row["seconds"]),
    "over plain": lambda row: _over(row, row["plain"]),
    "over bound": lambda row: _over(row, row["bound"]["seconds"]),
    "… spread": lambda row: _over(row, row["bound"]["spread_s"]),
    "stall": lambda row: "–" if row["stall_s"] is None else format_seconds(row["stall_s"]),
    "read": _bytes("bytes_in"),
    "written": _bytes("bytes_out"),
    "peak of the budget": _bytes("peak_fast_bytes"),
    "peak of the group": _bytes("group_peak_bytes"),
    "losses equal": lambda row: {True: "yes", False: "NO", None: ""}[row["losses_equal"]],
}


def _require_memory(plain: int, others: Sequence[int]) -> None:
    """Raise if the machine's memory is too small, so that the runs would be paged or killed."""
    need, have = plain + sum(others), available_bytes()
    if have < need:
        raise ConfigError(
            f"plain training and {len(others)} runs under a budget side by side need about "
            f"{format_bytes(need)}, and {format_bytes(have)} are available: free some memory, or "
            "measure fewer --rows at a time"
        )
