"""What makes up for a lost step where the user loads by ``load_state_dict``, and what is refused
until then.

After a lost step, part of the model and of the optimizer's state is of that step, and part of the
one before. All is as it was saved once both have been loaded since, in any order: the optimizer,
whose ``load_state_dict`` replaces state and hyperparameters; and the whole of the model, with no
key missing and no error, by a load that has written every parameter of the optimizer in place.
Anything less leaves the step lost.

[Note: aftermath]  Inside the block a session refuses to go on. Whoever leaves it with a lost step,
as by an error that a script catches to save what it has, would find an ordinary model. So hooks
stay that refuse: forward, ``state_dict()`` and copies of the model until it is loaded, and the
optimizer's ``step()`` and ``state_dict()`` until both are. Tensors by themselves can be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.updates.loss import Loss, Part


class Recovery:
    """Watches loads of a model, until it is closed.

    Args:
        model: the root.
        optimizer: whose parameters it holds, or None; it is not kept alive.
        loss: what loads make up for.
        on_load: called as a load begins after a loss.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss: Loss,
        on_load: Callable[[], None],
    ) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._loss, self._on_load = loss, on_load
        self._faults: tuple[list[str], ...] = ()  # of the load that goes on
        self._versions: dict[torch.Tensor, int] = {}  # of parameters, when it began
        self._own: set[torch.Tensor] = set()  # the model's, when it began
        self._hooks = Hook(self._begin), Hook(self._end)
        self._handles = [
            model.register_load_state_dict_pre_hook(self._hooks[0]),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(self._hooks[1]),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()

    def _versions_now(self) -> dict[torch.Tensor, int]:
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return {parameter: parameter._version for group in groups for parameter in group["params"]}

    def _begin(self, *args: Any) -> None:
        module, _state, _prefix, _metadata, _strict, missing, _unexpected, errors = args
        self._faults = ()
        if self._loss:
            self._on_load()
            self._faults, self._versions = (missing, errors), self._versions_now()
            self._own = set(module.parameters())

    def _end(self, module: nn.Module, keys: Any) -> None:
        faults, self._faults = self._faults, ()
        before, self._versions = self._versions, {}
        own, self._own = self._own, set()
        if not faults or any(faults):
            return
        now = self._versions_now()
        replaced = own - set(module.parameters())  # by ``assign=True``: they are nobody's any more
        written = (p in replaced or now[p] != before.get(p, now[p]) for p in now)
        if all(written):
            self._loss.make_up("model")


class Aftermath:
    """Refuses what a block has left half of one step and half of another; [Note: aftermath].

    Args:
        model: the root.
        optimizer: its optimizer, or None; neither is kept alive.
        loss: what the block has left with.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[Aftermath]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, loss: Loss) -> None:
        loss.outlast()
        self._loss = loss
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._recovery = Recovery(model, optimizer, loss, lambda: None)
        refusing = Hook(lambda *_: loss.check(), loss.check, compiled=True)
        self._of_model: list[RemovableHandle] = []
        for inner in model.modules():
            self._of_model += [
                inner.register_forward_pre_hook(refusing, prepend=True),
                inner.register_state_dict_pre_hook(refusing),  # type: ignore[no-untyped-call]
            ]
        self._of_optimizer: list[RemovableHandle] = []
        if optimizer is not None:
            self._of_optimizer += [
                optimizer.register_step_pre_hook(refusing),
                optimizer.register_state_dict_pre_hook(refusing),
                optimizer.register_load_state_dict_post_hook(lambda _: loss.make_up("optimizer")),
            ]
        loss.on_part = self._admit
        self._of.setdefault(model, []).append(self)

    def _admit(self, part: Part) -> None:
        if part == "model":
            for handle in self._of_model:
                handle.remove()
        if not self._loss:
            self._loss.on_part = lambda part: None
            self._recovery.close()
            for handle in self._of_optimizer:
                handle.remove()

    def _is_of(self, optimizer: Optimizer | None) -> bool:
        return (
            optimizer is not None
            and self._optimizer is not None
            and (self._optimizer() is optimizer)
        )

    @classmethod
    def check(cls, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Refuse to save ``model``, or ``optimizer`` with it, if it is lost.

        Raises:
            StepLostError: it is.
        """
        for aftermath in cls._of.get(model, ()):
            if aftermath._loss.has("model") or aftermath._is_of(optimizer):
                aftermath._loss.check()

    @classmethod
    def make_up(cls, model: nn.Module, optimizer: Optimizer | None) -> None:
        """A checkpoint was loaded into ``model``, and into ``optimizer`` if there is one."""
        for aftermath in cls._of.get(model, ()):
            if aftermath._loss:
                aftermath._loss.make_up("model")
            if aftermath._loss and aftermath._is_of(optimizer):
                aftermath._loss.make_up("optimizer")
        cls._of[model] = [aftermath for aftermath in cls._of.get(model, ()) if aftermath._loss]
