"""Limits a budget to what the system, its control group, or the accelerator can give. A larger
budget is lowered, with a warning, so that freed heap and operators' temporaries have room. Entering
the block is refused if the model does not fit the lowered budget.

[Note: memory of libraries]  Libraries keep memory that nobody can foresee. oneDNN keeps 0.6 MB of
code for each shape of a product in bfloat16, and experts' products have a shape for each number of
tokens: 450 MB after two steps of a mixture of seven layers. So `Headroom` watches what the control
group, or the system, has left, and lowers the pool's capacity where that is too little.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.limits import (
    MemoryGroups,
    available_bytes,
    file_bytes,
    resident_bytes,
    system_room,
)
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.target import Target
from dynoffload.units import MiB, format_bytes

logger = logging.getLogger(__name__)

_MOST_CODE = 256 * MiB
_LEAST_SPARE = 16 * MiB  # one look's growth, before any was seen
_LOOK_EVERY_S, _REST_S = 0.002, 0.02
_FORGOTTEN = 1 / 64  # share of the most taken between two looks that each look forgets
_REMEDY = (
    "it is memory that lacks: end other programs, raise the group's limit, or take a larger machine"
)


@dataclass(frozen=True)
class Possible:
    """The memory a process can have.

    Attributes:
        budget: bytes, no more than the user allows.
        slack: bytes of freed heap that may be kept in addition.
        beyond: bytes that the process may take in addition, heap included.
        spare: bytes to be left free besides; 0 on an accelerator, where nobody watches.
    """

    budget: int
    slack: int
    beyond: int = 0
    spare: int = 0


class Headroom:
    """Lowers the capacity of a pool as the process takes more beyond it than the system has.

    See [Note: memory of libraries].

    Args:
        possible: what the process can have.
        sizing: how the budget is divided.
        lowest: returns the lowest budget for the model, and its least pool.

    Attributes:
        lacks: says what lacked at the last look, although the pool is the least, else "".
    """

    def __init__(
        self, possible: Possible, sizing: Sizing, lowest: Callable[[], tuple[int, int]]
    ) -> None:
        self._possible, self._sizing, self._lowest = possible, sizing, lowest
        self._most: int | None = None  # the pool's capacity before it shrank
        self._files = file_bytes()  # at first
        self._code = min(self._files, _MOST_CODE)  # without its code it does not get ahead
        self._groups = MemoryGroups()
        self._beyond, self._grown = math.inf, 0  # at a step's last look; the most between two
        self._next = 0.0  # time from which a look may be due
        self.lacks = ""

    def is_near(self) -> bool:
        """Return whether a look is due before the next sample, as a group is near its limit."""
        now, spare = time.monotonic(), self._possible.spare
        if not spare or now < self._next:
            return False
        self._next = now + _LOOK_EVERY_S
        return bool(self.lacks) or self._groups.may_lack(spare + self._grown + self._code)

    def end_step(self) -> None:
        """What is taken between steps, such as a dataset, need not be free a second time."""
        self._beyond = math.inf

    def excess(self, device: Device, beyond: int) -> int:
        """Return by how much the capacity of ``device`` is more than there is room for.

        As much as was taken between two looks stays free; see `_FORGOTTEN`. File cache, such as a
        mapped dataset, can go at any time and takes no room. The rest of the system counts only if
        the ``beyond`` bytes that this process takes beside the pool are more than the system had at
        first: it does not make room for others.
        """
        possible = self._possible
        if not possible.spare:
            return 0
        beyond -= max(0, file_bytes() - self._files)
        grown = 0 if math.isinf(self._beyond) else int(beyond - self._beyond)
        self._grown = max(grown, int(self._grown * (1 - _FORGOTTEN)))
        self._beyond = beyond
        left = self._groups.room(self._code).left
        if beyond > possible.beyond:
            left = min(left, system_room(self._code))
        if left > 2 * (possible.spare + self._grown):  # much of what is taken is file cache
            self._next = time.monotonic() + _REST_S
        return max(0, possible.spare + self._grown + device.capacity - device.taken_bytes() - left)

    def shrink(self, device: Device, excess: int) -> None:
        """Lower the capacity of ``device`` by ``excess``; if it cannot be lower, set `lacks`."""
        self.lacks = ""
        if not excess:
            return
        before = device.capacity
        device.limit(max(before - excess, self._sizing.least_bytes))
        if before - device.capacity < excess:
            self.lacks = self._text(device, excess)
        elif self._most is None:
            self._most = before
            logger.warning(
                "libraries and operators take %s beside the pool, and the system, or this "
                "process's control group, can give no more: the pool of %s shrinks",
                format_bytes(self._beyond),
                format_bytes(before),
            )

    def _text(self, device: Device, excess: int) -> str:
        capacity, beyond, (left, limit) = device.capacity, self._beyond, self._groups.room()
        own, pool = resident_bytes() - file_bytes(), device.taken_bytes()
        needed = (self._most or capacity) - capacity + excess
        where, remedy = "the system", "end other programs, or take a larger machine"
        if left <= system_room():
            where = f"the control group of {format_bytes(limit)}"
            others = limit - left - own
            if others > 0:
                where += f", of which the kernel and other processes take {format_bytes(others)},"
            remedy = (
                f"raise the group's limit to at least {format_bytes(limit + needed)}, and further "
                "for what libraries keep in later steps"
            )
        lowest, least = self._lowest()
        if least < self._sizing.least_bytes:
            remedy += (
                f", or lower the budget, for a smaller pool: {format_bytes(lowest)} is the lowest, "
                f"with a least pool of {format_bytes(least)}"
            )
        free, before = self._possible.spare + self._grown, max(0, own - pool - beyond)
        sizing, chunks = self._sizing, 2 * self._sizing.chunk_bytes
        update = sizing.least_bytes - chunks - sizing.reserve_bytes
        return (
            f"{where} has {format_bytes(left)} left, and operators need {format_bytes(free)}. This "
            f"process takes {format_bytes(pool)} of the pool, {format_bytes(before)} that it took "
            f"before the block, and {format_bytes(beyond)} that libraries and operators took "
            f"since. The pool of {format_bytes(capacity)} cannot be smaller: it holds the largest "
            f"update ({format_bytes(update)}, of {sizing.culprit}), two chunks of saved "
            f"activations ({format_bytes(chunks)}) and a reserve "
            f"({format_bytes(sizing.reserve_bytes)}); {remedy}"
        )


@contextmanager
def within(
    target: Target, budget: int, slack: int, model: nn.Module, optimizer: Optimizer | None
) -> Iterator[Possible]:
    """Yield ``budget`` and ``slack``, or what ``target``'s device can give if that is less.

    Memory taken there by the tensors of ``model`` and ``optimizer`` counts as available, as they
    move into the pool. On the CPU two parts are left free: ``slack``, at most a quarter of what is
    available, and a sixteenth for temporaries of operators. If ``slack`` is cut so, kept freed heap
    gets half of the cut value, as it grows between two checks. It also gets a quarter of what the
    budget leaves unused.

    Raises:
        BudgetError: the block found the lowered budget too small; says whose memory is short.
    """
    queues = target.queues
    if queues is None:
        have = available_bytes() + ordinary_bytes(model, optimizer)
        kept = min(slack, have // 4)
        spare = have // 16
        most = have - kept - spare
        if kept < slack:
            slack = min(slack, kept // 2 + max(0, most - budget) // 4)
        given = (
            "the system, or this process's control group, can give besides "
            f"{format_bytes(have - most)} for freed heap and operators' temporaries"
        )
        remedy = _REMEDY
    else:
        most, spare = queues.free_bytes(), 0
        if target.home == queues.device:
            most += ordinary_bytes(model, optimizer)
        given = f"{queues.name} has left"
        remedy = (
            "it is the accelerator's memory that lacks: end what else uses it, or take a larger one"
        )
    beyond = 0
    if queues is None:
        beyond, spare = max(0, have - spare - min(budget, most)), max(spare, _LEAST_SPARE)
    if budget <= most:
        yield Possible(budget, slack, beyond, spare)
        return
    lowered = (
        f"the budget of {format_bytes(budget)} is more than the {format_bytes(most)} that {given}"
    )
    try:
        yield Possible(most, slack, beyond, spare)
    except BudgetError as error:
        raise BudgetError(f"{lowered}, and with that: {error}; {remedy}") from error
    logger.warning("%s: going on with that", lowered)
