"""DTR: a block that stays within its budget by dropping activations and recomputing them.

As published, parameters, gradients and optimizer state stay in memory; a budget that does not hold
them is refused. It counts the model's tensors and every tensor that an operator returns in the
block's thread. Temporaries of operators and of the optimizer's step are headroom. Only tensors that
autograd saves in forward, without other references, are dropped.

[Note: writes]  In-place operators are not recorded; the storage they wrote becomes a root (see
[Note: contents] in ``recomputation``). An operator's result can be recomputed with the content from
before the write, a root cannot. So results made from a root are pinned before it is written.

[Note: sizes]  The operator's meta kernel gives its output size, once for each set of shapes. If
shapes depend on values, it is the size of the first argument. Without a meta kernel, the first call
gives the size. If an output is larger than expected, room is made afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from dynoffload.errors import BudgetError
from dynoffload.experiments.baselines.recomputation import (
    Ledger,
    Making,
    Operator,
    Record,
    Saved,
    View,
)
from dynoffload.runtime import counting
from dynoffload.runtime.operators import effects_of, replaced, tensors_of
from dynoffload.runtime.passes.saved import is_of_a_subclass, is_plain, memory_of
from dynoffload.telemetry import RunLog, StepStats
from dynoffload.units import format_bytes

Handle = tuple[Saved, View]
"""What autograd holds in place of a saved tensor."""


class Recompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees every ATen call below autograd and autocast: records and counts it.

    Args:
        ledger: counts live bytes.
        making: drops and recomputes.
        device: of the model; tensors elsewhere are neither counted nor dropped.

    Attributes:
        records: whether calls are recorded for recomputation: inside a forward of the model.
        counts: whether calls are counted: outside ``step()``.
    """

    def __init__(self, ledger: Ledger, making: Making, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._making, self._kind = ledger, making, device.type
        self._generator = torch.default_generator
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            self._generator = module.default_generators[device.index or 0]
        self._sizes: dict[Any, int] = {}
        self.records = False
        self.counts = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if not self.counts:
            self._before_write(written)
            return func(*args, **kwargs)
        allocates, key = _allocates(func), (func, *map(_signature, tree_leaves((args, kwargs))))
        need = self._need(func, args, kwargs, key) if allocates else 0
        self._making.room(need)
        operator = None
        if self.records and allocates and not written:
            operator = self._begin(func, args, kwargs, need)
        self._before_write(written)
        began = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            ended = time.perf_counter()
            self._after_write(written)  # even after a failure: the write may be partial
        if operator is not None:
            operator.seconds = ended - began
        made = self._count(result, operator, ended) if allocates or written else 0
        if made > need:
            self._sizes[key] = made
            if operator is not None:
                operator.need = made
        del args, kwargs
        self._making.room(0)
        return result

    def _need(self, func: Any, args: Any, kwargs: Any, key: Any) -> int:
        """Return the bytes that a call will allocate; see [Note: sizes]."""
        if func is torch.ops.aten.nonzero.default:  # upper bound: an index for each dimension
            return int(8 * args[0].numel() * args[0].dim())
        if torch.Tag.dynamic_output_shape in func.tags or func is torch.ops.aten.index.Tensor:
            return int(args[0].nbytes)
        if key not in self._sizes:
            self._sizes[key] = _meta_bytes(func, args, kwargs)
        return self._sizes[key]

    def _begin(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], need: int
    ) -> Operator | None:
        """Return the record of a call, None if it cannot be recorded."""
        effects = effects_of(func)
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        if not effects.known or not all(map(self._is_simple, tensors)):
            return None
        inputs: dict[Record, None] = {}

        def view(tensor: Tensor) -> View:
            record = self._record_of(tensor)
            inputs.setdefault(record)
            return View.of(tensor, record)

        state = None
        if effects.draws:
            given = (one for one in (*kwargs.values(), *args) if isinstance(one, torch.Generator))
            generator = next(given, self._generator)
            state = generator, generator.get_state()
        args, kwargs = (replaced(given, view, Tensor) for given in (args, kwargs))
        operator = Operator(func, args, kwargs, tuple(inputs), state, need)
        now = time.perf_counter()
        for record in inputs:
            record.used_at = now
            record.users.add(operator)
            if record.operator is None and record.kept is None:
                record.kept = record.here()
        return operator

    def _record_of(self, tensor: Tensor) -> Record:
        """Return the record of a storage's current content."""
        storage = tensor.untyped_storage()
        record = self._ledger.know(storage).record
        return self._ledger.holds(storage, Record(storage, None)) if record is None else record

    def _known(self, written: list[Tensor]) -> Iterator[tuple[Tensor, Record]]:
        """Yield each tensor whose content has a record, with that record."""
        for tensor in written:
            if is_plain(tensor, self._kind):
                known = self._ledger.find(tensor.untyped_storage())
                if known is not None and known.record is not None:
                    yield tensor, known.record

    def _before_write(self, written: list[Tensor]) -> None:
        """Pin the results of written roots; see [Note: writes]."""
        for _, record in self._known(written):
            if record.operator is None and len(record.users):
                self._making.secure(record)

    def _after_write(self, written: list[Tensor]) -> None:
        """Make the written storages roots; see [Note: writes]."""
        for tensor, before in self._known(written):
            if before.operator is not None:
                storage = tensor.untyped_storage()
                before.become(self._ledger.holds(storage, Record(storage, None)))

    def _count(self, result: Any, operator: Operator | None, now: float) -> int:
        """Count the storages that a call has allocated, and return their bytes."""
        ledger = self._ledger
        made = 0
        for number, tensor in enumerate(tensors_of(result)):
            if not is_plain(tensor, self._kind):
                for storage in memory_of(tensor, self._kind)[0]:
                    ledger.count(storage)
                continue
            storage = tensor.untyped_storage()
            known = ledger.find(storage)
            if known is not None:
                if known.nbytes:
                    ledger.count(storage)  # its size may have changed
                continue
            made += ledger.count(storage).nbytes
            if operator is not None:
                record = ledger.holds(storage, Record(storage, operator))
                record.used_at = now
                operator.outputs[number] = weakref.ref(record)
        return made

    def _is_simple(self, tensor: Tensor) -> bool:
        """Return whether storage, dtype, offset, size and stride describe the tensor completely."""
        return is_plain(tensor, self._kind) and not tensor.is_conj() and not tensor.is_neg()

    def pack(self, tensor: Tensor) -> Handle | Tensor:
        """Return a handle for a saved tensor, or the detached tensor if it cannot be recorded."""
        with _disable_current_modes():
            if not self._is_simple(tensor) or is_of_a_subclass(tensor):
                return tensor.detach()
            record = self._record_of(tensor)
            saved = record.save(tensor.untyped_storage())
            self._making.savers.add(saved)
            return saved, View.of(tensor, record)

    def unpack(self, handle: Handle | Tensor) -> Tensor:
        """Return a saved tensor to backward, recomputed if it was dropped.

        Raises:
            BudgetError: its recomputation does not fit.
        """
        if isinstance(handle, Tensor):
            return handle
        saved, view = handle
        with _disable_current_modes():
            return view.over(self._making.bring(saved.record))


