"""Strict replay: prefetches exactly the recorded order, or nothing.

The rule of ZeRO-Infinity's prefetcher (Rajbhandari et al., SC 2021;
``PartitionedParameterCoordinator`` in DeepSpeed). One sample's forward is recorded, and later
samples are prefetched by it. The first visit out of order ends the prefetch of its sample; the
next sample runs on demand and is recorded. A sample that only ends early keeps the record.
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
    """A session's `Forecast` with strict replay; `follow` initializes it.

    Attributes:
        breaks: samples that diverged from the record so far.
    """

    def follow(self, session: Session) -> None:
        """Start with nothing recorded, for ``session``."""
        self._session = session
        self._record: list[int] | None = None
        self._broken = False
        self.breaks = 0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Unit] | None:
        """See `Forecast.begin`."""
        self._last, self._repeats, self._broken = self._record, self._record is not None, False
        return super().begin(args, kwargs)

    def _ran(self, blocks: list[int]) -> None:
        before = len(self._order)
        super()._ran(blocks)
        ran = self._order[before:]
        if self._record is None or self._broken or not ran:
            return
        if self._record[before : before + len(ran)] != ran:
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
        """Whether to prefetch: always if there is a record, even where that is slower."""
        return self._record is not None

    def judge(self, step: StepStats) -> None:
        """Do nothing: strict replay does not evaluate its benefit."""


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
        session._forecast.__class__ = StrictForecast  # replaces the session's own kind
        cast(StrictForecast, session._forecast).follow(session)
        yield session
