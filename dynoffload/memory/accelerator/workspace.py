"""Sizes the pool of regions within an accelerator's budget, next to the memory of operators.

[Note: workspace]  An accelerator has one memory for regions and for the rest: temporaries of
operators, workspaces of libraries, inputs. Its allocator counts both, and the budget limits this
count. What the rest takes is unknown before it has run. So the first pool is the budget less other
allocations, and less an eighth of the budget. From then on it is the budget less the rest's peak of
the last steps, and less a 32nd of the budget. The rest's peak in a step is the largest sample
between two uses, or the step's peak less the peak of regions, if larger. Short peaks between two
samples, while regions take less, are missed, and the allocator's rounding of regions changes from
step to step: both together made up to 2% of the budget on an H200. The pool is never smaller than
the least that training needs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_FIRST, _LATER = 8, 32  # margins: 1/8 of the budget in the first step, 1/32 from then on
_STEPS = 32  # whose peaks of the rest are kept
_LOOK_S = 0.001  # between two samples of the allocator's count within a step


class WorkspaceEstimate:
    """Sizes the pool.

    Args:
        most: maximum bytes of the pool.
        least: minimum bytes of the pool.
        budget: bytes that regions and all else may take; None: the pool begins with ``most``.

    Attributes:
        capacity: bytes of the pool now.
    """

    def __init__(self, most: int, least: int, budget: int | None) -> None:
        self._most, self._least, self._budget = most, min(least, most), budget
        self._rest: deque[int] = deque(maxlen=_STEPS)
        self._seen, self._looked = 0, 0.0
        self._said = False
        self.capacity = most
        self.begin(0)

    def begin(self, held: int) -> int:
        """Return the bytes of the pool in the first step.

        Args:
            held: bytes that the allocator has allocated beside regions.
        """
        if self._budget is not None:
            room = min(self._most, self._budget - held)
            self.capacity = max(self._least, room - self._budget // _FIRST)
        return self.capacity

    def see(self, given: Callable[[], int], regions: int) -> None:
        """Within a step, sample what the rest takes now, unless the last sample is recent.

        Args:
            given: returns the bytes that the allocator has allocated.
            regions: bytes of regions among them.
        """
        now = time.perf_counter()
        if self._budget is not None and now - self._looked > _LOOK_S:
            self._looked = now
            self._seen = max(self._seen, given() - regions)

    def shrunk(self) -> int:
        """Shrink the pool by a quarter, after memory ran out; return its bytes."""
        self.capacity = max(self._least, self.capacity - self.capacity // 4)
        return self.capacity

    def after(self, peak: int, regions: int) -> int:
        """Return the bytes of the pool after a step.

        Args:
            peak: the allocator's peak bytes in the step; 0 if it does not count.
            regions: the peak bytes of regions in the step.
        """
        if self._budget is None or not peak:
            return self.capacity
        seen, self._seen = self._seen, 0
        self._rest.append(max(seen, peak - regions))
        room = self._budget - max(self._rest)
        self.capacity = max(self._least, min(self._most, room - self._budget // _LATER))
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
