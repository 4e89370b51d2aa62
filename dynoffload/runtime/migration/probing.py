"""The routing probes of a session's network: where each is asked, and what is fetched for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from dynoffload.profiler.routing import RoutingProbe, probes_of
from dynoffload.runtime.adoption.units import Unit

logger = logging.getLogger(__name__)


class Probing:
    """The probes of one network, which keep what they learn when its units change.

    Args:
        model: the root.
        given: the user's probes, or None.
    """

    def __init__(self, model: nn.Module, given: Sequence[RoutingProbe] | None) -> None:
        self._model, self._given = model, given
        self._table: Mapping[str, Sequence[RoutingProbe]] | None = None
        self._asked: set[tuple[str, ...]] = set()  # blocks of the routers that are asked now

    def __str__(self) -> str:
        known = len(_decided(one for every in (self._table or {}).values() for one in every))
        asked = len(self._asked)
        of = f"{known}" if asked == known else f"{asked} of {known}"
        return f", routers of {of} mixture{'s' * (known > 1)} are asked" if known else ""

    def places(
        self, units: Mapping[str, Unit]
    ) -> Iterator[tuple[str, list[RoutingProbe], list[Unit]]]:
        """Yield the path of each probed module, its probes, and the units that these may read;
        ``units`` are by path and by those of their members."""
        if self._table is None:
            try:
                self._table = probes_of(self._model, self._given)
            except Exception as error:  # in user code; hints are optional
                logger.warning(
                    "the network gives no routing hints: %s: %s", type(error).__name__, error
                )
                return
        self._asked.clear()
        for path, every in self._table.items():
            probes = [
                one for one in every if one.reads is None or units.keys().isdisjoint(one.reads)
            ]
            heads = [_below(one.path) for one in probes if one.reads is None]
            decided = {block for one in probes for block in one.blocks}
            read = [
                unit
                for unit in dict.fromkeys(units.values())
                if any(
                    path == head[:-1] or path.startswith(head)
                    for head in heads
                    for path in unit.members or (unit.path,)
                )
                and not any(unit.path == b or unit.path.startswith(_below(b)) for b in decided)
            ]
            self._asked |= _decided(probes)
            if probes:
                yield path, probes, read


def _decided(probes: Iterable[RoutingProbe]) -> set[tuple[str, ...]]:
    """Return the blocks of each router among ``probes``, without those that read indices alone."""
    return {one.blocks for one in probes if one.reads != ()}


def _below(path: str) -> str:
    """Return the path prefix of a module's submodules."""
    return f"{path}." if path else ""
