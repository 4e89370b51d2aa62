"""Ways of training one network: plain PyTorch, this library, a baseline, common alternatives.

All have the same optimizer, samples and weights (drawn on the CPU). `BUDGETED` is `offload`;
`REPLAY` is the same with strict replay of a recorded order. `DTR` drops activations and recomputes
them under a budget. `CHECKPOINT` is plain training with
`torch.utils.checkpoint` around each block of the network; ``save-on-cpu`` with
`torch.autograd.graph.save_on_cpu`. ``fsdp2`` is `fully_shard` of each block and of the root with
`CPUOffloadPolicy`, in a group of one process. ``host-optimizer`` is `dynoffload.HostOptimizer`,
``torchao`` the `CPUOffloadOptimizer` of that library, whose gradients leave as they are made. The
last three update on the CPU, so their bits differ from an update on the accelerator. `DEEPSPEED` is
ZeRO-3 with parameters and state in files, by DeepSpeed's AdamW. Its arithmetic differs, and it
updates experts that no token hit. `ACCELERATE` is `disk_offload`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from dynoffload.experiments.zoo.building import ZooSample

PLAIN, CHECKPOINT, DTR = "plain", "checkpoint", "dtr"
BUDGETED, REPLAY = "offload", "replay"
DEEPSPEED, ACCELERATE = "deepspeed", "accelerate"


@dataclass(frozen=True)
class Spec:
    """One training.

    Attributes:
        network: name in the zoo; with ``preset=""`` in `dynoffload.experiments.networks.NETWORKS`.
        preset: its sizes.
        mode: a key of `WAYS`.
        sizes: sizes that override the preset's, for `dynoffload.experiments.zoo.build`.
        shape: of the samples, for `dynoffload.experiments.zoo.samples`.
        split: which files samples come from.
        data_seed: of the samples.
        seed: of the weights.
        optimizer: implementation of AdamW: ``"fused"``, ``"foreach"`` or ``"for-loop"``.
        lr: its learning rate.
        weights: safetensors file of the initial weights; "" for those drawn by the seed.
        budget: bytes, for `BUDGETED`, `REPLAY` and `DTR`; `DEEPSPEED` sizes its buffers
            by it.
        host_budget: bytes of host memory above the spill file of an accelerator; 0 for no file.
        config: options of `dynoffload.OffloadConfig`.
        pilot: path of a pilot, ``"auto"`` or None.
        meta: build on the meta device and materialize the weights inside the block; not for `DTR`.
        spill_dir: of the spill file, or of another library's files.
        device: of the accelerator; "" trains on the CPU.
        threads: compute threads; 0 for torch's default.
        watched: each step reports the modules it visited.
        timed: each step reports the time of each part of a session's own work.
        clairvoyant: each step is given the modules it will visit, instead of a pilot.
        without: the part that is switched off, a key of `dynoffload.experiments.without.WITHOUT`.
    """

    network: str
    preset: str
    mode: str = PLAIN
    sizes: dict[str, int] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    split: str = "train"
    data_seed: int = 0
    seed: int = 0
    optimizer: str = "fused"
    lr: float = 1e-3
    weights: str = ""
    budget: int = 0
    host_budget: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    pilot: str | None = None
    meta: bool = False
    spill_dir: str | None = None
    device: str = ""
    threads: int = 0
    watched: bool = False
    timed: bool = False
    clairvoyant: bool = False
    without: str = ""


@dataclass(frozen=True)
class Ready:
    """A network that can be stepped: its optimizer, what is entered around each forward, the
    library's session, if there is one, and what is called instead of the network."""

    optimizer: Optimizer
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    session: Any = None
    model: nn.Module | None = None


Way = Callable[[Spec, "nn.Module", Any], AbstractContextManager[Ready]]
"""Prepares a network for training; the last argument is the pilot."""


def network(spec: Spec) -> nn.Module:
    """Return the network of ``spec``, on the CPU, or on the meta device if ``spec.meta``."""
    from dynoffload.experiments import zoo
    from dynoffload.experiments.networks import NETWORKS

    if not spec.preset:
        return NETWORKS[spec.network]().build()
    device = "meta" if spec.meta else "cpu"
    model = zoo.build(spec.network, spec.preset, seed=spec.seed, device=device, **spec.sizes)
    if spec.weights:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(spec.weights))
    return model


def samples(spec: Spec) -> Iterator[ZooSample]:
    """Return the samples of ``spec``."""
    from dynoffload.experiments import zoo
    from dynoffload.experiments.networks import NETWORKS

    if not spec.preset:
        return NETWORKS[spec.network]().samples(spec.data_seed)
    return zoo.samples(spec.network, spec.split, seed=spec.data_seed, **spec.shape)


def adamw(model: nn.Module, spec: Spec) -> Optimizer:
    """Return the optimizer of ``spec``."""
    from torch.optim import AdamW

    kinds: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }
    return AdamW(model.parameters(), lr=spec.lr, **kinds[spec.optimizer])


