"""Every error a user of dynoffload can meet.

Each says what was asked, what there is, and what to do. All derive from `DynOffloadError`, so one
``except`` catches the package; each is also the built-in kind a caller would expect.
"""

from __future__ import annotations


class DynOffloadError(Exception):
    """Base of all errors that dynoffload raises for its users."""

    def __str__(self) -> str:
        """Return the words alone: an `OSError` with a number reads ``[Errno 2] ...``."""
        return str(getattr(self, "strerror", None) or super().__str__())


class ConfigError(DynOffloadError, ValueError):
    """An option is unknown, out of range or contradicts another."""


class BudgetError(DynOffloadError, MemoryError):
    """What must be in fast memory at one moment is larger than the budget.

    Attributes:
        lacking: bytes by which it is larger; 0 where that is not known.
    """

    lacking: int = 0


class SpillError(DynOffloadError, OSError):
    """The spill directory is missing, full or in memory, or it fails to read or write."""


class CorruptionError(SpillError):
    """Bytes came back from the spill file that are not those that were written."""


class ThreadError(DynOffloadError, RuntimeError):
    """Two threads are in the model's forward at once."""


class RankError(DynOffloadError, RuntimeError):
    """Another process of the run is gone, has left its block, or keeps this one waiting too long.

    Attributes:
        rank: this process's; -1 where that is not known.
        lost: the ranks that were waited for, as far as they are known.
    """

    rank: int = -1
    lost: tuple[int, ...] = ()


class StepLostError(DynOffloadError, RuntimeError):
    """A step was cut off where it cannot be made up for: go on from the last checkpoint."""


class CheckpointError(DynOffloadError, OSError, ValueError):
    """A checkpoint cannot be written or read, is damaged, or is not of this model."""


class TraceError(DynOffloadError, ValueError):
    """A trace file is foreign, truncated, or of a version this release does not read."""


class PilotError(DynOffloadError, ValueError):
    """A pilot file is corrupt, or was trained for another network."""


class ClientError(DynOffloadError, ImportError):
    """The library that an integration serves is not installed."""


class BackendError(DynOffloadError, RuntimeError):
    """A device backend cannot work on this system, or broke while it worked."""


class ExchangeError(DynOffloadError, RuntimeError):
    """Another process did not come to an exchange in time, or is gone."""


class ProfilingDone(BaseException):
    """Stops a script once as many steps were recorded as were asked for; never an error."""
