"""Where the step is: the hooks on units, parameters and reads of the whole model.

They report and never decide. They are put on anew whenever the network has changed; the root's
hooks, which open and close a sample, are the session's and stay where they are.

[Note: copies of hooks]  Modules carry their hooks into what is copied or pickled of them. Ours are
`Hook` objects, of which a copy does nothing: a copied model is a plain one. Where a unit's own hook
stands, no copy is made of it: `dynoffload.around`.

[Note: compiled models]  `torch.compile` would trace hooks, and compile what they call. A root's
hooks are called outside of what is compiled, on both its sides; a unit's do nothing there: what a
compiled forward reads is fetched as it is touched. `torch.export` runs a model on tensors without
bytes: there is nothing to page, and all hooks do nothing.

[Note: removed hooks]  A call of a module looks its hooks up before it runs them. One that an
earlier hook of the same call removes still runs: so `Hook.end` makes it do nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dynoffload.around import Handle, before_call, choosing
from dynoffload.runtime.adoption.units import Unit


class Hook:
    """What is registered with a module; see [Note: copies of hooks].

    Args:
        call: what it does; None does nothing.
        on_copy: called before it is copied or pickled with its module.
        compiled: whether it is called where a compiled model runs; see [Note: compiled models].
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


class Hooks:
    """Installs and removes one session's hooks.

    Args:
        model: the root.
        units: modules to watch.
        collectors: parameters, each with what is called when its gradient is complete for this
            backward.
        on_visit: called with a unit, and the hook's arguments, before its forward, in training or
            not.
        on_read: called before the whole of the model, or of a module, is read.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        collectors: Iterable[tuple[nn.Parameter, Callable[[torch.Tensor], None]]],
        *,
        on_visit: Callable[..., None],
        on_read: Callable[[], None],
    ) -> None:
        self._hooks: list[Hook] = []
        self._handles: list[Handle] = []
        try:
            self._watch_modules(model, units, on_visit, on_read)
            for parameter, collect in collectors:
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(collect))
        except BaseException:
            self.remove()
            raise

    def _watch_modules(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        on_visit: Callable[..., None],
        on_read: Callable[[], None],
    ) -> None:
        handles, unseen = self._handles, choosing(model)
        read = Hook(lambda module, prefix, keep_vars: on_read(), on_read)
        for inner in model.modules():
            handles.append(inner.register_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
        for unit in units:
            if unit.number is not None:
                continue  # its uses are told otherwise: see `Parts`
            visit = Hook(partial(on_visit, unit))
            self._hooks.append(visit)
            handles.append(before_call(unit.module, visit, unseen, first=unit.gathers))
            if unit.gathers and unit.module is model and model not in unseen:
                _keep_first(model)

    def remove(self) -> None:
        """Take all hooks off."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()


def _keep_first(model: nn.Module) -> None:
    """Have the hook that opens a sample go on being the root's first."""
    hooks = cast("OrderedDict[int, Any]", model._forward_pre_hooks)
    for key, hook in list(hooks.items()):
        if isinstance(hook, Hook) and hook.compiled:
            hooks.move_to_end(key, last=False)
