"""Methods of training one network on an accelerator: this library and the common alternatives.

All have the same optimizer, samples, weights (drawn on the CPU) and cap of the allocator.
``save-on-cpu`` is `torch.autograd.graph.save_on_cpu` with pinned memory; ``checkpoint`` is
`torch.utils.checkpoint` around each block of the network; ``fsdp2`` is `fully_shard` of each block
and of the root with `CPUOffloadPolicy`, in a group of one process; ``host-optimizer`` is
`dynoffload.HostOptimizer` with the whole network on the accelerator. The last two update on the
CPU, so their bits differ from an update on the accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynoffload.experiments.trainer import Spec, adamw, network

Step = Callable[[tuple[Any, ...]], Tensor]
"""Makes one training step and returns its loss, on the accelerator."""
PLAIN, OURS, FILES = "plain", "ours", "ours-file"
COUNTED = (OURS, FILES)
"""Methods that take a budget in bytes."""


@dataclass(frozen=True)
class Task:
    """Training task of one process.

    Attributes:
        way: a key of `WAYS`.
        spec: the network, its samples and optimizer. For methods that count bytes also the budget,
            options, the spill directory, and whether to build on the meta device, so that the
            network is never whole in memory.
        device: the accelerator.
        cap_bytes: limit of its allocator; 0 for no limit.
        host_bytes: of host memory, for the method with a spill file.
        steps: measured steps.
        warmup: unmeasured steps before them.
    """

    way: str
    spec: Spec
    device: str = "cuda"
    cap_bytes: int = 0
    host_bytes: int = 0
    steps: int = 6
    warmup: int = 3


@dataclass(frozen=True)
class Ready:
    """A network that can be stepped, and the library's session, if there is one."""

    model: nn.Module
    step: Step
    session: Any = None


Way = Callable[[Task, torch.device], AbstractContextManager[Ready]]
"""Context manager that prepares a task's network for training."""


def _ready(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    session: Any = None,
) -> Ready:
    stepped = optimizer or adamw(model, task.spec)

    def step(args: tuple[Any, ...]) -> Tensor:
        with around():
            loss: Tensor = model(*args).loss
        loss.backward()  # type: ignore[no-untyped-call]
        stepped.step()
        stepped.zero_grad()
        return loss.detach()

    return Ready(model, step, session)


@contextlib.contextmanager
def _plain(task: Task, device: torch.device) -> Iterator[Ready]:
    yield _ready(task, network(task.spec).to(device))


@contextlib.contextmanager
def _save_on_cpu(task: Task, device: torch.device) -> Iterator[Ready]:
    pinned = device.type != "cpu"
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    yield _ready(task, network(task.spec).to(device), around=around)


@contextlib.contextmanager
def _checkpoint(task: Task, device: torch.device) -> Iterator[Ready]:
    from torch.utils.checkpoint import checkpoint

    model = network(task.spec).to(device)
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield _ready(task, model)


@contextlib.contextmanager
def _fsdp2(task: Task, device: torch.device) -> Iterator[Ready]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # one process: stay on the loopback interface
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    backends = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backends, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        model = network(task.spec)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        yield _ready(task, model)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _host_optimizer(task: Task, device: torch.device) -> Iterator[Ready]:
    import dynoffload

    model = network(task.spec).to(device)
    optimizer = dynoffload.HostOptimizer(model.parameters(), torch.optim.AdamW, lr=task.spec.lr)
    with contextlib.closing(optimizer):
        yield _ready(task, model, optimizer)


@contextlib.contextmanager
def _ours(task: Task, device: torch.device) -> Iterator[Ready]:
    import dynoffload

    model = network(task.spec)
    optimizer = adamw(model, task.spec)
    with dynoffload.offload(
        model,
        optimizer,
        budget=task.spec.budget,
        host_budget=task.host_bytes or None,
        device=task.device,
        spill_dir=task.spec.spill_dir,
        config=task.spec.config,
    ) as session:
        yield _ready(task, model, optimizer, session=session)


WAYS: dict[str, Way] = {
    PLAIN: _plain,
    OURS: _ours,
    FILES: _ours,
    "save-on-cpu": _save_on_cpu,
    "checkpoint": _checkpoint,
    "fsdp2": _fsdp2,
    "host-optimizer": _host_optimizer,
}
"""Method by its name in ``--ways``."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the longest `ModuleList` among ``model``'s children, or the model alone
    if it has none."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    return [model] if longest is None or not len(longest) else list(longest)
