"""Limits a budget to what the system, its control group, or the accelerator can give. A larger
budget is lowered, with a warning, so that freed heap and operators' temporaries have room. Entering
the block is refused if the model does not fit the lowered budget."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.limits import available_bytes
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.target import Target
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Possible:
    """The memory a process can have.

    Attributes:
        budget: bytes, no more than the user allows.
        slack: bytes of freed heap that may be kept in addition.
    """

    budget: int
    slack: int


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
        most = have - kept - have // 16
        if kept < slack:
            slack = min(slack, kept // 2 + max(0, most - budget) // 4)
        given = (
            "the system, or this process's control group, can give besides "
            f"{format_bytes(have - most)} for freed heap and operators' temporaries"
        )
        remedy = (
            "it is memory that lacks: end other programs, raise the group's limit, or take a "
            "larger machine"
        )
    else:
        most = queues.free_bytes()
        if target.home == queues.device:
            most += ordinary_bytes(model, optimizer)
        given = f"{queues.name} has left"
        remedy = (
            "it is the accelerator's memory that lacks: end what else uses it, or take a larger one"
        )
    if budget <= most:
        yield Possible(budget, slack)
        return
    lowered = (
        f"the budget of {format_bytes(budget)} is more than the {format_bytes(most)} that {given}"
    )
    try:
        yield Possible(most, slack)
    except BudgetError as error:
        raise BudgetError(f"{lowered}, and with that: {error}; {remedy}") from error
    logger.warning("%s: going on with that", lowered)
