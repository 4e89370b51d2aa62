"""All errors that dynoffload raises for its users.

Each states what was asked, what there is, and what to do. All derive from `DynOffloadError`, so one
``except`` catches the package; each is also the built-in kind that callers expect.
"""

from __future__ import annotations


class DynOffloadError(Exception):
    """Base of all errors that dynoffload raises for its users."""

    def __str__(self) -> str:
        """Return the message without the ``[Errno 2]`` prefix of an `OSError`."""
        return str(getattr(self, "strerror", None) or super().__str__())


class ConfigError(DynOffloadError, ValueError):
    """An option is unknown, out of range or contradicts another."""


class BudgetError(DynOffloadError, MemoryError):
    """What must be in fast memory at the same time exceeds the budget.

    Attributes:
        lacking: bytes by which it does; 0 if unknown.
    """

    lacking: int = 0


class SpillError(DynOffloadError, OSError):
    """The spill directory is missing, full or in memory, or it fails to read or write."""


class CorruptionError(SpillError):
    """Bytes read from the spill file differ from those that were written."""


class ThreadError(DynOffloadError, RuntimeError):
    """Two threads call the model's forward at once."""


class RankError(DynOffloadError, RuntimeError):
    """Another process of the run is gone, has left its block, or keeps this one waiting too long.

    Attributes:
        rank: this process's; -1 if unknown.
        lost: the ranks that are known to be missing.
    """

    rank: int = -1
    lost: tuple[int, ...] = ()


class StepLostError(DynOffloadError, RuntimeError):
    """A step failed half way and cannot be recovered: continue from the last checkpoint."""


class CheckpointError(DynOffloadError, OSError, ValueError):
    """A checkpoint cannot be written or read, is damaged, or is not of this model."""


class TraceError(DynOffloadError, ValueError):
    """A trace file is foreign, truncated, or of a version this release does not read."""


class PilotError(DynOffloadError, ValueError):
    """A pilot file is corrupt, or was trained for another network."""


class ClientError(DynOffloadError, ImportError):
    """The library that an integration needs is not installed."""


class BackendError(DynOffloadError, RuntimeError):
    """A device backend cannot work on this system, or failed in use; or the system is too busy."""


class ExchangeError(DynOffloadError, RuntimeError):
    """Another process did not join an exchange in time, or is gone."""


class ProfilingDone(BaseException):
    """Stops a script once the requested number of steps is recorded; never an error."""
