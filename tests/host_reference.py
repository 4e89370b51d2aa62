"""What `HostOptimizer` must do, in plain PyTorch, and networks to do it on: no tests here."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated import Emulated, Watcher, emulated
from exactness import assert_same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer import HostOptimizer

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}
"""Optimizers and their options, by name."""


class Reference(Optimizer):
    """The lines that the semantics are given by, written with torch alone.

    Args:
        params: of the model, or groups.
        kind, options: of the optimizer over masters.
        delayed: let parameters take a step's update over at the end of the next.
        warmup_steps: that do not.
    """

    def __init__(
        self,
        params: Iterable[Any],
        kind: type[Optimizer],
        *,
        delayed: bool = False,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(params, dict(kind([nn.Parameter(torch.zeros(1))], **options).defaults))
        self.masters: dict[Tensor, nn.Parameter] = {}
        self._kind, self._options = kind, options
        groups = []
        for group in self.param_groups:
            for p in group["params"]:
                self.masters[p] = nn.Parameter(p.detach().float())
            values = {k: v for k, v in group.items() if k != "params"}
            groups.append({**values, "params": [self.masters[p] for p in group["params"]]})
            groups[-1]["fused"] = True
        self.inner = kind(groups, fused=True, **options)
        self.delayed, self._warmup, self._steps = delayed, warmup_steps, 0
        self._late: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.catch_up()
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        updated = []
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
            if p.grad is not None:
                updated.append(p)
            p.grad = None
        self.inner.step()
        self._late = updated
        if not (self.delayed and self._steps >= self._warmup):
            self.catch_up()
        self._steps += 1
        return loss

    @torch.no_grad()
    def catch_up(self) -> None:
        """Let parameters take over what is late."""
        for p in self._late:
            p.copy_(self.masters[p])
        self._late = []


class Odd(nn.Module):
    """Parameters of odd sizes, one larger than a tile, one never used, and one channels-last."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, width: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, width)
        self.conv = nn.Conv2d(3, 5, 3)
        self.hidden = nn.Linear(width, 71)
        self.unused = nn.Linear(3, 5)
        self.out = nn.Linear(71, 1)
        self.to(dtype)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss for ``[rows]`` of words."""
        dtype = self.out.weight.dtype
        image = torch.linspace(-1, 1, 48, dtype=dtype).view(1, 3, 4, 4)
        rows = self.hidden(self.embedding(x)).tanh()
        return (self.out(rows) + self.conv(image).mean()).square().mean()


def odd(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Odd:
    """Return an `Odd` whose weights follow from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd(dtype)


