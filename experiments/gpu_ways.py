"""Ways of training one network on an accelerator: this library, and what users would take instead.

What it is: `Task`, what one process trains and within what, and `WAYS`, each of which makes a
network ready and returns its step. What it is not: a measurement (`gpu_rows`), nor a comparison
(`gpu`). All ways take the same optimizer, samples and weights (drawn on the CPU), and the cap of
the allocator is the same for all.

[Note: peers]  ``save-on-cpu`` is `torch.autograd.graph.save_on_cpu` with pinned memory;
``checkpoint`` is `torch.utils.checkpoint` around each block of the network; ``fsdp2`` is
`fully_shard` of each block and of the root with `CPUOffloadPolicy`, in a group of one process;
``dtr`` is the baseline of that name, whose costs are here the seconds in which operators were
launched, not run; ``zero-offload`` is DeepSpeed's ZeRO stage 2 with the
optimizer on the CPU, where DeepSpeed is installed; ``host-optimizer`` is this library's counterpart
of that, `dynoffload.HostOptimizer`, over a network that is whole on the accelerator. Those that
update on the CPU cannot have the bits of an update on the accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynoffload.errors import ClientError
from dynoffload.experiments.baselines import DTR, baseline

Step = Callable[[tuple[Any, ...]], Tensor]
PLAIN, OURS, FILES = "plain", "ours", "ours-file"
HOSTED = "host-optimizer"


@dataclass(frozen=True)
class Task:
    """What one process trains.

    Attributes:
        way: a key of `WAYS`.
        network: name in the zoo.
        preset: its sizes, ...
        sizes: ... and those that differ.
        shape: of the samples.
        device: the accelerator.
        cap_bytes: that its allocator may take; 0 for all there are.
        budget_bytes: of ways that count bytes.
        host_bytes: of host memory, for a way with a file below that.
        steps: that count, ...
        warmup: ... after so many that do not.
        meta: ways that count build on the meta device, so that the network is never whole.
        deterministic: ask torch for algorithms that give the same bits again.
        lr: of AdamW.
        spill_dir: where files lie.
        config: options of `dynoffload.OffloadConfig` that differ.
    """

    way: str
    network: str
    preset: str = "base"
    sizes: dict[str, int] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    device: str = "cuda"
    cap_bytes: int = 0
    budget_bytes: int = 0
    host_bytes: int = 0
    steps: int = 6
    warmup: int = 3
    meta: bool = False
    deterministic: bool = True
    lr: float = 1e-3
    spill_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """A network that can be stepped.

    Attributes:
        model: the network.
        step: makes one step and returns its loss, on the accelerator.
        session: the library's, or None.
    """

    model: nn.Module
    step: Step
    session: Any = None


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        title: in tables.
        prepare: makes a task's network ready within a block.
        counts: it takes a budget in bytes.
        exact: its losses are to be plain training's, bit by bit.
    """

    title: str
    prepare: Callable[[Task, torch.device], AbstractContextManager[Ready]]
    counts: bool = False
    exact: bool = True


def _built(task: Task, *, meta: bool = False) -> nn.Module:
    from dynoffload.experiments import zoo

    sizes: dict[str, Any] = {**task.sizes, "device": "meta" if meta else "cpu"}
    return zoo.build(task.network, task.preset, **sizes)


def _optimizer(model: nn.Module, task: Task) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)


def _stepping(
    model: nn.Module, optimizer: Optimizer, around: Callable[[], AbstractContextManager[Any]]
) -> Step:
    def step(args: tuple[Any, ...]) -> Tensor:
        with around():
            loss: Tensor = model(*args).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@contextlib.contextmanager
def _plain(task: Task, device: torch.device) -> Iterator[Ready]:
    model = _built(task).to(device)
    yield Ready(model, _stepping(model, _optimizer(model, task), contextlib.nullcontext))


@contextlib.contextmanager
def _save_on_cpu(task: Task, device: torch.device) -> Iterator[Ready]:
    model = _built(task).to(device)
    pinned = device.type != "cpu"
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    yield Ready(model, _stepping(model, _optimizer(model, task), around))


@contextlib.contextmanager
def _checkpoint(task: Task, device: torch.device) -> Iterator[Ready]:
    from torch.utils.checkpoint import checkpoint

    model = _built(task).to(device)
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield Ready(model, _stepping(model, _optimizer(model, task), contextlib.nullcontext))


@contextlib.contextmanager
def _fsdp2(task: Task, device: torch.device) -> Iterator[Ready]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # one process: no other machine is asked for
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    backends = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backends, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        model = _built(task)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        yield Ready(model, _stepping(model, _optimizer(model, task), contextlib.nullcontext))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _zero_offload(task: Task, device: torch.device) -> Iterator[Ready]:
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
        adam: Any = importlib.import_module("deepspeed.ops.adam")
    except ImportError as error:
        raise ClientError(
            "DeepSpeed is not installed, and ZeRO-Offload is its: install deepspeed, or leave "
            "zero-offload out of --ways"
        ) from error
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    model = _built(task)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam.DeepSpeedCPUAdam(model.parameters(), lr=task.lr, weight_decay=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        },
    )

    def step(args: tuple[Any, ...]) -> Tensor:
        loss: Tensor = engine(*args).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    yield Ready(model, step)


@contextlib.contextmanager
def _host_optimizer(task: Task, device: torch.device) -> Iterator[Ready]:
    import dynoffload

    model = _built(task).to(device)
    optimizer = dynoffload.HostOptimizer(model.parameters(), torch.optim.AdamW, lr=task.lr)
    try:
        yield Ready(model, _stepping(model, optimizer, contextlib.nullcontext))
    finally:
        optimizer.close()


@contextlib.contextmanager
def _dtr(task: Task, device: torch.device) -> Iterator[Ready]:
    model = _built(task).to(device)
    optimizer = _optimizer(model, task)
    with baseline(DTR, model, optimizer, budget=task.budget_bytes) as session:
        step = _stepping(model, optimizer, contextlib.nullcontext)
        yield Ready(model, step, session)


@contextlib.contextmanager
def _ours(task: Task, device: torch.device) -> Iterator[Ready]:
    import dynoffload

    model = _built(task, meta=task.meta)
    optimizer = _optimizer(model, task)
    with dynoffload.offload(
        model,
        optimizer,
        budget=task.budget_bytes,
        host_budget=task.host_bytes or None,
        device=task.device,
        spill_dir=task.spill_dir,
        config=task.config,
    ) as session:
        yield Ready(model, _stepping(model, optimizer, contextlib.nullcontext), session)


WAYS: dict[str, Way] = {
    PLAIN: Way("plain PyTorch", _plain),
    OURS: Way("dynoffload", _ours, counts=True),
    FILES: Way("dynoffload, with a file", _ours, counts=True),
    "save-on-cpu": Way("save_on_cpu, pinned", _save_on_cpu),
    "checkpoint": Way("torch.utils.checkpoint", _checkpoint),
    "fsdp2": Way("FSDP2, CPU offload", _fsdp2, exact=False),
    DTR: Way("rematerialisation (DTR)", _dtr, counts=True),
    HOSTED: Way("dynoffload.HostOptimizer", _host_optimizer, exact=False),
    "zero-offload": Way("DeepSpeed ZeRO-Offload", _zero_offload, exact=False),
}
"""By the name that ``--ways`` takes."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the longest list of modules that ``model`` itself holds, or the model
    alone if it holds none."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    return [model] if longest is None or not len(longest) else list(longest)
