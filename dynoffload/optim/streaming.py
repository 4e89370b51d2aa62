"""Updates on the accelerator, through which masters and moments are streamed tile by tile.

What it is: the other place for a step, where the link is wide and the host's cores are few. A tile
is copied in while the one before is updated and the one before that is copied out, through a few
slots that have memory of the accelerator during ``step()`` alone. Gradients stay where they are
until then. What it is not: the paging of a session, which keeps as much of an optimizer's state as
its budget holds.

The moments waited for are those of the device of a session; see [Note: moments] in
`dynoffload.memory.accelerator.residents`: a copy in comes after the slot's memory was given and
the copy out before it has ended, an update after its copy in, a copy out after its update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.queues import Moment, Queues
from dynoffload.optim.departures import like_parameter
from dynoffload.optim.rules import Part, Rule
from dynoffload.optim.shelves import MASTER, flat
from dynoffload.optim.staging import Lease
from dynoffload.optim.stores import Stores
from dynoffload.optim.work import Work, count, mark_uploaded
from dynoffload.units import format_bytes

SLOTS = 3  # one comes in, one is updated, one goes out


class Slot:
    """Memory of the accelerator for one tile.

    Attributes:
        free: the moment after which it may be written again.
    """

    def __init__(self, queues: Queues, nbytes: int) -> None:
        self._queues = queues
        self._storage = torch.UntypedStorage(0, device=queues.device)  # type: ignore[no-untyped-call]
        try:
            queues.fill(self._storage, nbytes)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{queues.name} has no {format_bytes(SLOTS * nbytes)} left through which masters "
                'and moments are streamed: pass a smaller tile_bytes=, or place="host"'
            ) from error
        self.memory = torch.empty(0, dtype=torch.uint8, device=queues.device).set_(self._storage)
        self.free: Moment = queues.now()

    def close(self) -> None:
        """Give the memory back, once what was copied out of it has left."""
        del self.memory
        self._queues.after(self.free)
        self._queues.empty(self._storage)


class Streaming:
    """Computes updates on the accelerator.

    Args:
        rule: the optimizer's code.
        queues: of the accelerator.
        stores: whose masters and moments they are.
    """

    def __init__(self, rule: Rule, queues: Queues, stores: Stores) -> None:
        self._rule, self._queues, self._stores = rule, queues, stores

    def open(self, work: Work) -> list[Slot]:
        """Return slots for a step.

        Raises:
            BudgetError: the accelerator has no room for them.
        """
        nbytes = max((tile.nbytes for tile in work.tiles), default=0)
        slots: list[Slot] = []
        try:
            while nbytes and len(slots) < SLOTS:
                slots.append(Slot(self._queues, nbytes))
        except BaseException:
            for slot in slots:
                slot.close()
            raise
        return slots

    def run(self, work: Work, slots: Sequence[Slot]) -> None:
        """Make updates; gradients are consumed, and slots given back.

        Raises:
            SpillError: a file cannot be read or written; some updates were made, others not.
        """
        if work.tiles:
            try:
                with contextlib.closing(self._stores.staging.through(work.tiles)) as leases:
                    for number, lease in enumerate(leases):
                        self._update(lease, slots[number % SLOTS], work)
            finally:
                for slot in slots:
                    slot.close()
        count(work)
        for entry in work.groups:
            entry.parameter.grad = None
        mark_uploaded(list(work.groups))

    def _update(self, lease: Lease, slot: Slot, work: Work) -> None:
        tile, queues = lease.tile, self._queues
        for begin, nbytes, packed in tile.stretches:
            begin = packed if lease.packed else begin
            source = lease.memory[begin : begin + nbytes]
            there = queues.copy_in(slot.memory[packed : packed + nbytes], source, [slot.free])
        queues.after(there)  # the last of one queue
        self._compute(lease, slot, work)
        done = [queues.now()]
        for begin, nbytes, packed in tile.stretches:
            begin = packed if lease.packed else begin
            target = lease.memory[begin : begin + nbytes]
            slot.free = queues.copy_out(target, slot.memory[packed : packed + nbytes], done)
        if lease.packed:
            lease.gone = slot.free
        else:
            self._stores.gone = slot.free

    def _compute(self, lease: Lease, slot: Slot, work: Work) -> None:
        parts: list[Part] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        reading = work.reading.to(self._queues.device)
        views = lease.tile.views(slot.memory, packed=True)
        for (entry, begin, end), kept in zip(lease.tile.pieces, views, strict=True):
            group = work.groups.get(entry)
            gradient = entry.parameter.grad
            if group is None or gradient is None:
                continue
            wide = reading.read(flat(like_parameter(gradient, entry.parameter))[begin:end])
            master = kept.pop(MASTER)
            parts.append(Part(master, wide, kept, float(entry.step), group))
            results.append((flat(entry.parameter)[begin:end], master))
        self._rule.run(parts)
        for target, master in results:
            target.copy_(master)
