"""Maps each parameter to the `HostOptimizer` that takes its gradients: the one created last.

While a gradient waits for its `HostOptimizer`, another optimizer's step over the parameter is
refused: it would change nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer.checks import check_not_reduced
from dynoffload.host_optimizer.gradient_offload import GradientOffload, check_gradient
from dynoffload.host_optimizer.states import ParameterState

_owners: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to its GradientHooks


class GradientHooks:
    """The parameters of one optimizer, and the hooks that send their gradients to the host.

    Args:
        optimizer: their owner, referenced weakly.
        states: the state of each of its parameters; more may be added.
        gradients: where the hooks send gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: Mapping[torch.Tensor, ParameterState],
        gradients: GradientOffload,
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._states, self._gradients = states, gradients
        self._handles: dict[torch.Tensor, Any] = {}
        self.may_be_reduced = True  # check before the next gradient is sent
        _watch()

    def add(self, state: ParameterState) -> None:
        """Take over a parameter's gradients, also from another optimizer."""
        _owners[state.parameter] = weakref.ref(self)
        self.may_be_reduced = True
        self._watch(state.parameter)

    def _watch(self, parameter: torch.Tensor) -> None:
        if parameter in self._handles or not parameter.requires_grad:
            return
        hooks = weakref.ref(self)  # a hook that references its parameter would keep it alive

        def send(parameter: torch.Tensor) -> None:
            alive = hooks()
            if alive is not None and _owner(parameter) is alive:
                alive._send(alive._states[parameter])

        handle = parameter.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
        self._handles[parameter] = handle

    def _send(self, state: ParameterState) -> None:
        if self.may_be_reduced:
            check_not_reduced(self._states)
            self.may_be_reduced = False
        self._gradients.send(state)

    def send_remaining(self) -> None:
        """Send gradients that no hook has sent: of parameters unfrozen since, or assigned by the
        user.

        Raises:
            ConfigError: a gradient is not supported, or belongs to a `DistributedDataParallel`.
        """
        for parameter, state in self._states.items():
            if parameter.grad is not None:
                gradient = check_gradient(state, parameter.grad)
                parameter.grad = gradient.detach().clone()  # the original may be the user's
                self._send(state)
                self._watch(parameter)

    def check(self) -> None:
        """Refuse to continue if another optimizer has taken over a parameter.

        Raises:
            ConfigError: one has; it is named.
        """
        for parameter, state in self._states.items():
            if _owner(parameter) is not self:
                raise ConfigError(
                    f"another HostOptimizer was made over {state.name} since this one, and takes "
                    "its gradients: use that one alone, with this one's state_dict() if training "
                    "goes on"
                )

    def waiting(self, parameter: torch.Tensor) -> str:
        """Return the parameter's name if its gradient was sent and awaits a step; else ""."""
        state = self._states[parameter]
        left = parameter.grad is None and state in self._gradients.gradients
        return state.name if left else ""

    def close(self) -> None:
        """Remove the hooks, and release the parameters that this optimizer still owns."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        for parameter in self._states:
            if _owner(parameter) is self:
                del _owners[parameter]


def _owner(parameter: torch.Tensor) -> GradientHooks | None:
    found = _owners.get(parameter)
    return None if found is None else found()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_refuse_step)
    register_module_module_registration_hook(_note_replica)


def _note_replica(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    """Have gradients checked again if a `DistributedDataParallel` is made over their parameters."""
    if isinstance(module, DistributedDataParallel) and wrapped is not None:
        for parameter in wrapped.parameters():
            if (owner := _owner(parameter)) is not None:
                owner.may_be_reduced = True


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer whose gradients were sent to another.

    Raises:
        ConfigError: the step would train nothing.
    """
    for group in optimizer.param_groups if _owners else ():
        for parameter in group["params"]:
            owner = _owner(parameter)
            if owner is None or owner.optimizer() is optimizer:
                continue
            if name := owner.waiting(parameter):
                raise ConfigError(
                    f"this {type(optimizer).__name__} would train nothing of {name}, of shape "
                    f"{list(parameter.shape)}, as a HostOptimizer has taken its gradient: step "
                    "that one, or close() it before backward"
                )
