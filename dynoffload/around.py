"""Calls before and after a module's forward, hidden where torch chooses kernels by hooks.

[Note: unseen hooks]  `nn.TransformerEncoderLayer` leaves its fast path, and computes other bits, if
it or a module inside it has a hook. There, `Around` replaces hooks. A module's ``__call__`` first
looks for ``_compiled_call_impl``, where `Module.compile` stores its result. `Around` is stored
there instead, and calls what it replaced. Torch leaves that attribute out of copies and pickles,
and uses it nowhere else. Compiled code calls forward itself and bypasses it. All other modules have
ordinary hooks, which `Module.compile` and copies of a module's ``__dict__`` keep.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Protocol

from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]

_PLACE = "_compiled_call_impl"


class Handle(Protocol):
    """A registration of a hook."""

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""


def choosing(root: nn.Module) -> Set[nn.Module]:
    """Return the modules of ``root`` whose hooks decide which kernel runs; see the note above."""
    return {
        inner
        for layer in root.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for inner in layer.modules()
    }


def before_call(
    module: nn.Module, hook: Before, unseen: Set[nn.Module], *, first: bool = False
) -> Handle:
    """Call ``hook`` with a module, its args and its kwargs before each of its calls.

    Args:
        module: a module of the network.
        hook: returns None.
        unseen: modules that may have no ordinary hook; see `choosing`.
        first: call it before the hooks that exist already.
    """
    if module not in unseen:
        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
    around = _around(module)
    around.before = (hook, *around.before) if first else (*around.before, hook)
    return _Placed(around, hook)


def after_call(module: nn.Module, hook: After, unseen: Set[nn.Module]) -> Handle:
    """Call ``hook`` with a module, its arguments and its output after each of its calls.

    The output is None if the call raised an error. See `before_call`.
    """
    if module not in unseen:
        return module.register_forward_hook(hook, always_call=True)
    around = _around(module)
    around.after = (*around.after, hook)
    return _Placed(around, hook)


def is_around(module: nn.Module) -> bool:
    """Return whether an `Around` replaces the calls of ``module``."""
    return isinstance(module.__dict__.get(_PLACE), Around)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of ``module`` runs what `torch.compile` made of it."""
    inner = module.__dict__.get(_PLACE)
    if isinstance(inner, Around):
        inner = inner.inner
    return inner is not None or "_orig_mod" in module._modules


class Around:
    """Replaces a module's call; see [Note: unseen hooks]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner = module.__dict__.get(_PLACE)
        self.before: tuple[Before, ...] = ()
        self.after: tuple[After, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        run = module._call_impl if self.inner is None else self.inner
        before, after = self.before, self.after  # looked up once, so every entry has its exit
        if not after:
            for hook in before:
                hook(module, args, kwargs)
            return run(*args, **kwargs)
        try:
            for hook in before:
                hook(module, args, kwargs)
            result = run(*args, **kwargs)
        except BaseException:
            for leave in after:
                leave(module, args, None)
            raise
        for leave in after:
            leave(module, args, result)
        return result

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy as None: a copy of the module, if its class copies this at all, has no hooks."""
        return type(None), ()


class _Placed:
    def __init__(self, around: Around, hook: Any) -> None:
        self._around, self._hook = around, hook

    def remove(self) -> None:
        around = self._around
        around.before = tuple(hook for hook in around.before if hook is not self._hook)
        around.after = tuple(hook for hook in around.after if hook is not self._hook)
        place = around.module.__dict__
        if not around.before and not around.after and place.get(_PLACE) is around:
            if around.inner is None:
                del place[_PLACE]
            else:
                place[_PLACE] = around.inner


def _around(module: nn.Module) -> Around:
    if not is_around(module):
        module.__dict__[_PLACE] = Around(module)
    around: Around = module.__dict__[_PLACE]
    return around
