"""Whether processes on different paths train to the bits of the same run without a block.

Networks whose ranks run different layers or experts at every step are distributed over processes of
this machine, each under its own budget. As the processes share the machine, times show nothing
about scaling.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.distributed.replicas import bucket_bytes, replicas_of
from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.processes import ONE_THREAD, at_once
from dynoffload.numerics import settle_kernels
from dynoffload.runtime.counting import whole_bytes
from dynoffload.units import format_bytes, format_seconds

_TOKENS = 64
_LR = 1e-3


@dataclass(frozen=True)
class Task:
    """Task of one rank.

    Attributes:
        way: a key of `WAYS`.
        network: a key of `NETWORKS`.
        size: the number of ranks.
        steps: of each training.
        share: the budget as a share of parameters, gradients and optimizer state, above what the
            method keeps in memory.
        timeout_s: of the block, see `OffloadConfig.rank_timeout`.
        spill_dir: of the spill files.
        rank: of this process.
        store: file for the ranks' rendezvous.
    """

    way: str
    network: str
    size: int
    steps: int
    share: float
    timeout_s: float
    spill_dir: Path | None = None
    rank: int = 0
    store: str = ""


class Spread(NamedTuple):
    """A model distributed over ranks.

    Attributes:
        model: the module to call, and to pass to `offload`.
        beside: bytes that the method always keeps in memory.
    """

    model: nn.Module
    beside: int


def replicated(model: nn.Module) -> Spread:
    """Return ``model`` replicated on every rank by `DistributedDataParallel`."""
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return Spread(ddp, bucket_bytes(replicas_of(ddp)))


def sharded(model: nn.Module) -> Spread:
    """Return ``model`` with each parameter sharded over all ranks by `fully_shard`.

    A module that some ranks skip must be inside the unit that is gathered at once. So layers are
    units only if all ranks run all of them; otherwise the whole model is one unit.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not getattr(model.config, "layerdrop", 0.0):
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return Spread(model, 0)


WAYS: dict[str, Callable[[nn.Module], Spread]] = {"ddp": replicated, "fsdp": sharded}
"""Name -> how to distribute a model over ranks; a collective call of all ranks."""


def _network(name: str, **options: Any) -> nn.Module:
    """Return an architecture of transformers with other options."""
    from dynoffload.experiments.architectures import ARCHITECTURES

    sizes = {"vocab_size": 1024, "max_position_embeddings": 256, "use_cache": False, **options}
    found = ARCHITECTURES[name]
    return replace(found, options={**found.options, **sizes}).build()


