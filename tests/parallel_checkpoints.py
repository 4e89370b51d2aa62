"""Ranks that save and load experts which are spread over them: no tests here."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_sessions import CONFIG, Net, groups_of, step_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.errors import CheckpointError
from dynoffload.moe import MoE
from dynoffload.moe.parallel import keep_apart

SPREAD = ("up", "down")


class Whole(Net):
    """The same network with layers of one process."""

    def __init__(self, experts: int = 4) -> None:
        nn.Module.__init__(self)
        self.first = MoE(32, 64, experts, 2)  # type: ignore[assignment]
        self.second = MoE(32, 64, experts, 1, shared=16)  # type: ignore[assignment]
        self.head = nn.Linear(32, 4)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def block(model: nn.Module, optimizer: torch.optim.Optimizer, pages: bool) -> Any:
    """Return a session whose budget does not hold all, or nothing."""
    if not pages:
        return contextlib.nullcontext()
    whole = 4 * sum(parameter.nbytes for parameter in model.parameters())
    return dynoffload.offload(model, optimizer, budget=int(0.7 * whole), pilot=None, config=CONFIG)


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return what this process has, by the names of a checkpoint."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def is_spread(name: str) -> bool:
    """Return whether a tensor of this name is rows of experts, or their optimizer state."""
    layer, own, *key = name.split(".")
    return layer in ("first", "second") and own in SPREAD and key != ["step"]


def zeroed(model: nn.Module) -> None:
    """Forget all that the model has learned."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def refusal(call: Any, *args: Any) -> str:
    """Return what a refused call says."""
    try:
        call(*args)
    except CheckpointError as error:
        return str(error)
    return ""


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def goes_on(rank: int, world: int, folder: str, pages: bool, replicated: bool) -> dict[str, Any]:
    """Train, save, train on; then load into a new model and train on from there again."""
    runs: list[Tensor] = []
    found: dict[str, Any] = {}
    for resumed in (False, True):
        torch.manual_seed(int(resumed))
        inner = Net(None)
        model: nn.Module = inner
        if replicated:
            keep_apart(model)
            model = DistributedDataParallel(model)
        optimizer = adamw(inner)
        with block(model, optimizer, pages) as session:
            if resumed:
                if session is not None and not replicated:
                    session.load(folder)
                else:
                    dynoffload.load_checkpoint(model, optimizer, folder)
                found["loaded"] = held(inner, optimizer)
            else:
                for number in range(2):
                    step_of(model, optimizer, rank, number, None)
                if session is not None and not replicated:
                    session.save(folder)
                else:
                    dynoffload.save_checkpoint(model, optimizer, folder)
                found["saved"] = held(inner, optimizer)
            losses = [step_of(model, optimizer, rank, number, None) for number in (2, 3)]
            if session is not None:
                assert session.stats["bytes_in"].sum() > 0, "nothing was paged"
            runs.append(torch.stack(losses))
            found["end"] = [*found.get("end", []), held(inner, optimizer)]
    return {**found, "losses": runs}


def loads(rank: int, world: int, folder: str) -> list[Any]:
    """Load what others have saved, paged and not."""
    found = []
    for pages in (False, True):
        model = Net(None)
        optimizer = adamw(model)
        with block(model, optimizer, pages):
            dynoffload.load_checkpoint(model, optimizer, folder)
            found.append(held(model, optimizer))
    return found


def several(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save where groups of ranks hold the same experts; then with what is not the same."""
    experts, data = groups_of(rank, world, 2)
    torch.manual_seed(0)
    model = Net(experts)
    optimizer = adamw(model)
    for number in range(2):
        step_of(model, optimizer, rank, number, data)
    where = Path(folder) / "run"
    dynoffload.save_checkpoint(model, optimizer, where)
    found: dict[str, Any] = {"saved": held(model, optimizer), "refused": {}}
    before = files_of(where)
    down = model.second.down
    state = optimizer.state[down]["exp_avg"]
    for what, tensor, other in (
        ("rows", model.first.up.data, 3),
        ("state of rows", state, 2),
    ):
        kept = tensor.clone()
        if rank == other:
            tensor.view(-1)[-1] += 1.0
        found["refused"][what] = refusal(dynoffload.save_checkpoint, model, optimizer, where)
        tensor.copy_(kept)
    dist.barrier()
    found["same"] = files_of(where) == before
    found["beside"] = sorted(path.name for path in Path(folder).iterdir())
    zeroed(model)
    dynoffload.load_checkpoint(model, optimizer, where)
    found["loaded"] = held(model, optimizer)
    return found


def gapped(rank: int, world: int, folder: str) -> str:
    """Save a buffer whose rows overlap and have a gap: of its four, ranks have 0 to 3, and 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    rows = torch.ones(3 - 2 * rank, 4)
    spread = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )
    model.register_buffer("rows", spread)
    return refusal(dynoffload.save_checkpoint, model, None, Path(folder) / "gapped")


def refused(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save what is not alike, or cannot be placed; load what does not suit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    place = Path(folder)
    save, load = dynoffload.save_checkpoint, dynoffload.load_checkpoint
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    model = Net(None)
    optimizer = adamw(model)
    step_of(model, optimizer, rank, 0, None)
    optimizer.state[model.first.router]["exp_avg_sq"][0, 0] += float(rank)
    found["state"] = refusal(save, model, optimizer, place / "state")
    optimizer.state[model.first.router]["exp_avg_sq"].zero_()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    found["numbers"] = refusal(save, model, optimizer, place / "numbers")
    torch.manual_seed(0)  # a loop that sums nothing
    model = Net(None)
    optimizer = adamw(model)
    model(torch.randn(5 + rank, 32)).backward()
    optimizer.step()
    found["replica"] = refusal(save, model, optimizer, place / "replica")
    torch.manual_seed(0)
    model = Net(None)
    factored = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    step_of(model, factored, rank, 0, None)
    found["factored"] = refusal(save, model, factored, place / "factored")
    dist.barrier()
    found["there"] = sorted(path.name for path in place.iterdir())
    before = held(model)
    found["loaded factored"] = refusal(load, model, factored, place / "of-one" / "factored")
    found["eight"] = refusal(load, model, None, place / "of-one" / "eight")
    after = held(model)
    found["untouched"] = all(torch.equal(after[name], before[name]) for name in before)
    torch.manual_seed(0)
    model = Net(None)
    model.first.choice_bias[0] += float(rank)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynoffload").addHandler(handler)
    save(model, None, place / "buffers")
    found["warned"] = [line for line in said if "buffer" in line]
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    found["inner"] = refusal(save, model, None, place / "inner")
    model.head = model.head.module  # type: ignore[assignment]
    fully_shard(model.head, mesh=init_device_mesh("cpu", (world,)))
    found["shards"] = refusal(save, model, None, place / "shards")
    return found
