"""Limits a budget to what the system, its control group, or the accelerator can give. A larger
budget is lowered, with a warning, so that freed heap and operators' temporaries have room. Entering
the block is refused if the model does not fit the lowered budget.

[Note: memory of libraries]  Libraries keep memory that nobody can foresee. oneDNN keeps 0.6 MB of
code for each shape of a product in bfloat16, and experts' products have a shape for each number of
tokens: 450 MB after two steps of a mixture of seven layers. So `Headroom` watches what the process
takes beyond the budget, and lowers the pool's capacity where the system has no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.limits import available_bytes, file_bytes
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.target import Target
from dynoffload.units import MiB, format_bytes

logger = logging.getLogger(__name__)

_MOST_CODE = 256 * MiB
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
        least: the smallest capacity that works.

    Attributes:
        lacks: says what lacks once the least capacity is too much, else "".
    """

    def __init__(self, possible: Possible, least: int) -> None:
        self._possible, self._least = possible, least
        self._most: int | None = None  # the pool's capacity at first
        self._files = file_bytes()  # at first
        self.lacks = ""

    def excess(self, beyond: int) -> int:
        """Return for how many of the ``beyond`` bytes that the process takes there is no room.

        What is read through mapped files, such as a dataset, can go at any time and does not count.
        """
        possible = self._possible
        if beyond <= possible.beyond or available_bytes() >= possible.spare:
            return 0
        return max(0, beyond - max(0, file_bytes() - self._files) - possible.beyond)

    def shrink(self, device: Device, excess: int) -> None:
        """Lower the capacity of ``device`` by ``excess`` from what it was at first."""
        before = device.capacity
        most = self._most = self._most or before
        if not device.limit(max(most - excess, self._least)):
            return
        taken = (
            f"libraries and operators take {format_bytes(self._possible.beyond + excess)} beside "
            "the pool, and the system, or this process's control group, can give no more: "
        )
        if before <= self._least:
            self.lacks = f"{taken}the pool of {format_bytes(before)} cannot be smaller; {_REMEDY}"
        elif before == most:
            logger.warning("%sthe pool of %s shrinks", taken, format_bytes(most))


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
        spare += min(file_bytes(), _MOST_CODE)  # without its code it does not get ahead
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
    beyond = 0 if queues is not None else max(0, have - spare - min(budget, most))
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
