"""The host's time for prediction: at most a share of what the session has run.

All that predicting costs counts: features, predictions, probes, following a step, and learning.
Each kind of work begins only if its usual cost still fits; a step that is followed is followed to
its end.

A prediction that changes within a step has the migrator plan again. This is planning, which each
step does without predictions too. Such plans may take as long in a step as steps lately stalled, as
they can save no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

SHARE = 0.01
"""Share of the session's time that prediction may take."""
_AVERAGE = 0.2  # weight of the latest cost in the usual one


class HostTime:
    """Counts what prediction costs against what the session has run.

    Attributes:
        spent_s: seconds spent on prediction.
        ran_s: seconds that the session has run: its opening, and its steps from their forward on,
            as waiting between steps earns nothing.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.ran_s = 0.0
        self._taken = 0.0
        self._step = 0.0  # when the running step's latest forward began
        self._first = 0.0  # when its first one did
        self._usual: defaultdict[str, float] = defaultdict(float)
        self._planned = 0.0  # seconds of plans within the running step

    def begin(self) -> None:
        """Begin a forward."""
        self._step = perf_counter()
        self._first = self._first or self._step

    def end(self, seconds: float, stall_s: float = 0.0) -> None:
        """Count seconds that the session has run, as of a whole step and what came before it, and
        those of them that it stalled."""
        if self._first:
            seconds = min(seconds, perf_counter() - self._first)
        self.ran_s += seconds
        self.note("stall", stall_s)
        self._planned = 0.0
        self._step = self._first = 0.0

    def take(self) -> float:
        """Return the seconds spent since this was called last."""
        taken, self._taken = self.spent_s - self._taken, self.spent_s
        return taken

    def affords(self, *kinds: str) -> bool:
        """Return whether there is time for some work, by its usual cost."""
        running = perf_counter() - self._step if self._step else 0.0
        needed = sum(self._usual[kind] for kind in kinds)
        return self.spent_s + needed <= SHARE * (self.ran_s + running)

    @property
    def affords_plan(self) -> bool:
        """Whether there is time to plan again within the running step."""
        return self._planned + self._usual["plan"] <= self._usual["stall"]

    @contextmanager
    def of_plan(self) -> Iterator[None]:
        """Count the body as a plan within the running step."""
        begun = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - begun
            self._planned += took
            self.note("plan", took)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count the body as work of a kind."""
        begun = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - begun
            self.spent_s += took
            self.note(kind, took)

    def note(self, kind: str, seconds: float) -> None:
        """Enter what some work took, as its usual cost; it counts where it is done."""
        usual = self._usual[kind]
        self._usual[kind] = usual + _AVERAGE * (seconds - usual) if usual else seconds
