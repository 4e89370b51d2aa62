"""How much of an accelerator's budget is left to regions, beside what operators take.

[Note: workspace]  An accelerator has one memory for regions and for all else: temporaries of
operators, workspaces of libraries, inputs. A budget is kept by the count of its allocator, which
sees both; what the rest takes is not known before it has run. So the pool begins smaller by an
eighth of the budget, and from then on is what the rest has left of it in the last steps: the most
that it took at a look between two uses, and at least what the step's peak shows beyond the most of
regions. What comes and goes between two looks, while regions are fewer, is not seen. The pool is
never smaller than what the largest update needs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_FIRST = 8  # part of the budget, for what nobody has seen yet
_STEPS = 32  # in which the rest was seen
_LOOK_S = 0.001  # between two looks at the allocator's count within a step


class WorkspaceEstimate:
    """Sizes the pool.

    Args:
        most: bytes of the pool at most.
        least: bytes without which it cannot work.
        budget: bytes that regions and all else may take; None: the pool is what it is at most.

    Attributes:
        capacity: bytes of the pool now.
    """

    def __init__(self, most: int, least: int, budget: int | None) -> None:
        self._most, self._least, self._budget = most, min(least, most), budget
        self._rest: deque[int] = deque(maxlen=_STEPS)
        self._seen, self._looked = 0, 0.0
        self._said = False
        self.capacity = most if budget is None else max(self._least, most - budget // _FIRST)

    def see(self, given: Callable[[], int], regions: int) -> None:
        """In the midst of a step: look what the rest takes now, if the last look is some time ago.

        Args:
            given: returns the bytes that the allocator has given.
            regions: bytes of regions among them.
        """
        now = time.perf_counter()
        if self._budget is not None and now - self._looked > _LOOK_S:
            self._looked = now
            self._seen = max(self._seen, given() - regions)

    def shrunk(self) -> int:
        """Return the bytes of a pool that is a quarter smaller, for something found no memory."""
        self.capacity = max(self._least, self.capacity - self.capacity // 4)
        return self.capacity

    def after(self, peak: int, regions: int) -> int:
        """Return the bytes of the pool after a step.

        Args:
            peak: the most bytes that the allocator has given in it; 0 if it does not count.
            regions: the most bytes of regions in it.
        """
        if self._budget is None or not peak:
            return self.capacity
        seen, self._seen = self._seen, 0
        self._rest.append(max(seen, peak - regions))
        room = self._budget - max(self._rest)
        self.capacity = max(self._least, min(self._most, room))
        if room < self._least and not self._said:
            self._said = True
            logger.warning(
                "operators, and what is not dynoffload's, take up to %s beside the regions, and "
                "these need %s at once: the budget of %s is passed by %s; raise it, or take "
                "smaller samples",
                format_bytes(max(self._rest)),
                format_bytes(self._least),
                format_bytes(self._budget),
                format_bytes(self._least - room),
            )
        return self.capacity
