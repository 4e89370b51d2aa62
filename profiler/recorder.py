"""Records a user's training loop and makes a trace of each step.

`Recorder` is a context manager around the loop. It sees every ATen operator of forward, backward
and optimizer through a dispatch mode, module calls through hooks, and the end of a step through the
optimizer's hooks. It runs each operator once, as it was called, and keeps no tensor alive. Results
are unchanged, except for operators that torch computes differently under any dispatch mode
(docs/limits.md).

Known limitations. Operators inside a compiled region are not recorded individually. A module whose
``forward`` is called directly skips its hooks and counts as part of its caller. Backward operators
have sites only if their forward ran in the thread that entered the recorder. On an accelerator an
operator's seconds are those of its launch. Higher-order operators run but are not recorded. A model
pickled whole inside the block would contain the hooks; save its state_dict instead.

[Note: what a step is]
A step begins with the first call, in grad mode, of the model, or of one of its modules outside any
other call. With an optimizer it ends after ``optimizer.step()``, so several calls before it
(gradient accumulation) are one step. Without one it ends where the next call of the model begins,
or with the block. Calls without grad mode (evaluation, sampling) are never recorded. With an
optimizer, operators that no ``step()`` follows before the block ends are dropped. So is a step that
an exception interrupts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dynoffload.around import Handle, after_call, before_call, choosing
from dynoffload.below_modes import call_below
from dynoffload.errors import TraceError
from dynoffload.profiler.experts import experts_hit, slices_in
from dynoffload.profiler.input_features import Features, describe_input
from dynoffload.profiler.network import fingerprint, shape_key
from dynoffload.profiler.routing import RoutingProbe, hinted, probes_of
from dynoffload.profiler.signatures import signature_of
from dynoffload.profiler.steps import StepLog
from dynoffload.profiler.trace import Phase, Trace

logger = logging.getLogger(__name__)

_graph_task = torch._C._current_graph_task_id
_graph_node = torch._C._current_autograd_node
_NO_NUMBER = 2**64 - 1  # Sequence number of nodes that accumulate gradients.
_aten = torch.ops.aten
# Operators of such a node: it keeps the gradient, adds in place or out of place, or copies.
_ACCUMULATING = frozenset(
    (
        _aten.detach.default,
        _aten.add_.Tensor,
        _aten.add.Tensor,
        _aten.clone.default,
        _aten.new_empty_strided.default,
    )
)


class _Frame(NamedTuple):
    """A module call in progress."""

    module: int  # id of the module.
    call: int  # Index of its forward call, -1 if it is not recorded.
    in_backward: bool  # Run again by backward (checkpointing).


class Recorder:
    """Records each training step that runs inside its block.

    Args:
        model: the network; its root call marks a sample.
        optimizer: the optimizer whose ``step()`` ends a step; see [Note: what a step is].
        features: featurizer for samples, as in `describe_input`.
        routing_probes: the user's, as in `probes_of`.
        on_step: called with the trace of each step, after it.
        source: called at the start of each step; returns the file or document of its sample.
        clock: returns seconds. The default is wall-clock time. On a shared machine, with one
            compute thread, `time.thread_time` counts only the seconds this thread had a core.

    Example:
        with Recorder(model, optimizer, on_step=traces.append):
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        features: Features | None = None,
        routing_probes: Sequence[RoutingProbe] | None = None,
        on_step: Callable[[Trace], None],
        source: Callable[[], str] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.features, self._given = features, routing_probes
        self.on_step = on_step
        self.source = source
        self._clock = clock
        self._mode = _Mode(self._dispatch)
        self._handles: list[Handle] = []
        self._probes: dict[str, tuple[RoutingProbe, ...]] = {}
        self._network = ""
        self._thread = 0
        self._steps = 0
        self._entered = False
        self._forget()

    def _forget(self) -> None:
        """Reset the state to that outside any block."""
        self._paths: dict[int, str] = {}  # id of a module -> its path
        self._parameters: dict[int, str] = {}  # id of a parameter -> its name
        self._log: StepLog | None = None  # The step in progress.
        self._stack: list[_Frame] = []
        self._suspended = False  # During an outermost call without grad mode.
        self._in_optimizer = False
        self._backward_seen = False
        self._after_backward = False  # Whether, since then, an operator ran outside the optimizer.
        self._paused = False  # While a featurizer or routing probe runs.

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """Return itself, so that hooks in a copy of the model share this recorder.

        Modules of such a copy are not managed and are ignored.
        """
        return self

    def __enter__(self) -> Recorder:
        """Start recording.

        Raises:
            TraceError: if this recorder is already in use.
        """
        if self._entered:
            raise TraceError("this Recorder is already in use; make one for each block")
        self._entered = True
        self._thread = threading.get_ident()
        self._network = fingerprint(self.model)
        self._probes = probes_of(self.model, self._given)
        unseen = choosing(self.model)
        for path, module in self.model.named_modules():
            self._paths[id(module)] = path
            self._handles.append(before_call(module, self._enter, unseen, first=True))
            self._handles.append(after_call(module, self._leave, unseen))
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self._before_optimizer))
            self._handles.append(self.optimizer.register_step_post_hook(self._after_optimizer))
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop recording; [Note: what a step is] says what happens to the last step."""
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if kind is None and self.optimizer is None:
            self._end_step()
        elif self._log is not None:
            logger.info("a step of %d operators did not end and is dropped", len(self._log))
        self._forget()
        self._entered = False

    # Operators ------------------------------------------------------------------------------

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        log = self._log
        if (
            log is None
            or self._paused
            or self._suspended
            or not isinstance(func, torch._ops.OpOverload)
        ):
            return call_below(func, args, kwargs)
        clock = self._clock
        start = clock()
        result = call_below(func, args, kwargs)
        seconds = clock() - start
        if func.namespace != "profiler":
            node = _graph_node() if _graph_task() != -1 else None
            phase, call = self._place(log, node)
            log.record(signature_of(func), phase, call, args, kwargs, result, seconds)
            if node is not None and func in _ACCUMULATING and node._sequence_nr() == _NO_NUMBER:
                self.note_gradient(getattr(node, "variable", None), result)
        return result

    def _place(self, log: StepLog, node: Any) -> tuple[Phase, int]:
        """Return the phase of the current operator and the module call it belongs to."""
        stack = self._stack
        if node is not None:
            self._backward_seen = True
            if self._after_backward:
                self._after_backward = False
                log.reopen()
            if stack and stack[-1].in_backward:
                return Phase.BACKWARD, stack[-1].call
            call = self._call_of(log, node)
            if torch.is_grad_enabled():  # create_graph: a later backward may run through it.
                log.cut_within_backward(call)
            return Phase.BACKWARD, call
        if stack:
            return Phase.FORWARD, stack[-1].call
        if self._in_optimizer:
            return Phase.OPTIMIZER, -1
        if self._backward_seen:
            self._after_backward = True
            return Phase.OPTIMIZER, -1
        return Phase.FORWARD, -1

    def _call_of(self, log: StepLog, node: Any) -> int:
        sequence = node._sequence_nr()
        if sequence != _NO_NUMBER:
            return log.call_of_node(sequence)
        name = self._parameters.get(id(getattr(node, "variable", None)))
        return -1 if name is None else log.last_call_of(name.rpartition(".")[0])

    def note_gradient(
        self, parameter: torch.Tensor | None, gradient: torch.Tensor | None = None
    ) -> None:
        """Label the gradient of ``parameter`` (default: its ``grad``), which may be freed before
        the step ends. A gradient of another shape was made by a user hook and is ignored."""
        name = self._parameters.get(id(parameter))
        if self._log is None or name is None or parameter is None:
            return
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None and gradient.shape == parameter.shape:
            self._log.regions.label(gradient, f"{name}:grad", "gradient")

    # Module calls ---------------------------------------------------------------------------

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        path = self._paths.get(id(module))
        in_backward = _graph_task() != -1
        here = in_backward or threading.get_ident() == self._thread
        if path is None or self._paused or not here:
            return
        call = -1
        if not self._suspended:
            if not self._stack and not in_backward:
                self._begin_sample(module, args, kwargs)
            log = self._log
            if log is not None and not self._suspended:
                outer = self._stack[-1].call if self._stack else -1
                if in_backward:
                    node = _graph_node()
                    if not (self._stack and self._stack[-1].in_backward) and node is not None:
                        outer = self._call_of(log, node)
                    call = log.recomputed(path, outer)
                    log.cut(call)
                else:
                    call = log.enter(path, shape_key(args, kwargs), outer)
                    self._look_ahead(log, call, module, args, kwargs)
        self._stack.append(_Frame(id(module), call, in_backward))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        stack = self._stack
        if self._paused or not any(frame.module == id(module) for frame in reversed(stack)):
            return
        while stack:  # Frames above it belong to calls that an exception ended.
            frame = stack.pop()
            if self._log is not None and frame.call >= 0:
                outer = stack[-1].call if stack else -1
                if frame.in_backward:
                    self._log.cut(outer)
                else:
                    self._log.leave(frame.call, outer)
            if frame.module == id(module):
                break
        if not stack:
            self._suspended = False

    def _look_ahead(self, log: StepLog, call: int, module: Any, args: Any, kwargs: Any) -> None:
        """Record what a call says of experts, before it runs: its hints, and those it will run."""
        path, slices = self._paths[id(module)], slices_in(module)
        self._paused = True
        try:
            with _disable_current_modes():  # the user's, such as that of selective checkpointing
                log.hints += hinted(self._probes, path, args, call)
                hit = experts_hit(module, args, kwargs) if slices else None
        finally:
            self._paused = False
        if hit is not None:
            log.run_experts(call, hit)
            log.slices.update((f"{path}.{name}", count) for name, count in slices.items())

    # Steps ----------------------------------------------------------------------------------

    def _begin_sample(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a step or its next sample; suspend recording if grad mode is off."""
        if not torch.is_grad_enabled():
            self._suspended = True
            return
        is_root = module is self.model
        if is_root and self.optimizer is None:
            self._end_step()
        if self._log is None:
            self._log = StepLog()
            self._label_tensors(self._log)
            self._log.source = "" if self.source is None else self.source()
        elif self._after_backward:
            self._log.reopen()
        self._backward_seen = self._after_backward = False
        if is_root or not self._log.samples:
            features = self.features if is_root else None
            self._paused = True
            try:
                with torch.no_grad():
                    sample = describe_input(module, args, kwargs, features)
            finally:
                self._paused = False
            self._log.samples.append(sample)

    def _end_step(self) -> None:
        log, self._log = self._log, None
        if log is None or not len(log):
            return
        self._label_tensors(log)
        trace = log.finish(self._network, type(self.model).__qualname__, self._steps)
        self._steps += 1
        self.on_step(trace)

    def _before_optimizer(self, *_: Any) -> None:
        self._in_optimizer = True
        self._after_backward = False
        if self._log is not None:
            self._label_tensors(self._log)

    def _after_optimizer(self, *_: Any) -> None:
        self._in_optimizer = False
        self._end_step()

    def _label_tensors(self, log: StepLog) -> None:
        """Label the current storages of parameters, buffers, gradients and optimizer state.

        Runs at both ends of a step and before the optimizer: parameters may have been replaced,
        and the first ``step()`` creates the state.
        """
        regions = log.regions
        self._parameters.clear()
        state: Mapping[torch.Tensor, Any] = {} if self.optimizer is None else self.optimizer.state
        for name, parameter in self.model.named_parameters():
            self._parameters[id(parameter)] = name
            regions.label(parameter, name, "parameter")
            if parameter.grad is not None:
                regions.label(parameter.grad, f"{name}:grad", "gradient")
            for key, tensor in _named_tensors(state.get(parameter)):
                regions.label(tensor, f"{name}:{key}", "state")
        for name, buffer in self.model.named_buffers():
            regions.label(buffer, name, "buffer")


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operator to the recorder."""

    supports_higher_order_operators = True

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._handle(func, args, kwargs or {})


def _named_tensors(state: object, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in one parameter's optimizer state, with their dotted keys."""
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, Mapping):
        for name, value in state.items():
            yield from _named_tensors(value, f"{key}.{name}" if key else str(name))
    elif isinstance(state, list | tuple):
        for position, value in enumerate(state):
            yield from _named_tensors(value, f"{key}.{position}" if key else str(position))
