"""Watching operators: what each reads, writes and makes, as it runs, and room for it before.

What it is: the dispatch mode that sees every ATen call of its thread below autograd and autocast,
and the pair of hooks that stand between autograd and what it saves. What it is not: the session,
which says when calls are recorded and when there is a cap. It has to see all calls while it is on:
a write that it misses would be missing when what was made from there is made again.

[Note: writes]  A write into what a recorded operator has made begins another content (see [Note:
contents] in ``records``), and handles ask for that from then on: either autograd has counted the
write, and raises, or it has not (through ``.data``), and backward reads what is written. A root has
one record for good. So before one is written, what was made from it is made to stay. An operator
that itself writes into a small root, as batch normalization into its statistics, gets a copy of it
to be called with again. A write that goes past PyTorch, through a numpy view into what forward has
made, is not seen at all: debug mode finds it if that was dropped.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.below_modes import call_below
from dynoffload.runtime.adoption.store import bytes_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.passes.saved import Kept, is_of_a_subclass, is_plain, memory_of
from dynoffload.runtime.recompute.ledger import Ledger
from dynoffload.runtime.recompute.making import Making
from dynoffload.runtime.recompute.operators import (
    Effects,
    Sizes,
    counting_writes,
    effects_of,
    replaced,
    tensors_of,
)
from dynoffload.runtime.recompute.records import Handle, Operator, Record, View

_COPIED = 16  # a root is copied for an operator that makes so many times its bytes


class Recompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees, records and counts.

    Args:
        ledger: counts what is live.
        making: makes room, and makes again.
        kind: of the device whose memory is counted; what lies elsewhere is not dropped.

    Attributes:
        records: whether what runs may be made again: inside a forward of the managed model.
        counts: whether what runs is counted: not inside ``step()``, see the session.
        site: path of the module that ran last, for errors.
    """

    def __init__(self, ledger: Ledger, making: Making, kind: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._making, self._sizes = ledger, making, Sizes()
        self._kind = kind
        self.records = False
        self.counts = True
        self.site = ""
        self._ours = False  # what runs now was called by us
        self._process = os.getpid()

    def retire(self) -> None:
        """Do nothing any more, where another mode is in the way of leaving."""
        self._ours = True

    def end_forward(self) -> None:
        """What runs from now on is not recorded."""
        self.records = False
        self._ledger.end_forward()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._ours or os.getpid() != self._process:  # a loader's worker is a copy of this
            return call_below(func, args, kwargs)
        self._ours = True
        try:
            with counting_writes(func, args, kwargs):
                return self._run(func, args, kwargs)
        finally:
            self._ours = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        effects = effects_of(func)
        if not self.counts:
            if effects.written:
                self._before_write(_written(effects, args, kwargs))
            return call_below(func, args, kwargs)
        told = self._sizes.of(func, effects, args, kwargs)
        self._making.room(told, str(func), self.site)
        need = told or 0
        operator = self._begin(func, effects, args, kwargs, need) if self.records else None
        written = _written(effects, args, kwargs) if effects.written else []
        if written:
            self._before_write(written)
        began = time.perf_counter()
        try:
            result = (
                func(*args, **kwargs) if operator is not None else call_below(func, args, kwargs)
            )
        except BaseException:
            self._forget_contents(written)  # half of it may be written
            raise
        ended = time.perf_counter()
        if operator is not None:
            operator.seconds = ended - began
            self._record_writes(operator, written, ended)
        elif written:
            self._forget_contents(written)
        made = self._count(result, operator, ended) if effects.makes or written else 0
        if told is None:
            self._sizes.learn(func, effects, args, kwargs, made)
            if operator is not None:
                operator.need = made
        del args, kwargs
        self._making.room(0, str(func), self.site)
        return result

    # Before a call

    def _begin(
        self,
        func: Any,
        effects: Effects,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        need: int,
    ) -> Operator | None:
        """Return the record of a call, None if it cannot be followed or makes nothing."""
        if not effects.known or not (effects.makes or effects.written):
            return None
        inputs: dict[Record, None] = {}
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        if not all(_is_simple(tensor, self._kind) for tensor in tensors):
            return None
        written = dict.fromkeys(self._record_of(t) for t in _written(effects, args, kwargs))
        copies: dict[Record, Record] = {}
        for record in written:
            if record.operator is None:
                copy = self._copy_for(record, need)
                if copy is None:
                    return None
                copies[record] = copy

        def view(tensor: torch.Tensor) -> View:
            record = self._record_of(tensor)
            record = copies.get(record, record)
            inputs.setdefault(record)
            return View.of(tensor, record)

        state = _state_before(kwargs, args) if effects.draws else None
        args, kwargs = (replaced(given, view, torch.Tensor) for given in (args, kwargs))
        operator = Operator(
            func=func,
            args=args,
            kwargs=kwargs,
            inputs=tuple(inputs),
            written=tuple(copies.get(record, record) for record in written),
            state=state,
            seconds=0.0,
            need=need,
            site=self.site,
        )
        now = time.perf_counter()
        for record in inputs:
            record.used_at = now
            record.add_user(operator)
            if record.operator is None and record.kept is None:
                record.kept = record.here()
        return operator

    def _copy_for(self, record: Record, need: int) -> Record | None:
        """Return a copy of a root that is about to be written, if it is small beside ``need``."""
        storage = record.here()
        if storage is None or record.nbytes * _COPIED > need:
            return None
        copied = bytes_of(storage).clone().untyped_storage()
        self._ledger.count(copied)
        copy = self._ledger.holds(copied, Record(copied, None))
        copy.kept = copied
        return copy

    def _record_of(self, tensor: torch.Tensor) -> Record:
        """Return the record of what a tensor's storage holds now."""
        storage = tensor.untyped_storage()
        record = self._ledger.know(storage).record
        return self._ledger.holds(storage, Record(storage, None)) if record is None else record

    def _before_write(self, written: list[torch.Tensor]) -> None:
        """See [Note: writes]."""
        for tensor in written:
            if not is_plain(tensor, self._kind):
                continue
            known = self._ledger.find(tensor.untyped_storage())
            record = None if known is None else known.record
            if record is not None and record.operator is None and record.users:
                self._making.secure(record)

    # After it

    def _record_writes(self, operator: Operator, written: list[torch.Tensor], now: float) -> None:
        for tensor in written:
            storage = tensor.untyped_storage()
            known = self._ledger.find(storage)
            before = None if known is None else known.record
            if known is None or before is None or before.operator is None:
                continue  # a root has one record for good
            if before in operator.contents or before not in operator.inputs:
                continue  # two arguments that lie in one storage
            resized = storage.nbytes() != before.nbytes
            after = self._ledger.holds(storage, Record(storage, None if resized else operator))
            after.used_at = now
            before.become(after)
            if not resized:
                operator.contents[before] = weakref.ref(after)

    def _forget_contents(self, written: list[torch.Tensor]) -> None:
        """What a call that is not recorded has written is a root from now on."""
        for tensor in written:
            if is_plain(tensor, self._kind):
                known = self._ledger.find(tensor.untyped_storage())
                if known is not None and known.record is not None and known.record.operator:
                    before, storage = known.record, tensor.untyped_storage()
                    before.become(self._ledger.holds(storage, Record(storage, None)))

    def _count(self, result: Any, operator: Operator | None, now: float) -> int:
        """Count what a call has made, and return its bytes."""
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
                    ledger.count(storage)  # by its size now
                continue
            made += ledger.count(storage).nbytes
            if operator is not None:
                record = ledger.holds(storage, Record(storage, operator))
                record.used_at = now
                operator.outputs[number] = weakref.ref(record)
        return made

    # What autograd saves

    @uninterrupted
    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """Take over a tensor that autograd saves."""
        ours, self._ours = self._ours, True
        try:
            if not _is_simple(tensor, self._kind) or is_of_a_subclass(tensor):
                return Kept(tensor)
            handle = Handle(tensor, self._record_of(tensor))
            self._making.savers.add(handle.saved)
            return handle
        finally:
            self._ours = ours

    @uninterrupted
    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        """Give a saved tensor back to backward, made again if it was dropped.

        Raises:
            RuntimeError: it was modified in place since it was saved, as autograd raises.
            BudgetError: what it takes to make it again does not fit.
        """
        ours, self._ours = self._ours, True
        try:
            handle.check()
            if isinstance(handle, Kept):
                return handle.tensor
            return handle.view.over(self._making.bring(handle.saved.record))
        finally:
            self._ours = ours


def _written(effects: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes into."""
    found: list[torch.Tensor] = []
    for name, place in effects.written:
        found += tensors_of(args[place] if place < len(args) else kwargs.get(name))
    return found


def _is_simple(tensor: torch.Tensor, kind: str) -> bool:
    """Return whether a tensor is said by its storage and how it lies there, and by no more."""
    return is_plain(tensor, kind) and not tensor.is_conj() and not tensor.is_neg()


def _state_before(
    kwargs: dict[str, Any], args: tuple[Any, ...]
) -> tuple[torch.Generator, torch.Tensor]:
    """Return the generator that a call draws from, and its state now."""
    given = [one for one in (*kwargs.values(), *args) if isinstance(one, torch.Generator)]
    generator = given[0] if given else _generator_of(_place_of(kwargs, args))
    return generator, generator.get_state()


def _place_of(kwargs: dict[str, Any], args: tuple[Any, ...]) -> torch.device:
    """Return on which device a call draws: what it names, or where its tensors are."""
    named = kwargs.get("device")
    tensors = [*tensors_of(args), *tensors_of(kwargs)]
    here = tensors[0].device if tensors else torch.device("cpu")
    return here if named is None else torch.device(named)


def _generator_of(device: torch.device) -> torch.Generator:
    """Return the generator from which torch draws on a device unless it is told another."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
