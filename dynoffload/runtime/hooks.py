"""Where the step is: the hooks on modules, parameters and saved tensors.

They report and never decide. The root's hooks open and close a sample and hold the saved-tensor
hooks in place for the time between; a unit's hook comes before its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dynoffload.runtime.activations import Activations
from dynoffload.runtime.store import Slot
from dynoffload.runtime.units import Unit


class Hooks:
    """Installs and removes one session's hooks.

    Args:
        model: the root.
        units: modules to watch.
        slots: parameters whose gradients are adopted.
        activations: its hooks are active during a training forward of the root.
        on_begin: called with the root's inputs when a training forward begins.
        on_end: called when it has ended.
        on_visit: called with a unit before its forward, in training or not.
        on_gradient: called with a slot when its gradient is complete for this backward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        slots: Sequence[Slot],
        activations: Activations,
        *,
        on_begin: Callable[[tuple[Any, ...], dict[str, Any]], None],
        on_end: Callable[[], None],
        on_visit: Callable[[Unit], None],
        on_gradient: Callable[[Slot], None],
    ) -> None:
        self._activations = activations
        self._on_begin, self._on_end = on_begin, on_end
        self._depth = 0
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for unit in units:
            handles.append(unit.module.register_forward_pre_hook(_visitor(unit, on_visit)))
        for slot in slots:
            if slot.parameter.requires_grad:
                collect = _collector(slot, on_gradient)
                handle = slot.parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
                handles.append(handle)
        self._handles = handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        self._on_begin(args, kwargs)
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            self._saving = torch.autograd.graph.saved_tensors_hooks(
                self._activations.pack, self._activations.unpack
            )
            self._saving.__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        if torch.is_grad_enabled():
            self._on_end()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()


def _visitor(unit: Unit, on_visit: Callable[[Unit], None]) -> Callable[[nn.Module, Any], None]:
    def visit(module: nn.Module, args: Any) -> None:
        on_visit(unit)

    return visit


def _collector(slot: Slot, on_gradient: Callable[[Slot], None]) -> Callable[[torch.Tensor], None]:
    def collect(parameter: torch.Tensor) -> None:
        on_gradient(slot)

    return collect
