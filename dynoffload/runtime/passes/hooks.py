"""Where the step is: the hooks on modules, parameters and saved tensors.

They report and never decide. The root's hooks open and close a sample and hold the saved-tensor
hooks in place for the time between; a unit's hook comes before its forward.

[Note: copies of hooks]  Modules carry their hooks into what is copied or pickled of them. Ours are
`Hook` objects, of which a copy does nothing: a copied model is a plain one.

[Note: compiled models]  `torch.compile` would trace hooks, and compile what they call. A root's
hooks are called outside of what is compiled, on both its sides; a unit's do nothing there: what a
compiled forward reads is fetched as it is touched. `torch.export` runs a model on tensors without
bytes: there is nothing to page, and all hooks do nothing.

[Note: removed hooks]  A call of a module looks its hooks up before it runs them. One that an
earlier hook of the same call removes still runs: so `Hook.end` makes it do nothing.

[Note: threads]  Any thread may call the root, but one at a time: what runs next is one order, and
hooks on saved tensors are a thread's own. A call that comes while another thread's is on its stack
is refused before it changes anything.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dynoffload.errors import ThreadError
from dynoffload.runtime.adoption.fused import Fused
from dynoffload.runtime.adoption.store import Slot
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.passes.activations import Activations

logger = logging.getLogger(__name__)

_Owner = TypeVar("_Owner")


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
        self._call, self._on_copy, self._compiled = call, on_copy, compiled

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return None
            return _outside(self, args) if self._compiled else None
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


class _OfThread(threading.local):
    """The saved-tensor hooks of one session at work in this thread, or None."""

    saving: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self, activations: Activations) -> None:
        self.saving = torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack)
        self.saving.__enter__()

    def end(self) -> None:
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saving = None


class Hooks:
    """Installs and removes one session's hooks.

    Args:
        model: the root.
        units: modules to watch.
        slots: parameters whose gradients are adopted.
        fused: those that are paged by slices.
        activations: its hooks are active during a training forward of the root; None for none.
        on_begin: called with the root's inputs when a training forward begins.
        on_end: called when it has ended.
        on_visit: called with a unit before its forward, in training or not.
        on_gradient: called with a slot when its gradient is complete for this backward.
        on_fused: called with a fused parameter then.
        on_read: called before the whole of the model, or of a module, is read.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        slots: Sequence[Slot],
        fused: Sequence[Fused],
        activations: Activations | None,
        *,
        on_begin: Callable[[tuple[Any, ...], dict[str, Any]], None],
        on_end: Callable[[], None],
        on_visit: Callable[[Unit], None],
        on_gradient: Callable[[Slot], None],
        on_fused: Callable[[Fused], None],
        on_read: Callable[[], None],
    ) -> None:
        self._activations = activations
        self._on_begin, self._on_end = on_begin, on_end
        self._depth = 0
        self._warned = False
        self._frame: FrameType | None = None  # that calls the root
        self._thread = 0  # in which it does
        self._claiming = threading.Lock()
        self._of_thread = _OfThread()
        enter = Hook(self.enter, on_read, compiled=True)
        self._hooks = [enter]
        leave = Hook(self._leave, compiled=True)
        handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        read = Hook(lambda module, prefix, keep_vars: on_read())
        for inner in model.modules():
            handles.append(inner.register_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
        for unit in units:
            if unit.number is not None:
                continue  # its uses are told otherwise: see `Parts`
            visit = Hook(_visitor(unit, on_visit), on_read)
            self._hooks.append(visit)
            handles.append(unit.module.register_forward_pre_hook(visit))
        collectors = [(slot.parameter, _collector(slot, on_gradient)) for slot in slots]
        collectors += [(one.parameter, _collector(one, on_fused)) for one in fused]
        for parameter, collect in collectors:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
                handles.append(handle)
        self._handles = handles

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a sample, unless the root is called by itself.

        Raises:
            ThreadError: another thread is in a call of the root.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__package__") == __package__:
            frame = frame.f_back
        self._claim(frame)
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        self._on_begin(args, kwargs)
        if self._activations is None:
            return
        if not _hooks_of_others():
            self._of_thread.begin(self._activations)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "the model is called where saved-tensor hooks are disabled, or others are at work: "
                "what autograd saves there is neither moved nor counted"
            )

    def _claim(self, frame: FrameType | None) -> None:
        """Count a call of the root that ``frame`` makes in this thread; see [Note: threads]."""
        thread = threading.get_ident()
        with self._claiming:
            if self._depth:
                inner = frame if thread == self._thread else sys._current_frames().get(self._thread)
                if not _runs(self._frame, inner):
                    self._depth = 0  # an interrupt tore the last call down: nobody called `_leave`
                elif thread != self._thread:
                    raise ThreadError(
                        "two threads call the model at once, and under offload() one may at a "
                        "time: hold a threading.Lock around each forward, with its backward and "
                        "step"
                    )
            if not self._depth:
                self._frame, self._thread = frame, thread
                self._of_thread.end()  # of a call that was torn down in this thread
            self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._thread != threading.get_ident():
            return  # its call was refused
        self._depth -= 1
        if self._depth:
            return
        error = sys.exc_info()[1]
        if self._of_thread.saving is not None and "saved tensor hooks" in str(error):
            assert error is not None
            error.add_note(
                "dynoffload: what autograd saves is paged by such hooks; pass "
                "config={'page_activations': False} to offload(), which leaves it in memory"
            )
        self._abandon()
        if torch.is_grad_enabled():
            self._on_end()

    @property
    def inside(self) -> bool:
        """Whether a call of the root runs."""
        return self._depth > 0

    def _abandon(self) -> None:
        self._depth, self._frame = 0, None
        self._of_thread.end()

    def remove(self) -> None:
        """Take all hooks off."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()
        self._abandon()


def _hooks_of_others() -> bool:
    """Return whether saved-tensor hooks of the user's are at work, or all are disabled."""
    autograd = torch._C._autograd
    return (
        not autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or autograd._top_saved_tensors_default_hooks(True) is not None
    )


def _runs(frame: FrameType | None, inner: FrameType | None) -> bool:
    """Return whether ``frame`` is ``inner`` or one that called it, however indirectly."""
    while inner is not None:
        if inner is frame:
            return True
        inner = inner.f_back
    return False


def _visitor(unit: Unit, on_visit: Callable[[Unit], None]) -> Callable[[nn.Module, Any], None]:
    def visit(module: nn.Module, args: Any) -> None:
        on_visit(unit)

    return visit


def _collector(owner: _Owner, on_gradient: Callable[[_Owner], None]) -> Callable[[Any], None]:
    def collect(parameter: torch.Tensor) -> None:
        on_gradient(owner)

    return collect
