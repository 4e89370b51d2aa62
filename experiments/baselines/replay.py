"""Strict replay: the recorded order is prefetched to the letter, or nothing is.

The rule by which ZeRO-Infinity's prefetcher trusts its trace (Rajbhandari et al., SC 2021;
``PartitionedParameterCoordinator`` in DeepSpeed). A sample's forward is recorded, and the samples
after it are prefetched by that. The first visit out of order ends the prefetch of its sample; the
next sample runs on demand and is recorded anew. One that only ends early leaves the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.budgeted import BudgetedSession
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.session import Session
from dynoffload.telemetry import StepStats


class StrictForecast(Forecast):
    """A session's `Forecast` under the rule; `follow` makes it of an ordinary one.

    Attributes:
        breaks: samples that came out of order so far.
    """

    def follow(self, session: Session) -> None:
        """Begin, for ``session``, with nothing recorded."""
        self._session = session
        self._record: list[int] | None = None
        self._broken = False
        self.breaks = 0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Unit] | None:
        """See `Forecast.begin`."""
        self._last, self._repeats, self._broken = self._record, self._record is not None, False
        return super().begin(args, kwargs)

    def _ran(self, index: int) -> None:
        before = len(self._order)
        super()._ran(index)
        if self._record is None or self._broken or len(self._order) == before:
            return
        if self._record[before : before + 1] != [index]:
            self._broken = True
            self.breaks += 1
            if self._session._paging is not None:
                self._session._paging.migrator.set_prefetch(False)

    def end(self, *, whole: bool = True) -> None:
        """See `Forecast.end`."""
        super().end(whole=whole)
        if self._broken:
            self._record = None
        elif whole and not self._record:
            self._record = self.actual or None

    @property
    def pays(self) -> bool:
        """Whether to prefetch: always by a record, also where that loses."""
        return self._record is not None

    def judge(self, step: StepStats) -> None:
        """Judge nothing."""


@contextlib.contextmanager
def replaying(
    model: nn.Module, optimizer: Optimizer, budget: int, spill_dir: str | Path | None, **config: Any
) -> Iterator[Session]:
    """Train ``model`` in an `offload` block that prefetches by strict replay."""
    with dynoffload.offload(
        model,
        optimizer,
        budget=budget,
        pilot=None,
        spill_dir=spill_dir,
        config={**config, "policy": "repeat"},
    ) as session:
        assert isinstance(session, BudgetedSession)
        session._forecast.__class__ = StrictForecast  # the session has made an ordinary one
        cast(StrictForecast, session._forecast).follow(session)
        yield session
