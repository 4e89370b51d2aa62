"""The budget a process can really have: no more than the system, or its control group, can give.

The pool takes memory as it is used, so a budget beyond what there is does no harm to a model that
never fills it. It is lowered, with a warning; what does not fit then is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.limits import available_bytes
from dynoffload.runtime.sizing import ordinary_bytes
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


@contextmanager
def within_host(budget: int, model: nn.Module, optimizer: Optimizer | None) -> Iterator[int]:
    """Yield ``budget``, or what this process can have if that is less.

    What the tensors of ``model`` and ``optimizer`` take already counts as available, as they move
    into the pool.

    Raises:
        BudgetError: what is done with the lowered budget finds it too small; says that it is the
            system's memory that is.
    """
    have = available_bytes() + ordinary_bytes(model, optimizer)
    if budget <= have:
        yield budget
        return
    lowered = (
        f"the budget of {format_bytes(budget)} is more than the {format_bytes(have)} that the "
        "system, or this process's control group, can give"
    )
    try:
        yield have
    except BudgetError as error:
        raise BudgetError(
            f"{lowered}, and with that: {error}; it is memory that lacks: end other programs, "
            "raise the group's limit, or take a larger machine"
        ) from error
    logger.warning("%s: going on with that; operators' temporaries come on top", lowered)
