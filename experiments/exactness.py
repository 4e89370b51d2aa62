"""Whether training under a share of the memory gives the bits of plain PyTorch.

Trains some fifty architectures of transformers with rotating training loops, each plainly and
inside a block. Compares losses, parameters, gradients, buffers, optimizer state and random numbers:
after every step, or only at the end, so that updates stay deferred between steps. The budget is a
quarter of parameters, gradients and optimizer state, or three times the largest parameter. A case
that needs more is counted apart, with the reason. A process that dies or hangs is a failed case,
and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dynoffload.experiments.allowed import CONFIG, budget_of
from dynoffload.experiments.architectures import ARCHITECTURES, experts_of
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.loops import Loop, loops
from dynoffload.experiments.processes import ONE_THREAD, QUIET, Renewed, WorkerError
from dynoffload.units import format_bytes

_PATIENCE = 660.0  # seconds for one case and the start of its process


@dataclass(frozen=True)
class Case:
    """One architecture trained with one loop.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        loop: how it is trained.
        backend: ``"auto"`` or ``"mapped"``.
        looks: compare all state after every step, which flushes deferred updates; otherwise only
            losses until the end.
        experts: implementation of fused experts, by transformers' name, or "" for its default.
    """

    architecture: str
    loop: Loop
    backend: str = "auto"
    looks: bool = True
    experts: str = ""


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    architectures: tuple[str, ...] = option((), "names; all by default")
    rounds: int = option(
        3,
        "loops per architecture; the last of them on the mapped-file backend, and every third, "
        "from the first on, with the eager implementation of fused experts",
    )
    steps: int = option(5, "optimizer steps of each")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)

    def __post_init__(self) -> None:
        check_known("architectures", self.architectures, ARCHITECTURES)


class Exactness(Experiment[Params]):
    """A case is an architecture trained with one loop; cases share a process until it fails."""

    parameters = Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        environment = {**ONE_THREAD, **QUIET}
        self.processes = Renewed("a case", patience=_PATIENCE, environment=environment)
        self.stack.callback(self.processes.close)

    def cases(self) -> Mapping[str, Case]:
        names = list(self.params.architectures or ARCHITECTURES)
        cases = cases_of(names, self.params.rounds, self.params.steps)
        return {
            f"{number}: {case.architecture}, {case.loop.describe()}": case
            for number, case in enumerate(cases)
        }

    def run(self, case: Case) -> Row:
        row = {"architecture": case.architecture, "loop": asdict(case.loop), "looks": case.looks}
        try:
            found = self.processes.call(train_case, case, self.params.spill_dir)
        except WorkerError as error:
            found = {"exact": False, "why": str(error)}
        return {**row, **found}

    def settled(self, row: Row) -> bool:
        return bool(row["exact"])

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "architectures": len({row["architecture"] for row in rows}),
            "cases": len(rows),
            "exact": sum(row["exact"] for row in rows),
            "within_a_quarter": sum(row.get("budget_share", 1.0) <= 0.25 for row in rows),
            "above_share": sum(bool(row.get("above_share")) for row in rows),
            "paged": sum(row.get("bytes_in", 0) > 0 for row in rows),
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows, found = result["rows"], result["summary"]
        return [
            table("exact", _COLUMNS, [_of(rows, name) for name in _names(rows)]),
            *(f"{row['case']}: {row['why']}" for row in rows if not row["exact"]),
            *(
                f"{row['case']}, is above its share: {row['above_share']}"
                for row in rows
                if row.get("above_share")
            ),
            f"{found['exact']} of {found['cases']} cases of {found['architectures']} architectures "
            f"are exact, {found['above_share']} above a quarter of their need and three times "
            "their largest parameter",
        ]


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["architecture"] for row in rows))


def _of(rows: Sequence[Row], name: str) -> Row:
    """Return the totals of an architecture."""
    mine = [row for row in rows if row["architecture"] == name]
    budgets = [row for row in mine if "budget" in row]
    least = min(budgets, key=lambda row: row["budget"], default=None)
    return {
        "architecture": name,
        "loops": len(mine),
        "exact": sum(row["exact"] for row in mine),
        "budget": "-" if least is None else format_bytes(least["budget"]),
        "share": "-" if least is None else f"{least['budget_share']:.0%}",
        "above": sum(bool(row["above_share"]) for row in budgets),
    }


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "architecture": lambda row: row["architecture"],
    "loops": lambda row: str(row["loops"]),
    "exact": lambda row: str(row["exact"]),
    "least budget": lambda row: row["budget"],
    "share of its need": lambda row: row["share"],
    "above": lambda row: str(row["above"]),
}


def cases_of(names: Sequence[str], rounds: int, steps: int) -> list[Case]:
    """Return the cases of all architectures, round by round."""
    rotating = loops(rounds * len(names))
    return [
        Case(
            name,
            _loop_of(name, replace(rotating[number + index * len(names)], steps=steps)),
            backend,
            looks=index % 2 == 1,
            experts="eager" if index % 3 == 0 else "",
        )
        for index, backend in enumerate(_backends(rounds))
        for number, name in enumerate(names)
    ]


def _loop_of(name: str, loop: Loop) -> Loop:
    return loop if ARCHITECTURES[name].checkpoints else loop.without_checkpointing()


def _backends(rounds: int) -> list[str]:
    return ["mapped" if rounds > 1 and index == rounds - 1 else "auto" for index in range(rounds)]


def train_case(case: Case, spill_dir: Path | None = None) -> dict[str, Any]:
    """Train one case in this process under `budget_of`'s budget and return the results."""
    import copy

    import torch
    from transformers import PreTrainedModel

    import dynoffload
    from dynoffload.experiments.bits import first_difference, state_of
    from dynoffload.numerics import settle_kernels

    settle_kernels()
    architecture, loop = ARCHITECTURES[case.architecture], case.loop
    model = _network_of(case)
    if case.experts and experts_of(model):
        assert isinstance(model, PreTrainedModel)
        model.set_experts_implementation(case.experts)
    reference = copy.deepcopy(model)
    optimizer, its = loop.make_optimizer(model), loop.make_optimizer(reference)
    config = {**CONFIG, "backend": case.backend}
    allowed = budget_of(model, optimizer, case.backend)
    budget = allowed.budget

    def loss_of(network: torch.nn.Module, number: int) -> torch.Tensor:
        torch.manual_seed(number)
        return architecture.loss(network(**loop.given(architecture.sample(network, number))))

    recomputed = _Recomputed(reference)

    def state(network: torch.nn.Module, its: torch.optim.Optimizer) -> dict[str, Any]:
        return state_of(network, its) if case.looks else {}

    difference = ""
    with dynoffload.offload(
        model, optimizer, budget=budget, config=config, spill_dir=spill_dir
    ) as session:
        expected = loop.train(reference, its, loss_of)
        for step, losses in enumerate(loop.train(model, optimizer, loss_of)):
            found = {"losses": losses, **state(model, optimizer)}
            wanted = {"losses": next(expected), **state(reference, its)}
            difference = first_difference(found, wanted, f"step {step}")
            if difference:
                break
        next(expected, None)  # zeroes the reference's gradients, too
        stats = session.stats
        backend = session.backend
    if not difference:
        difference = first_difference(state_of(model, optimizer), state_of(reference, its), "after")
    peak = int(stats["peak_fast_bytes"].max()) if len(stats) else 0  # empty if all were skipped
    if peak > budget:
        difference = difference or f"{peak} bytes in fast memory are more than {budget}"
    if loop.checkpointing and not recomputed.calls:
        difference = difference or "checkpointing took no effect: nothing was recomputed"
    return {
        "experts": experts_of(model),
        "recomputed": recomputed.calls,
        "exact": not difference,
        "why": difference,
        "backend": backend,
        "budget": budget,
        "budget_share": round(budget / allowed.whole, 4),
        "above_share": allowed.above_share,
        "peak_fast_bytes": peak,
        "bytes_in": int(stats["bytes_in"].sum()),
    }


class _Recomputed:
    """Counts module forwards that run during backward, i.e. recomputation."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        for module in [*model.modules()][1:]:
            module.register_forward_pre_hook(self._count)

    def _count(self, module: Any, args: Any) -> None:
        import torch

        self.calls += torch._C._current_graph_task_id() != -1


def _network_of(case: Case) -> Any:
    import torch

    torch.manual_seed(0)
    model = ARCHITECTURES[case.architecture].build()
    case.loop.prepare(model)
    return model
