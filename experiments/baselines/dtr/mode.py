"""Watching operators: what each reads, writes and makes, as it runs, and room for it before.

The dispatch mode sees every ATen call of its thread below autograd and autocast; `pack` and
`unpack` stand between autograd and what it saves.

[Note: writes]  An operator that writes in place is not recorded, and what it has written is a root
(see [Note: contents] in ``records``). What was made by an operator can be made again with the
content before. A root cannot: before it is written, what was made from it is made to stay.

[Note: sizes]  An operator's own meta kernel says what it will make, once for each set of shapes.
Where shapes depend on values, the bytes of the first argument are taken. What has no meta kernel is
known from its first call on. What comes out larger has room made after it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.experiments.baselines.dtr.making import Making
from dynoffload.experiments.baselines.dtr.records import Ledger, Operator, Record, Saved, View
from dynoffload.runtime.operators import effects_of, replaced, tensors_of
from dynoffload.runtime.passes.saved import is_of_a_subclass, is_plain, memory_of

_MOST_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class Handle:
    """What autograd holds in place of a saved tensor."""

    saved: Saved
    view: View


class Recompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees, records and counts.

    Args:
        ledger: counts what is live.
        making: makes room, and makes again.
        kind: of the device whose memory is counted; what lies elsewhere is not dropped.

    Attributes:
        records: whether what runs may be made again: inside a forward of the model.
        counts: whether what runs is counted: not inside ``step()``.
    """

    def __init__(self, ledger: Ledger, making: Making, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._making, self._kind = ledger, making, kind
        self._sizes: dict[Any, int] = {}
        self.records = False
        self.counts = True
        self._ours = False  # what runs now was called by us

    def end_forward(self) -> None:
        """What runs from now on is not recorded."""
        self.records = False
        self._ledger.end_forward()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._ours:
            return func(*args, **kwargs)
        self._ours = True
        try:
            return self._run(func, args, kwargs)
        finally:
            self._ours = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(func, args, kwargs)
        if not self.counts:
            self._before_write(written)
            return func(*args, **kwargs)
        makes, key = _makes(func), _key(func, args, kwargs)
        need = self._need(func, args, kwargs, key) if makes else 0
        self._making.room(need)
        operator = None
        if self.records and makes and not written:
            operator = self._begin(func, args, kwargs, need)
        self._before_write(written)
        began = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self._after_write(written)  # half of it may be written
            raise
        ended = time.perf_counter()
        self._after_write(written)
        if operator is not None:
            operator.seconds = ended - began
        made = self._count(result, operator, ended) if makes or written else 0
        if made > need:
            self._sizes[key] = made
            if operator is not None:
                operator.need = made
        del args, kwargs
        self._making.room(0)
        return result

    # Before a call

    def _need(self, func: Any, args: Any, kwargs: Any, key: Any) -> int:
        """Return the bytes that a call will make; see [Note: sizes]."""
        if torch.Tag.dynamic_output_shape in func.tags or func is torch.ops.aten.index.Tensor:
            return int(args[0].nbytes)
        if key not in self._sizes:
            if len(self._sizes) >= _MOST_SHAPES:
                self._sizes.clear()
            self._sizes[key] = _asked(func, args, kwargs)
        return self._sizes[key]

    def _begin(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        need: int,
    ) -> Operator | None:
        """Return the record of a call, None if it cannot be followed."""
        effects = effects_of(func)
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        if not effects.known or not all(_is_simple(one, self._kind) for one in tensors):
            return None
        inputs: dict[Record, None] = {}

        def view(tensor: torch.Tensor) -> View:
            record = self._record_of(tensor)
            inputs.setdefault(record)
            return View.of(tensor, record)

        state = _state_before(kwargs, args) if effects.draws else None
        args, kwargs = (replaced(given, view, torch.Tensor) for given in (args, kwargs))
        operator = Operator(func, args, kwargs, tuple(inputs), state, need)
        now = time.perf_counter()
        for record in inputs:
            record.used_at = now
            record.add_user(operator)
            if record.operator is None and record.kept is None:
                record.kept = record.here()
        return operator

    def _record_of(self, tensor: torch.Tensor) -> Record:
        """Return the record of what a tensor's storage holds now."""
        storage = tensor.untyped_storage()
        record = self._ledger.know(storage).record
        return self._ledger.holds(storage, Record(storage, None)) if record is None else record

    def _known(self, tensor: torch.Tensor) -> Record | None:
        known = self._ledger.find(tensor.untyped_storage())
        return None if known is None else known.record

    def _before_write(self, written: list[torch.Tensor]) -> None:
        """See [Note: writes]."""
        for tensor in written:
            if is_plain(tensor, self._kind):
                record = self._known(tensor)
                if record is not None and record.operator is None and record.users:
                    self._making.secure(record)

    # After it

    def _after_write(self, written: list[torch.Tensor]) -> None:
        """What a call has written is a root from now on."""
        for tensor in written:
            if is_plain(tensor, self._kind):
                before, storage = self._known(tensor), tensor.untyped_storage()
                if before is not None and before.operator is not None:
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

    def pack(self, tensor: torch.Tensor) -> Handle | torch.Tensor:
        """Take over a tensor that autograd saves; one that cannot be followed stays."""
        ours, self._ours = self._ours, True
        try:
            if not _is_simple(tensor, self._kind) or is_of_a_subclass(tensor):
                return tensor.detach()
            record = self._record_of(tensor)
            handle = Handle(record.save(tensor.untyped_storage()), View.of(tensor, record))
            self._making.savers.add(handle.saved)
            return handle
        finally:
            self._ours = ours

    def unpack(self, handle: Handle | torch.Tensor) -> torch.Tensor:
        """Give a saved tensor back to backward, made again if it was dropped.

        Raises:
            BudgetError: what it takes to make it again does not fit.
        """
        if isinstance(handle, torch.Tensor):
            return handle
        ours, self._ours = self._ours, True
        try:
            return handle.view.over(self._making.bring(handle.saved.record))
        finally:
            self._ours = ours


@functools.cache
def _makes(func: Any) -> bool:
    """Return whether an overload can return memory of its own."""
    returns = [one for one in func._schema.returns if "Tensor" in str(one.type)]
    return any(one.alias_info is None for one in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes into."""
    found: list[torch.Tensor] = []
    for name, place in effects_of(func).written:
        found += tensors_of(args[place] if place < len(args) else kwargs.get(name))
    return found


def _is_simple(tensor: torch.Tensor, kind: str) -> bool:
    """Return whether a tensor is said by its storage and how it lies there, and by no more."""
    return is_plain(tensor, kind) and not tensor.is_conj() and not tensor.is_neg()


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (func, _described(args), _described(tuple(kwargs.items())))


def _described(values: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.size(), value.stride()))
        elif isinstance(value, list | tuple):
            found.append(_described(value))
        else:
            found.append((type(value), str(value)))
    return tuple(found)


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that the meta kernel makes, 0 if there is none."""
    given: set[int] = set()

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        given.add(twin.untyped_storage()._cdata)
        return twin

    with contextlib.suppress(Exception), torch.no_grad():
        args, kwargs = (replaced(one, meta, torch.Tensor) for one in (args, kwargs))
        args, kwargs = (
            replaced(one, lambda _: torch.device("meta"), torch.device) for one in (args, kwargs)
        )
        args, kwargs = (replaced(one, lambda _: None, torch.Generator) for one in (args, kwargs))
        made = list(tensors_of(func(*args, **kwargs)))
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in made}
        return sum(one.nbytes() for address, one in storages.items() if address not in given)
    return 0


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