@functools.cache
def _allocates(func: Any) -> bool:
    """Return whether an overload can return newly allocated memory."""
    returns = [one for one in func._schema.returns if "Tensor" in str(one.type)]
    return any(one.alias_info is None for one in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    found: list[Tensor] = []
    for name, place in effects_of(func).written:
        found += tensors_of(args[place] if place < len(args) else kwargs.get(name))
    return found


def _signature(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return value.dtype, value.size(), value.stride()
    return type(value), str(value)


def _meta_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that the meta kernel allocates, 0 without one."""
    given: set[int] = set()

    def meta(one: Any) -> Any:
        if isinstance(one, torch.Generator):
            return None
        if isinstance(one, torch.device):
            return torch.device("meta")
        if not isinstance(one, Tensor):
            return one
        twin = torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")
        given.add(twin.untyped_storage()._cdata)
        return twin

    with contextlib.suppress(Exception), torch.no_grad():
        args, kwargs = tree_map(meta, (args, kwargs))
        made = list(tensors_of(func(*args, **kwargs)))
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in made}
        return sum(one.nbytes() for address, one in storages.items() if address not in given)
    return 0


@contextlib.contextmanager
def recomputing(model: nn.Module, optimizer: Optimizer, budget: int) -> Iterator[Recomputation]:
    """Train ``model`` under ``budget`` by recomputation; its weights must exist.

    Raises:
        BudgetError: parameters, gradients, optimizer state and buffers alone do not fit.
    """
    need = counting.whole_bytes(model, optimizer)
    if need > budget:
        raise BudgetError(
            "dtr moves nothing: parameters, gradients, optimizer state and buffers of this "
            f"{type(model).__name__} take {format_bytes(need)}, and the budget is "
            f"{format_bytes(budget)}: raise it"
        )
    session = Recomputation(model, optimizer, budget)
    handles = [
        model.register_forward_pre_hook(session.before_forward),
        model.register_forward_hook(session.after_forward, always_call=True),
        optimizer.register_step_pre_hook(session.before_step),
        optimizer.register_step_post_hook(session.after_step),
    ]
    try:
        with session.mode:
            yield session
    finally:
        for handle in handles:
            handle.remove()


class Recomputation:
    """Session of a model whose activations are dropped and recomputed to fit the budget.

    Attributes:
        log: seconds and peak of each step.
        ledger, making: live bytes, and the recomputations.
        mode: sees every operator; active in the block.
    """

    backend, paging, sizing = "recompute", False, None

    def __init__(self, model: nn.Module, optimizer: Optimizer, budget: int) -> None:
        self._both = model, optimizer
        self.log = RunLog(type(model).__name__, self.backend, "dtr", budget=budget, headroom=0)
        self.ledger = Ledger()
        self.making = Making(self.ledger, budget)
        self.mode = Recompute(self.ledger, self.making, next(model.parameters()).device)
        self._saving = torch.autograd.graph.saved_tensors_hooks(self.mode.pack, self.mode.unpack)
        self._began = time.perf_counter()
        self._count_states()

    def before_forward(self, *_: Any) -> None:
        """Begin to record."""
        self.mode.records = torch.is_grad_enabled()
        self._saving.__enter__()

    def after_forward(self, *_: Any) -> None:
        """End recording."""
        self._saving.__exit__(None, None, None)
        self.mode.records = False
        self.ledger.end_forward()

    def before_step(self, *_: Any) -> None:
        """Make room for the state that the optimizer will allocate."""
        need = counting.whole_bytes(*self._both) - counting.ordinary_bytes(*self._both)
        parameters = self._both[0].parameters()
        absent = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        self.making.room(max(0, need - absent))
        self.mode.counts = False

    def after_step(self, *_: Any) -> None:
        """Count the optimizer's state and log the step."""
        self.mode.counts = True
        self._count_states()
        now = time.perf_counter()
        moved = dict.fromkeys(("stalls", "bytes_in", "bytes_out", "prefetched_bytes"), 0)
        wasted = dict.fromkeys(("used_bytes", "wasted_bytes"), 0)
        self.log.steps.append(
            StepStats(
                step=len(self.log.steps),
                seconds=now - self._began,
                stall_s=0.0,
                accuracy=math.nan,
                peak_fast_bytes=self.ledger.take_peak(),
                **moved,
                **wasted,
            )
        )
        self._began = now

    def _count_states(self) -> None:
        for tensor in counting.tensors_of(*self._both):
            self.ledger.count(tensor.untyped_storage())
