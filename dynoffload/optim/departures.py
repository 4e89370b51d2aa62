"""Gradients that leave the accelerator as backward makes them, and what is known of them then.

Each goes to pinned host memory on the queue for copies out, and the parameter lets go of it: no
more are on the accelerator than are under way, which is bounded.

[Note: accumulation]  Over several backwards a gradient is added up on the host, in its own dtype
and in the order of the backwards: that is the addition that autograd makes in ``p.grad``, with the
same rounding, so the bits are the same. It passes through slots of fixed size.

[Note: figures]  A gradient's norm, and whether it is finite, are computed where it was made, before
it leaves. Of one that was added up here they are computed here, on the host.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.queues import Moment, Queues
from dynoffload.optim.reading import Reading
from dynoffload.optim.shelves import Entry, flat, shaped

_SLOTS = 3  # through which gradients pass that are added to others


@dataclass(eq=False)
class Arrived:
    """A gradient that is, or will be, on the host.

    Attributes:
        memory: flat, in the parameter's dtype, pinned.
        moment: at which its first copy is there.
        norm: 2-norm, where it was made; None where that is not known of the whole.
        largest: of its magnitudes, likewise; not finite if one element is not.
        added: what was added to it since, or will be.
    """

    memory: torch.Tensor
    moment: Moment
    norm: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    added: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Hold the calling thread until it is all there."""
        self.moment.wait()
        for addition in self.added:
            addition.result()


