"""How a part's buffers that another part overwrote are had again in backward.

Source: MPipeMoE (arXiv 2506.22175), whose S1 to S4 these are.
"""

from __future__ import annotations

from enum import Enum

from dynoffload.errors import ConfigError


class Strategy(Enum):
    """What becomes of a part's dispatched rows and of its middle after its forward."""

    NONE = "none"
    """Both are kept; nothing is used again."""
    S1 = "S1"
    """Both are offloaded."""
    S2 = "S2"
    """Rows are sent once more; the middle is offloaded."""
    S3 = "S3"
    """Rows are offloaded; the middle is computed again."""
    S4 = "S4"
    """Rows are sent once more; the middle is computed again."""

    @property
    def reuses(self) -> bool:
        """Whether buffers are used again for the next parts."""
        return self is not Strategy.NONE

    @property
    def offloads_rows(self) -> bool:
        """Whether dispatched rows go to the host tier."""
        return self in (Strategy.S1, Strategy.S3)

    @property
    def sends_again(self) -> bool:
        """Whether dispatched rows are sent once more."""
        return self in (Strategy.S2, Strategy.S4)

    @property
    def offloads_middle(self) -> bool:
        """Whether the middle goes to the host tier."""
        return self in (Strategy.S1, Strategy.S2)

    @property
    def computes_again(self) -> bool:
        """Whether the middle is computed again."""
        return self in (Strategy.S3, Strategy.S4)

    @property
    def offloads(self) -> bool:
        """Whether anything goes to the host tier."""
        return self.offloads_rows or self.offloads_middle


def strategy_of(name: str) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ConfigError: there is none.
    """
    for one in Strategy:
        if one.value.lower() == name.lower():
            return one
    known = ", ".join(repr(one.value) for one in Strategy)
    raise ConfigError(f"strategy={name!r} is not one of {known}")