def layerdrop() -> nn.Module:
    """Return an OPT of 8 layers, each skipped with probability 0.3."""
    widths = {"hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 768}
    return _network("opt", **widths, num_hidden_layers=8, layerdrop=0.3, dropout=0.0)


def mixture() -> nn.Module:
    """Return a Mixtral with fused experts that run one by one."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    model: Any = _network("mixtral", **sizes, **experts, num_key_value_heads=4)
    model.set_experts_implementation("eager")
    return model  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"layerdrop": layerdrop, "moe": mixture}
"""Name -> model; its batch is ``input_ids`` and ``labels``, and its output has a loss."""


def samples(rank: int, steps: int) -> Iterator[Tensor]:
    """Yield one rank's own tokens, ``[1, 4]`` to ``[1, 64]``."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        length = int(torch.randint(4, _TOKENS + 1, (), generator=generator))
        yield torch.randint(0, 1024, (1, length), generator=generator)


def train(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[float], float]:
    """Train, and return the losses and the median seconds of a step."""
    torch.manual_seed(task.rank)  # each rank draws its own layers
    losses: list[float] = []
    seconds: list[float] = []
    for tokens in samples(task.rank, task.steps):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return losses, median(seconds)


def digest(losses: list[float], model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of this rank's losses, parameters, buffers and optimizer state."""
    found = hashlib.sha256(repr(losses).encode())
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():  # optimizer.state is in the order of first updates
        state = optimizer.state.get(parameter, {})
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        plain = local.detach().cpu().contiguous().reshape(-1)
        found.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()


def _prepared(task: Task) -> tuple[Spread, torch.optim.Optimizer]:
    torch.manual_seed(0)
    spread = WAYS[task.way](NETWORKS[task.network]())
    return spread, AdamW(spread.model.parameters(), lr=_LR)


def carry_out(task: Task) -> Row:
    """Train twice, plainly and in a block; return the hashes and the block's statistics."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{Path(task.store).resolve()}",
        rank=task.rank,
        world_size=task.size,
        timeout=datetime.timedelta(minutes=5),
    )
    settle_kernels()
    (model, beside), optimizer = _prepared(task)
    whole = whole_bytes(model, optimizer)
    answer: Row = {"rank": task.rank, "whole_bytes": whole, "beside_bytes": beside}
    losses, answer["plain_s"] = train(task, model, optimizer)
    answer["plain"] = digest(losses, model, optimizer)
    answer["last_loss"] = losses[-1]
    del model, optimizer
    (model, beside), optimizer = _prepared(task)
    budget = beside + int(task.share * whole)
    config = {"step_aside": False, "rank_timeout": task.timeout_s}
    with dynoffload.offload(
        model, optimizer, budget=budget, config=config, spill_dir=task.spill_dir
    ) as session:
        losses, answer["paged_s"] = train(task, model, optimizer)
        stats = session.stats
        answer["backend"] = session.backend
    answer["paged"] = digest(losses, model, optimizer)
    answer["budget"] = budget
    for name in ("bytes_in", "bytes_out", "stalls"):
        answer[name] = int(stats[name].sum())
    answer["peak_fast_bytes"] = int(stats["peak_fast_bytes"].max())
    dist.destroy_process_group()
    return answer


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    ways: tuple[str, ...] = option(tuple(WAYS), "in which models are spread over ranks")
    networks: tuple[str, ...] = option(tuple(NETWORKS), "that are trained")
    steps: int = option(200, "of each training")
    ranks: int = option(2, "processes")
    share: float = option(0.3, "of weights, gradients and state, which a budget allows")
    timeout: float = option(20.0, "seconds that a rank may keep the others waiting")
    patience: float = option(1800.0, "seconds after which a training is ended", place=True)
    spill_dir: Path | None = option(None, "where files lie", place=True)

    def __post_init__(self) -> None:
        check_known("ways", self.ways, WAYS)
        check_known("networks", self.networks, NETWORKS)
        if self.ranks < 2 or self.steps < 2:
            raise ConfigError(f"ranks={self.ranks} and steps={self.steps} must be at least 2")


class Ranks(Experiment[Params]):
    """A case is a network distributed by one method."""

    parameters = Params
    one_thread = True

    def cases(self) -> Mapping[str, Task]:
        own = self.params
        return {
            f"{name} by {way}": Task(
                way, name, own.ranks, own.steps, own.share, own.timeout, own.spill_dir
            )
            for way in own.ways
            for name in own.networks
        }

    def run(self, case: Task) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            answers = at_once(
                f"{case.network} by {case.way}",
                carry_out,
                [replace(case, rank=rank, store=f"{folder}/store") for rank in range(case.size)],
                patience=self.params.patience,
                environment=ONE_THREAD,
            )
        return {
            "way": case.way,
            "network": case.network,
            "exact": all(one["plain"] == one["paged"] for one in answers),
            "kept": all(one["peak_fast_bytes"] <= one["budget"] for one in answers),
            "ranks": answers,
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        def of_first(key: str) -> Callable[[Mapping[str, Any]], str]:
            say = format_seconds if key.endswith("_s") else format_bytes
            return lambda row: say(row["ranks"][0][key])

        heads = {
            "training": lambda row: row["case"],
            "bits": lambda row: "the same" if row["exact"] else "DIFFER",
            "states": of_first("whole_bytes"),
            "budget": of_first("budget"),
            "read": of_first("bytes_in"),
            "a step": of_first("paged_s"),
            "plain": of_first("plain_s"),
        }
        rows = [row for row in result["rows"] if "exact" in row]
        return [
            table("with a block and without; numbers are of the first rank", heads, rows, ["bits"])
        ]
