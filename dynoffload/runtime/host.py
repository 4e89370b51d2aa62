"""The budget a process can really have: no more than the system, its control group, or the
accelerator can give.

The pool takes memory as it is used, so a budget beyond what there is does no harm to a model that
never fills it. It is lowered, with a warning, to what leaves room for freed heap and operators'
temporaries; what does not fit then is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.streams import Streams
from dynoffload.memory.limits import available_bytes
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.target import Target
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Possible:
    """What a process can have.

    Attributes:
        budget: bytes, no more than the user allows.
        slack: bytes of freed heap that may be kept besides.
    """

    budget: int
    slack: int


def within(
    target: Target, budget: int, slack: int, model: nn.Module, optimizer: Optimizer | None
) -> AbstractContextManager[Possible]:
    """Return the context in which a budget is divided: `within_host`, or `within_accelerator`."""
    if target.queues is None:
        return within_host(budget, slack, model, optimizer)
    return within_accelerator(target, target.queues, budget, slack, model, optimizer)


@contextmanager
def within_accelerator(
    target: Target,
    queues: Streams,
    budget: int,
    slack: int,
    model: nn.Module,
    optimizer: Optimizer | None,
) -> Iterator[Possible]:
    """Yield ``budget``, or what the accelerator has left if that is less; `slack` as it is.

    What the model's tensors take there already counts as available, as they move into the pool.

    Raises:
        BudgetError: what is done with the lowered budget finds it too small; says that it is the
            accelerator that is.
    """
    have = queues.free_bytes()
    if target.home == queues.device:
        have += ordinary_bytes(model, optimizer)
    if budget <= have:
        yield Possible(budget, slack)
        return
    lowered = (
        f"the budget of {format_bytes(budget)} is more than the {format_bytes(have)} that "
        f"{queues.name} has left"
    )
    try:
        yield Possible(have, slack)
    except BudgetError as error:
        raise BudgetError(
            f"{lowered}, and with that: {error}; it is the accelerator's memory that lacks: end "
            "what else uses it, or take a larger one"
        ) from error
    logger.warning("%s: going on with that", lowered)


@contextmanager
def within_host(
    budget: int, slack: int, model: nn.Module, optimizer: Optimizer | None
) -> Iterator[Possible]:
    """Yield ``budget`` and ``slack``, or what this process can have if that is less.

    What the tensors of ``model`` and ``optimizer`` take already counts as available, as they move
    into the pool. Left free are ``slack``, or a quarter of what there is if that is less, and a
    sixteenth for the temporaries of operators. Where it is less, freed heap that is kept gets half
    of that, and a quarter of what the budget leaves besides: it grows on between two looks at it.

    Raises:
        BudgetError: what is done with the lowered budget finds it too small; says that it is the
            system's memory that is.
    """
    have = available_bytes() + ordinary_bytes(model, optimizer)
    kept = min(slack, have // 4)
    most = have - kept - have // 16
    if kept < slack:
        slack = min(slack, kept // 2 + max(0, most - budget) // 4)
    if budget <= most:
        yield Possible(budget, slack)
        return
    lowered = (
        f"the budget of {format_bytes(budget)} is more than the {format_bytes(most)} that the "
        f"system, or this process's control group, can give besides {format_bytes(have - most)} "
        "for freed heap and operators' temporaries"
    )
    try:
        yield Possible(most, slack)
    except BudgetError as error:
        raise BudgetError(
            f"{lowered}, and with that: {error}; it is memory that lacks: end other programs, "
            "raise the group's limit, or take a larger machine"
        ) from error
    logger.warning("%s: going on with that", lowered)