class Departures:
    """Takes gradients to the host.

    Args:
        queues: of the accelerator.
        slot_bytes: of each slot that gradients pass through which are added to others.
        flight_bytes: of gradients that may be under way; backward waits for room.

    Attributes:
        checks: whether to find out, as gradients leave, if they are finite.
    """

    def __init__(self, queues: Queues, slot_bytes: int, flight_bytes: int) -> None:
        self._queues = queues
        self._slot_bytes, self._most = slot_bytes, flight_bytes
        self.checks = False
        self._bank = 0
        self._arrived: dict[Entry, Arrived] = {}
        self._flight: deque[tuple[Moment, torch.Tensor]] = deque()
        self._flying = 0
        self._mutex = threading.RLock()
        self._slots: queue.SimpleQueue[torch.Tensor] | None = None
        self._owned: list[torch.Tensor] = []
        self._adder: ThreadPoolExecutor | None = None

    @property
    def arrived(self) -> dict[Entry, Arrived]:
        """Gradients since the last `take`."""
        return self._arrived

    @property
    def flying_bytes(self) -> int:
        """Bytes of gradients on the accelerator that are on their way, as far as is known."""
        return self._flying

    @torch.no_grad()
    def leave(self, entry: Entry) -> None:
        """Send a parameter's gradient to the host, and let it go.

        Raises:
            ConfigError: it is sparse, or of another dtype than the parameter.
        """
        gradient = entry.parameter.grad
        if gradient is None:
            return
        check_gradient(entry, gradient)
        dense = like_parameter(gradient.detach(), entry.parameter)
        entry.parameter.grad = None
        with self._mutex, torch.inference_mode(False):
            before = self._arrived.get(entry)
            if before is None:
                self._begin(entry, dense)
            else:
                self._add(before, dense)
            self._land()

    def _begin(self, entry: Entry, gradient: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient, 2.0)
        checked = self.checks and gradient.numel()
        largest = torch.linalg.vector_norm(gradient, torch.inf) if checked else None
        memory = entry.banks[self._bank]
        moment = self._send(memory, flat(gradient))
        self._arrived[entry] = Arrived(memory, moment, norm, largest)

    def _add(self, arrived: Arrived, gradient: torch.Tensor) -> None:
        """Add to one that is here; see [Note: accumulation]."""
        arrived.norm = arrived.largest = None
        elements, step = flat(gradient), self._slot_bytes // gradient.element_size()
        for begin in range(0, len(elements), step):
            part = elements[begin : begin + step]
            slot = self._slot()
            content = slot[: part.nbytes].view(part.dtype)
            moment = self._send(content, part)
            target = arrived.memory[begin : begin + len(part)]
            assert self._adder is not None
            future = self._adder.submit(self._added, slot, content, moment, target)
            arrived.added.append(future)

    def _added(
        self,
        slot: torch.Tensor,
        content: torch.Tensor,
        moment: Moment,
        target: torch.Tensor,
    ) -> None:
        assert self._slots is not None
        try:
            moment.wait()  # the first copy of this gradient was given to the same queue before
            with torch.no_grad():
                target.add_(content)
        finally:
            self._slots.put(slot)

    def _slot(self) -> torch.Tensor:
        if self._slots is None:
            self._slots = queue.SimpleQueue()
            self._adder = ThreadPoolExecutor(1, "dynoffload-gradients")
            for _ in range(_SLOTS):
                self._owned.append(self._queues.host(self._slot_bytes))
                self._slots.put(self._owned[-1])
        return self._slots.get()

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> Moment:
        """Queue a copy, and hold what it reads until it is over."""
        moment = self._queues.copy_out(
            target.view(torch.uint8), source.view(torch.uint8), [self._queues.now()]
        )
        self._flight.append((moment, source))
        self._flying += source.nbytes
        return moment

    def _land(self) -> None:
        """Let go of what has left, and wait while too much is under way."""
        while self._flight:
            moment, source = self._flight[0]
            if not moment.reached():
                if self._flying <= self._most:
                    return
                moment.wait()
            self._flight.popleft()
            self._flying -= source.nbytes

    def settle(self) -> None:
        """Wait until nothing is under way."""
        with self._mutex:
            while self._flight:
                moment, _ = self._flight.popleft()
                moment.wait()
            self._flying = 0
            for arrived in self._arrived.values():
                arrived.wait()

    def take(self) -> dict[Entry, Arrived]:
        """Return the gradients so far, and begin anew: in the other bank, where there are two."""
        with self._mutex:
            taken, self._arrived = self._arrived, {}
            if any(len(entry.banks) > 1 for entry in taken):
                self._bank = 1 - self._bank
            return taken

    def drop(self) -> None:
        """Forget the gradients so far."""
        self.settle()
        self._arrived = {}

    def zero(self) -> None:
        """Make the gradients so far zero."""
        self.settle()
        with torch.no_grad():
            for arrived in self._arrived.values():
                arrived.memory.zero_()
                arrived.norm = arrived.largest = None
                arrived.added.clear()

    # What is known of them

    def are_finite(self) -> bool:
        """Return whether every element is a finite number; it waits for the accelerator."""
        known = [one.largest for one in self._arrived.values() if one.largest is not None]
        if known and not bool(torch.stack([one.float() for one in known]).isfinite().all()):
            return False
        for arrived in self._arrived.values():
            if arrived.largest is None and arrived.memory.numel():
                arrived.wait()
                if not bool(torch.linalg.vector_norm(arrived.memory, torch.inf).isfinite()):
                    return False
        return True

    def norms(self, entries: Sequence[Entry], order: float, reading: Reading) -> list[torch.Tensor]:
        """Return the norm of each gradient, where it was made or on the host; see [Note: figures].

        Args:
            entries: in the order of the result; those without a gradient are passed over.
            order: of the norm.
            reading: what was made of gradients so far: unscaled, and clipped.
        """
        found = []
        for entry in entries:
            arrived = self._arrived.get(entry)
            if arrived is None:
                continue
            if reading.is_plain and order == 2.0 and arrived.norm is not None:
                found.append(arrived.norm)
                continue
            arrived.wait()
            memory = reading.seen(shaped(arrived.memory, entry.parameter))
            found.append(torch.linalg.vector_norm(memory, order).to(self._queues.device))
        return found

    def close(self) -> None:
        """Give memory back; no gradient is wanted any more."""
        self.drop()
        if self._adder is not None:
            self._adder.shutdown()
        while self._owned:
            self._queues.release(self._owned.pop(), held=False)


def check_gradient(entry: Entry, gradient: torch.Tensor) -> None:
    """Refuse a gradient that no master can be updated by.

    Raises:
        ConfigError: it is sparse, or of another dtype than the parameter.
    """
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {entry.name} is {gradient.layout}, and HostOptimizer takes dense "
            "ones: pass sparse=False to the embedding, or leave its weight to another optimizer"
        )
    if gradient.dtype != entry.parameter.dtype:
        raise ConfigError(
            f"the gradient of {entry.name} is {gradient.dtype}, and the parameter "
            f"{entry.parameter.dtype}: leave grad_dtype as it is"
        )


def like_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that lies in memory as its parameter does."""
    if gradient.stride() == parameter.stride():
        return gradient
    dense = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return dense.copy_(gradient)
