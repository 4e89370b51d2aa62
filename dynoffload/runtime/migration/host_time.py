"""The host's time for prediction: at most a share of what the session has run.

All that predicting costs counts: features, predictions, probes, following a step, and learning.
Each kind of work begins only if its usual cost still fits; a step that is followed is followed to
its end. A prediction that changes within a step has the migrator plan again. This is planning,
which each step does without predictions too; it has a share of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

SHARE = 0.01
"""Share of the session's time that prediction may take."""
PLANS = 0.05
"""Share of it that new plans within steps may take."""
OPENING_S = 1.0
"""Most seconds of a session's opening that count as run."""
_AVERAGE = 0.2  # weight of the latest cost in the usual one


class HostTime:
    """Counts what prediction costs against what the session has run.

    Attributes:
        spent_s: seconds spent on prediction.
        planned_s: seconds spent on new plans within steps.
        ran_s: seconds that the session has run: its opening, and its steps from their forward on,
            as waiting between steps earns nothing.
    """

    def __init__(self) -> None:
        self.spent_s = self.planned_s = 0.0
        self.ran_s = 0.0
        self._taken = (0.0, 0.0)
        self._first = 0.0  # when the running step's first forward began
        self._forward = 0.0  # when the running forward began; 0 outside
        self._forwards = 0.0  # seconds of the step's forwards before
        self._usual: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Begin a forward."""
        self._forward = perf_counter()
        self._first = self._first or self._forward

    def pause(self) -> None:
        """End a forward."""
        if self._forward:
            self._forwards += perf_counter() - self._forward
        self._forward = 0.0

    def end(self, seconds: float) -> None:
        """Count seconds that the session has run, as of a whole step and what came before it."""
        if self._first:
            seconds = min(seconds, perf_counter() - self._first)
        self.ran_s += seconds
        self._first = self._forward = self._forwards = 0.0

    def take(self) -> tuple[float, float]:
        """Return the seconds spent on prediction and on new plans since this was called last."""
        before, self._taken = self._taken, (self.spent_s, self.planned_s)
        return self.spent_s - before[0], self.planned_s - before[1]

    def affords(self, *kinds: str) -> bool:
        """Return whether there is time for some work, by its usual cost."""
        return self.spent_s + sum(self._usual[kind] for kind in kinds) <= SHARE * self._ran()

    @property
    def affords_plan(self) -> bool:
        """Whether there is time to plan again within the running step."""
        return self.planned_s + self._usual["plan"] <= PLANS * self._ran()

    def _ran(self) -> float:
        running = perf_counter() - self._forward if self._forward else 0.0
        return self.ran_s + self._forwards + running

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count the body as work of a kind; ``"plan"``: as a new plan within the step."""
        begun = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - begun
            if kind == "plan":
                self.planned_s += took
            else:
                self.spent_s += took
            self.note(kind, took)

    def note(self, kind: str, seconds: float) -> None:
        """Enter what some work took, as its usual cost; it counts where it is done."""
        usual = self._usual[kind]
        self._usual[kind] = usual + _AVERAGE * (seconds - usual) if usual else seconds
