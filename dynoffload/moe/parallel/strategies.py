"""Strategies of MPipeMoE (arXiv 2506.22175) for restoring overwritten buffers in backward.

The parts of a batch share buffers, so each part overwrites those of an earlier one.
"""

from __future__ import annotations

from enum import Enum

from dynoffload.errors import ConfigError


class Strategy(Enum):
    """How backward gets a part's dispatched rows and its middle (inner activation)."""

    NONE = "none"
    """Both are kept; buffers are not shared."""
    S1 = "S1"
    """Both are offloaded."""
    S2 = "S2"
    """Rows are sent again; the middle is offloaded."""
    S3 = "S3"
    """Rows are offloaded; the middle is recomputed."""
    S4 = "S4"
    """Rows are sent again; the middle is recomputed."""

    @property
    def reuses(self) -> bool:
        """Whether parts share buffers."""
        return self is not Strategy.NONE

    @property
    def offloads_rows(self) -> bool:
        """Whether dispatched rows are offloaded to the host tier."""
        return self in (Strategy.S1, Strategy.S3)

    @property
    def sends_again(self) -> bool:
        """Whether dispatched rows are sent again."""
        return self in (Strategy.S2, Strategy.S4)

    @property
    def offloads_middle(self) -> bool:
        """Whether the middle is offloaded to the host tier."""
        return self in (Strategy.S1, Strategy.S2)

    @property
    def computes_again(self) -> bool:
        """Whether the middle is recomputed."""
        return self in (Strategy.S3, Strategy.S4)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded to the host tier."""
        return self.offloads_rows or self.offloads_middle


def strategy_of(name: str) -> Strategy:
    """Return the strategy with this name, ignoring case.

    Raises:
        ConfigError: there is none.
    """
    for one in Strategy:
        if one.value.lower() == name.lower():
            return one
    known = ", ".join(repr(one.value) for one in Strategy)
    raise ConfigError(f"strategy={name!r} is not one of {known}")
