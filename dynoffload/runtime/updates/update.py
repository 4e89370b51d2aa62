"""One parameter's share of an optimizer step, kept until it is made; see `updates`.

[Note: neighbours]  With ``momentum`` and ``foreach``, SGD scales all momentum of a dtype at once if
every parameter has some, else one by one. The two kernels round differently in half precision. So
one update depends on whether another parameter has its first gradient in this step. If so, a
separate update runs together with a one-element parameter that has no momentum.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from dynoffload.distributed.sharded import replica_beside
from dynoffload.errors import ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device
from dynoffload.memory.local import is_spread
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.store import Store
from dynoffload.runtime.updates.failure import StepFailure
from dynoffload.runtime.updates.torch_context import TorchContext

logger = logging.getLogger(__name__)

Group = dict[str, Any]

FIRST_TIMERS = "dynoffload_first_timers"
"""Key under which copied hyperparameters keep the result of `first_timers`."""

_REFUSED = {
    "LBFGS": "updates all parameters together, with one state for the group",
    "SparseAdam": "takes sparse gradients, which are not paged",
}


@dataclass(frozen=True, eq=False)
class PagedOptimizer:
    """An optimizer, and what pages its tensors.

    Attributes:
        optimizer: the user's optimizer.
        store: its parameters' slots.
        rows: rows of the parameters that are paged by slices.
        device: holds their regions.
        failure: records a partially applied step.
    """

    optimizer: Optimizer
    store: Store
    rows: FusedStore
    device: Device
    failure: StepFailure


@dataclass(eq=False)
class Update:
    """An update that is still to be made.

    Attributes:
        group: the hyperparameters at the time of ``step()``, without parameters.
        data: the parameter's tensor at that time.
        gradient: the gradient that it consumes.
        state: the parameter's optimizer state at that time, None before the first step.
        regions: regions that it reads and writes, locked until then.
        context: torch's settings at that time.
        states: the optimizer's state mapping at that time, which receives new entries; user code
            may have replaced it since.
        begun: whether the optimizer's code has started on it.
    """

    group: Group
    data: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any] | None
    regions: list[int]
    context: TorchContext
    states: dict[torch.Tensor, Any]
    begun: bool = False

    def release(self) -> None:
        """Drop the tensors, once it was made or lost."""
        self.state = None
        for name in ("gradient", "data"):
            self.__dict__.pop(name, None)


def can_split(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one of torch's, whose steps split into exact updates."""
    return type(optimizer).__module__.startswith("torch.optim")


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer that ``optimizer`` wraps, or ``optimizer`` itself.

    Wrappers such as accelerate's, Opacus' and timm's Lookahead are `Optimizer` subclasses that hold
    another optimizer and have no step hooks.

    Raises:
        ConfigError: its step takes no hooks, and it does not hold exactly one other optimizer.
    """
    name = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        if takes_hooks(optimizer):
            return optimizer
        held = {id(one): one for one in vars(optimizer).values() if isinstance(one, Optimizer)}
        if len(held) != 1:
            raise ConfigError(
                f"{name} leaves out the __init__ of torch.optim.Optimizer, so its step takes no "
                "hooks: call super().__init__(params, defaults) in it, or pass the optimizer that "
                "it wraps"
            )
        (inner,) = held.values()
    if getattr(optimizer, "state", None) is not inner.state:
        logger.warning(
            "%s wraps the %s that is paged: what it keeps in a state of its own is neither paged "
            "nor counted",
            name,
            type(inner).__name__,
        )
    return innermost(inner)


def takes_hooks(optimizer: Optimizer) -> bool:
    """Return whether `torch.optim.Optimizer.__init__` ran, so that ``step`` has hooks."""
    made = "_optimizer_step_pre_hooks" in vars(optimizer)
    return made and getattr(type(optimizer).step, "hooked", False) is True


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step cannot be split by parameter, or whose state has no values.

    Raises:
        ConfigError: naming the optimizer.
    """
    name = type(optimizer).__name__
    if name in _REFUSED and type(optimizer).__module__.startswith("torch.optim"):
        raise ConfigError(
            f"{name} {_REFUSED[name]}: use an optimizer with dense state per parameter, such as "
            "AdamW, or train without offload()"
        )
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ConfigError(
                    f"the state {key!r} of this {name} is on the meta device and has lost its "
                    "values, as load_state_dict() moves it to where the parameters are: load it "
                    "inside the block, into an optimizer made anew"
                )


def check_host(optimizer: Optimizer | None, device: Device) -> None:
    """Refuse a `HostOptimizer` if host memory is the fast memory.

    Raises:
        ConfigError: ``device`` is not an accelerator's.
    """
    if isinstance(optimizer, HostOptimizer) and device.serves:
        raise ConfigError(
            f"on the {device.name} fast memory is host memory, where a HostOptimizer keeps "
            "masters, moments and gradients under no budget: pass torch's own optimizer, whose "
            "state is paged"
        )


def snapshot(group: Group) -> Group:
    """Return a copy of a group's current hyperparameters, without parameters."""
    return {key: copied(value) for key, value in group.items() if key != "params"}


def first_timers(optimizer: Optimizer, group: Group) -> tuple[torch.dtype, ...]:
    """Return the dtypes for which ``group`` has parameters both with and without momentum, if that
    affects results; see [Note: neighbours]."""
    if type(optimizer).__name__ != "SGD" or not group.get("momentum") or not is_foreach(group):
        return ()
    found: dict[torch.dtype, set[bool]] = {}
    for parameter in group["params"]:
        if parameter.grad is not None and parameter.dtype in (torch.float16, torch.bfloat16):
            state = dict.get(optimizer.state, parameter) or {}
            has = state.get("momentum_buffer") is not None
            found.setdefault(parameter.dtype, set()).add(has)
    return tuple(dtype for dtype, has in found.items() if len(has) > 1)


def is_foreach(group: Group) -> bool:
    """Return whether torch updates a group by foreach operators, its default on accelerators."""
    if group.get("fused"):
        return False
    if group.get("foreach") is not None:
        return bool(group["foreach"])
    _, foreach = _default_to_fused_or_foreach(
        group["params"], bool(group.get("differentiable")), use_fused=False
    )
    return bool(foreach)


def neighbours(group: Group, device: torch.device) -> list[nn.Parameter]:
    """Return one-element parameters on ``device`` to update together with those of ``group``; see
    [Note: neighbours]."""
    spread = next((one for one in group["params"] if is_spread(one)), None)
    made = [
        nn.Parameter(replica_beside(spread, torch.zeros(1, dtype=dtype, device=device)))
        for dtype in group.get(FIRST_TIMERS, ())
    ]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def copied(value: Any) -> Any:
    """Return a copy of a tensor, or of a list or tuple with tensors; else ``value`` itself."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple | list) and any(isinstance(part, torch.Tensor) for part in value):
        return type(value)(copied(part) for part in value)
    return value