def place_of(spec: Spec) -> torch.device:
    """Return the device on which a training computes."""
    import torch

    return torch.device(spec.device or "cpu")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of the `ModuleList` with the most parameters; the model if it has none."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)
    return [model] if largest is None else list(largest)


@contextlib.contextmanager
def _plain(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    yield Ready(adamw(model.to(place_of(spec)), spec))


@contextlib.contextmanager
def _checkpoint(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model.to(place_of(spec))):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield Ready(adamw(model, spec))


@contextlib.contextmanager
def _dtr(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from dynoffload.experiments.baselines.dtr import recomputing

    optimizer = adamw(model.to(place_of(spec)), spec)
    with recomputing(model, optimizer, spec.budget) as session:
        yield Ready(optimizer, session=session)


@contextlib.contextmanager
def _save_on_cpu(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from torch.autograd.graph import save_on_cpu

    device = place_of(spec)
    around = functools.partial(save_on_cpu, pin_memory=device.type != "cpu")
    yield Ready(adamw(model.to(device), spec), around)


@contextlib.contextmanager
def _group_of_one(device: torch.device) -> Iterator[None]:
    """Initialise torch.distributed for one process."""
    import torch.distributed as dist

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # one process: stay on the loopback interface
    backend = dist.get_default_backend_for_device(device)
    backends = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backends, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _fsdp2(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    device = place_of(spec)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    with _group_of_one(device):
        mesh = init_device_mesh(device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for part in (*blocks_of(model), model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
        yield Ready(adamw(model, spec))


def _peer(name: str) -> Any:
    """Return another library, which is no dependency."""
    if find_spec(name) is None:
        raise ConfigError("not installed")
    return importlib.import_module(name)


@contextlib.contextmanager
def _deepspeed(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    deepspeed = _peer("deepspeed")
    files = {"device": "nvme", "nvme_path": spec.spill_dir, "pin_memory": False}
    part = max(1, spec.budget // 512)  # elements; with gradient and state, a 32nd of the budget
    largest = max(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": spec.lr, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**files, "buffer_size": largest},
            "offload_optimizer": files,
            "sub_group_size": part,
            "reduce_bucket_size": part,
            "stage3_prefetch_bucket_size": part,
            "stage3_max_live_parameters": 4 * part,
            "stage3_max_reuse_distance": 4 * part,
        },
    }
    os.environ.setdefault("LOCAL_RANK", "0")
    with _group_of_one(place_of(spec)):
        engine = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config,
            dist_init_required=False,
        )[0]
        yield Ready(engine, model=engine)


@contextlib.contextmanager
def _accelerate(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    def check(*_: object) -> None:
        if all(parameter.grad is None for parameter in model.parameters()):
            raise ConfigError("does not train: backward() leaves no gradients")

    folder = tempfile.mkdtemp(dir=spec.spill_dir)
    _peer("accelerate").disk_offload(model, folder, execution_device=place_of(spec))
    optimizer = adamw(model, spec)
    optimizer.register_step_pre_hook(check)
    yield Ready(optimizer)


@contextlib.contextmanager
def _host_optimizer(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from torch.optim import AdamW

    import dynoffload

    parameters = model.to(place_of(spec)).parameters()
    with dynoffload.HostOptimizer(parameters, AdamW, lr=spec.lr) as optimizer:
        yield Ready(optimizer)


@contextlib.contextmanager
def _torchao(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from torch.optim import AdamW

    _peer("torchao")
    device, offload = place_of(spec), importlib.import_module("torchao.optim").CPUOffloadOptimizer
    if device.type not in ("cuda", "xpu"):
        raise ConfigError(f"torchao offloads optimizers on cuda and xpu, and this is {device.type}")
    yield Ready(offload(model.to(device).parameters(), AdamW, offload_gradients=True, lr=spec.lr))


@contextlib.contextmanager
def _budgeted(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    import dynoffload

    if spec.without:
        from dynoffload.experiments.without import WITHOUT

        WITHOUT[spec.without]()
    optimizer = adamw(model, spec)
    with dynoffload.offload(
        model,
        optimizer,
        budget=spec.budget,
        host_budget=spec.host_budget or None,
        device=spec.device or None,
        spill_dir=spec.spill_dir,
        config=spec.config,
        pilot=pilot,
    ) as session:
        yield Ready(optimizer, session=session)


@contextlib.contextmanager
def _replay(spec: Spec, model: nn.Module, pilot: Any) -> Iterator[Ready]:
    from dynoffload.experiments.baselines.replay import replaying

    optimizer = adamw(model, spec)
    with replaying(model, optimizer, spec.budget, spec.spill_dir, **spec.config) as session:
        yield Ready(optimizer, session=session)


WAYS: dict[str, Way] = {
    PLAIN: _plain,
    CHECKPOINT: _checkpoint,
    DTR: _dtr,
    BUDGETED: _budgeted,
    REPLAY: _replay,
    "save-on-cpu": _save_on_cpu,
    "fsdp2": _fsdp2,
    "host-optimizer": _host_optimizer,
    "torchao": _torchao,
    DEEPSPEED: _deepspeed,
    ACCELERATE: _accelerate,
}
"""Way by name."""
