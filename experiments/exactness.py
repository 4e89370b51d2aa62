"""Whether training under a share of the memory gives the bits of plain PyTorch.

What it is: some fifty architectures of transformers times rotating training loops, each trained
plainly and inside a block, and compared: losses, parameters, gradients, buffers, optimizer state,
random numbers, after every step or, so that updates wait from step to step, at the end. The share
is a quarter of parameters, gradients and optimizer state, or three times the largest parameter; a
case that is accepted under no such budget is counted apart, and named with the reason. What it is
not: a measure of time. Each case runs in a process that the next one may share; one that dies or
hangs is a failed case, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dynoffload.errors import ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.allowed import CONFIG, budget_of
from dynoffload.experiments.architectures import ARCHITECTURES, experts_of
from dynoffload.experiments.loops import Loop, loops
from dynoffload.experiments.serving import Server
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes

_PATIENCE = 600.0  # seconds for one case


@dataclass(frozen=True)
class Case:
    """One architecture trained by one loop.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        loop: how it is trained.
        backend: ``"auto"`` or ``"mapped"``.
        looks: compare all state after every step, which makes the updates that wait; else losses
            alone until the end.
        experts: implementation of fused experts, as transformers names it, or "" for its choice.
    """

    architecture: str
    loop: Loop
    backend: str = "auto"
    looks: bool = True
    experts: str = ""


def run(
    json_path: Path | None = None,
    *,
    architectures: Sequence[str] = (),
    rounds: int = 3,
    steps: int = 5,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Train and compare.

    Args:
        json_path: what there is so far is written here after each case.
        architectures: names; all by default.
        rounds: loops per architecture; the last of them on the mapped-file backend, and every
            third, from the first on, with the eager implementation of fused experts.
        steps: optimizer steps of each.
        spill_dir: where the spill files lie.
    """
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"no architecture is named {', '.join(unknown)}; there are {known}")
    cases = cases_of(list(architectures or ARCHITECTURES), rounds, steps)
    results: list[dict[str, Any]] = []
    with progress_bar(True) as report, _Child(spill_dir) as child:
        for number, case in enumerate(cases):
            report(f"{case.architecture}: {case.loop.describe()}", number, len(cases))
            results.append(child.train(case))
            if json_path is not None:
                write_json(json_path, _summary(results))
    result = _summary(results)
    _print(result)
    return result


def cases_of(names: Sequence[str], rounds: int, steps: int) -> list[Case]:
    """Return the cases of architectures, round by round."""
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


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    exact = [row for row in results if row["exact"]]
    return {
        "architectures": len({row["architecture"] for row in results}),
        "cases": len(results),
        "exact": len(exact),
        "failed": [row for row in results if not row["exact"]],
        "within_a_quarter": sum(row.get("budget_share", 1.0) <= 0.25 for row in results),
        "above_share": sum(bool(row.get("above_share")) for row in results),
        "paged": sum(row.get("bytes_in", 0) > 0 for row in results),
        "results": results,
    }


def train_case(case: Case, spill_dir: str | None = None) -> dict[str, Any]:
    """Train one case in this process and return what was found.

    The budget is that of `budget_of`.
    """
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
        next(expected, None)  # its gradients are zeroed, too
        stats = session.stats
        backend = session.backend
    if not difference:
        difference = first_difference(state_of(model, optimizer), state_of(reference, its), "after")
    peak = int(stats["peak_fast_bytes"].max()) if len(stats) else 0  # every step was skipped
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
    """Counts the modules of a network that run forward in the midst of backward."""

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


class _Child:
    """A process that trains cases; see `Server`."""

    def __init__(self, spill_dir: Path | None) -> None:
        answer = partial(_answer, None if spill_dir is None else str(spill_dir))
        self._server = Server(answer, _prepare, _PATIENCE)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def train(self, case: Case) -> dict[str, Any]:
        """Return the row of one case."""
        row = {"architecture": case.architecture, "loop": asdict(case.loop), "looks": case.looks}
        return {**row, "exact": False, **self._server.ask(case)}


def _answer(spill_dir: str | None, case: Case) -> dict[str, Any]:
    return train_case(case, spill_dir)


def _prepare() -> None:
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def _print(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        "architecture", "loops", "exact", "least budget", "share of its need", "above", box=None
    )
    rows = result["results"]
    for name in dict.fromkeys(row["architecture"] for row in rows):
        mine = [row for row in rows if row["architecture"] == name]
        budgets = [row for row in mine if "budget" in row]
        least = min(budgets, key=lambda row: row["budget"], default=None)
        table.add_row(
            name,
            str(len(mine)),
            str(sum(row["exact"] for row in mine)),
            "-" if least is None else format_bytes(least["budget"]),
            "-" if least is None else f"{least['budget_share']:.0%}",
            str(sum(bool(row["above_share"]) for row in budgets)),
        )
    console.print(table)
    for row in result["failed"]:
        loop = Loop(**row["loop"]).describe()
        console.print(f"{row['architecture']}, {loop}: {row['why']}", markup=False)
    for row in rows:
        if row.get("above_share"):
            loop = Loop(**row["loop"]).describe()
            why = f"{row['architecture']}, {loop}, is above its share: {row['above_share']}"
            console.print(why, markup=False)
    console.print(
        f"{result['exact']} of {result['cases']} cases of {result['architectures']} architectures "
        f"are exact, {result['above_share']} above a quarter of their need and three times their "
        "largest parameter"
    )
