"""Hooks on units and on reads of the whole model, which report the step's progress.

The hooks only report. They are reinstalled whenever the network has changed. The root's hooks,
which open and close a sample, belong to the session and stay installed.

[Note: copies of hooks]  Copies and pickles of a module include its hooks. Ours are `Hook` objects,
whose copies do nothing, so a copied model is a plain one. Hooks installed through
`dynoffload.around` are not copied.

[Note: compiled models]  `torch.compile` would trace hooks, and compile what they call. The root's
hooks run outside the compiled region, before and after it. Unit hooks do nothing inside it:
parameters of a compiled forward are fetched when touched, or before it on accelerators
(`dynoffload.runtime.passes.compiled`). `torch.export` runs a model on tensors without data: there
is nothing to page, and all hooks do nothing.

[Note: removed hooks]  `Module.__call__` collects its hooks before it runs them. A hook removed by
an earlier one in the same call still runs, so `Hook.end` makes it do nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dynoffload.around import before_call, choosing
from dynoffload.runtime.adoption.units import Unit


class Hook:
    """A hook to register with a module; see [Note: copies of hooks].

    Args:
        call: called by the hook; None does nothing.
        on_copy: called before the hook is copied or pickled with its module.
        compiled: whether it also runs around compiled code; see [Note: compiled models].
    """

    def __init__(
        self,
        call: Callable[..., Any] | None = None,
        on_copy: Callable[[], None] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._call, self._on_copy, self.compiled = call, on_copy, compiled

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return None
            return _outside(self, args) if self.compiled else None
        return None if self._call is None else self._call(*args)

    def end(self) -> None:
        """Do nothing from now on; see [Note: removed hooks]."""
        self._call = self._on_copy = None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        if self._on_copy is not None:
            self._on_copy()
        return Hook, ()


@torch._disable_dynamo  # type: ignore[attr-defined]
def _outside(hook: Hook, args: tuple[Any, ...]) -> Any:
    return None if hook._call is None else hook._call(*args)


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() >= 0


def watch_modules(
    watching: ExitStack,
    model: nn.Module,
    units: Sequence[Unit],
    on_visit: Callable[..., None],
    on_read: Callable[[], None],
) -> None:
    """Install hooks until ``watching`` is closed.

    Args:
        watching: is given the functions that remove them.
        model: the root.
        units: modules to watch.
        on_visit: called with a unit and the hook's arguments before its forward, in train and eval
            mode.
        on_read: called before ``state_dict()``, copies or pickles of the model or a module.
    """
    unseen = choosing(model)
    read = Hook(lambda module, prefix, keep_vars: on_read(), on_read)
    for inner in model.modules():
        watching.callback(inner.register_state_dict_pre_hook(read).remove)  # type: ignore[no-untyped-call]
    for unit in units:
        if unit.number is not None:
            continue  # uses of slices are reported by `Parts`
        visit = Hook(partial(on_visit, unit))
        watching.callback(before_call(unit.module, visit, unseen, first=unit.gathers).remove)
        watching.callback(visit.end)
        if unit.gathers and unit.module is model and model not in unseen:
            _keep_first(model)


def _keep_first(model: nn.Module) -> None:
    """Keep the hook that opens a sample first among the root's."""
    hooks = cast("OrderedDict[int, Any]", model._forward_pre_hooks)
    for key, hook in list(hooks.items()):
        if isinstance(hook, Hook) and hook.compiled:
            hooks.move_to_end(key, last=False)