def words(count: int, seed: int = 0) -> list[Tensor]:
    """Return samples for `Odd`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (7,), generator=generator) for _ in range(count)]


class Pair:
    """A network with a `HostOptimizer`, and the same with the reference."""

    def __init__(
        self,
        kind: str = "adamw",
        dtype: torch.dtype = torch.bfloat16,
        *,
        model: nn.Module | None = None,
        delayed: bool = False,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        self.model = odd(dtype) if model is None else model
        self.reference = copy.deepcopy(self.model)
        cls, values = KINDS[kind]
        delays = {"delayed": delayed, "warmup_steps": warmup_steps}
        options.setdefault("tile_bytes", 4096)
        options.setdefault("threads", 1)  # others wait in a loop for a while, on a core
        self.ours = HostOptimizer(self.model.parameters(), cls, **values, **delays, **options)
        self.theirs = Reference(self.reference.parameters(), cls, **values, **delays)

    def backward(self, sample: Tensor, scale: float = 1.0) -> None:
        """Compute both losses, which must be the same, and gradients."""
        losses = []
        for model in (self.model, self.reference):
            loss = model(sample)
            (loss * scale).backward()
            losses.append(loss.detach())
        assert_same(losses[0], losses[1], "loss")

    def step(self) -> None:
        """Step both."""
        self.ours.step()
        self.theirs.step()

    def zero_grad(self) -> None:
        """Forget both gradients."""
        self.ours.zero_grad()
        self.theirs.zero_grad()

    def clip(self, bound: float, norm_type: float = 2.0) -> None:
        """Clip both by the norm of all gradients, which must be the same, and above ``bound``."""
        ours = self.ours.clip_grad_norm_(bound, norm_type)
        theirs = nn.utils.clip_grad_norm_(
            self.reference.parameters(), bound, norm_type, foreach=False
        )
        assert_same(ours, theirs, "norm")
        assert float(theirs) > min(bound, 0.09), "nothing is clipped: this shows nothing"

    def train(
        self, samples: Sequence[Tensor], accumulate: int = 1, clip: float | None = None
    ) -> None:
        """Take a step for every ``accumulate`` of ``samples``, maybe by clipped gradients."""
        for number, sample in enumerate(samples, 1):
            self.backward(sample, scale=1.0 if clip is None else 30.0)
            if number % accumulate == 0:
                if clip is not None:
                    self.clip(clip)
                self.step()
                self.zero_grad()

    def finish(self) -> None:
        """Let parameters of both take over what is delayed, and assert that all is the same."""
        self.ours.finish()
        self.theirs.catch_up()
        self.assert_same()

    def assert_same(self) -> None:
        """Assert that parameters, masters and moments are the same."""
        theirs = dict(self.reference.named_parameters())
        state = self.ours.state_dict()["state"]
        for number, (name, p) in enumerate(self.model.named_parameters()):
            assert_same(p.detach(), theirs[name].detach(), name)
            master = self.theirs.masters[theirs[name]]
            mine = state[number]
            assert_same(mine["master"], master.detach(), f"{name}.master")
            for key, value in self.theirs.inner.state.get(master, {}).items():
                assert_same(mine[key], value, f"{name}.{key}")


@contextmanager
def racing(seed: int = 0, **options: Any) -> Iterator[Emulated]:
    """Open an emulated accelerator that looks at what operators do, too."""
    with emulated(seed, **options) as queues:
        with Watcher(queues, queues.knows).watching() as watcher:
            yield queues
        assert watcher.seen > 0, "nothing was seen: this shows nothing"
        assert queues.host_bytes == 0, "host memory is left"


def on_accelerator(model: nn.Module, queues: Emulated) -> nn.Module:
    """Give parameters memory of an emulated accelerator, and have it look at gradients; return the
    model. What was made stays held, as it must."""
    kept: list[Any] = []

    def made(gradient: Tensor) -> None:
        kept.append(gradient.untyped_storage())
        queues.see(kept[-1])

    for parameter in model.parameters():
        storage = torch.UntypedStorage(0)
        queues.fill(storage, parameter.nbytes)
        there = torch.empty(0, dtype=parameter.dtype).set_(
            storage, 0, parameter.size(), parameter.stride()
        )
        parameter.data = there.copy_(parameter.data)
        parameter.register_hook(made)
    model._kept = kept  # type: ignore[assignment]
    return model


class Two(nn.Module):
    """Two layers, of which the first may be left to each process."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if alone:
            self._ddp_params_and_buffers_to_ignore = ["first.weight", "first.bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def step_of_replica(rank: int, world: int, alone: bool, wrapped: str = "last") -> str:
    """Return what backward over a replica raises, whose first layer a `HostOptimizer` trains.

    The replica is made ``"first"``, before the optimizer; ``"last"``, or after a ``"step"``.
    """
    model = Two(alone)
    replica = DistributedDataParallel(model) if wrapped == "first" else None
    optimizer = HostOptimizer(model.first.parameters(), torch.optim.AdamW, lr=0.1)
    if wrapped == "step":
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    replica = replica or DistributedDataParallel(model)
    before = [p.detach().clone() for p in model.first.parameters()]
    said = ""
    try:
        replica(torch.full((2, 4), 1.0 + rank)).sum().backward()
    except ConfigError as error:
        said = str(error)
    with pytest.raises(ConfigError) if said else contextlib.nullcontext():
        optimizer.step()
    assert all(map(torch.equal, model.first.parameters(), before)) == bool(said)
    return said


def steps_of_replicas(rank: int, world: int, alone: bool) -> list[str]:
    """Return what `step_of_replica` returns, one after the other, of each time of making it."""
    return [step_of_replica(rank, world, alone, made) for made in ("first", "last", "step")]
