"""Exchanges rows between the processes of a group, with timeouts.

Every process of the group makes the same exchanges in the same order, even if it has nothing to
send. A wait that takes too long, or whose peer is gone, raises an `ExchangeError` that names this
rank, the layer, and what was expected from which ranks. With gloo an exchange runs in the backend's
threads. With NCCL it runs in its own stream, and waiting blocks the current stream, not the
process, so the group's own timeout applies. NCCL has never run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynoffload.errors import ConfigError, ExchangeError


def _why(error: RuntimeError, waited: float) -> str:
    """Return in short why an exchange failed; the backend's full message is the cause."""
    text = str(error).lower()
    if "timed out" in text:  # by this wait's timeout, or by the group's own
        return f"not in {waited:.0f} s"
    if any(word in text for word in ("closed", "reset", "refused", "broken pipe", "not connected")):
        return "a connection is closed"
    return "the backend failed"


class Pending:
    """An exchange in progress.

    Args:
        work: of torch.distributed; None if it is complete.
        timeout: seconds.
        what: for the error.
        held: tensors to keep alive until it is complete.
    """

    def __init__(self, work: Any, timeout: float | None, what: str, held: tuple[Any, ...]) -> None:
        self._work, self._timeout, self._what, self._held = work, timeout, what, held

    def wait(self) -> None:
        """Block until the rows have arrived and the sent ones may be overwritten.

        Raises:
            ExchangeError: they did not arrive in time, or a rank is gone.
        """
        work, self._work = self._work, None
        if work is None:
            self._held = ()
            return
        start = time.perf_counter()
        try:
            if self._timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            why = _why(error, time.perf_counter() - start)
            raise ExchangeError(
                f"{self._what} did not arrive ({why}): see whether the other ranks "
                "are alive, are at the same layer, and make the same forward and backward calls; "
                "where they are only slow, raise timeout="
            ) from error
        self._held = ()


class Exchange:
    """All-to-alls of one layer in one group.

    Args:
        group: of torch.distributed; None for the default one, or for this process alone if
            torch.distributed is not initialised.
        timeout: seconds that a wait may last.
        name: of the layer, for errors.

    Raises:
        ConfigError: this process is not in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0, name: str = "moe"
    ) -> None:
        if timeout <= 0:
            raise ConfigError(f"timeout={timeout} must be more than 0 seconds")
        self.group, self.timeout, self.name = group, timeout, name
        ready = dist.is_available() and dist.is_initialized()
        if group is not None and not ready:
            raise ConfigError("a group was given, and torch.distributed is not initialised")
        self.rank = dist.get_rank(group) if ready else 0
        self.world = dist.get_world_size(group) if ready else 1
        if self.rank < 0:
            raise ConfigError("this process is not in the group that the layer was given")

    def start(
        self,
        into: torch.Tensor,
        given: torch.Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        what: str,
    ) -> Pending:
        """Send rows of ``given`` to all ranks, and fill ``into`` with theirs.

        Args:
            into: (sum of takes, ...), grouped by rank.
            given: (sum of gives, ...), grouped by rank.
            takes: number of rows from each rank.
            gives: number of rows to each rank.
            what: is expected, for the error.
        """
        if self.world == 1:
            into.copy_(given)
            return Pending(None, None, what, (into, given))
        origins = [str(rank) for rank, rows in enumerate(takes) if rows and rank != self.rank]
        message = (
            f"rank {self.rank} of {self.world}, layer {self.name!r}: {what}"
            f"{' from rank ' + ', '.join(origins) if origins else ''}"
        )
        try:
            work = dist.all_to_all_single(
                into, given, list(takes), list(gives), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise ExchangeError(
                f"{message} could not be asked for ({_why(error, self.timeout)}): see whether the "
                "other ranks are alive; the group cannot be used any more"
            ) from error
        limit = self.timeout if into.device.type == "cpu" else None
        return Pending(work, limit, message, (into, given))

    def numbers(
        self, given: Sequence[Sequence[int]], device: torch.device, what: str
    ) -> list[list[int]]:
        """Send a row of integers to each rank, and return theirs.

        Args:
            given: one row for each rank, all of one length.
            device: that the group's backend supports.
            what: is expected, for the error.
        """
        rows = torch.tensor(given, dtype=torch.int64, device=device)
        found: list[list[int]] = self._all_to_all(rows, what).tolist()
        return found

    def gathered(
        self, given: Sequence[float], device: torch.device, what: str
    ) -> list[list[float]]:
        """Return the numbers of all ranks, one row per rank."""
        rows = torch.tensor([list(given)] * self.world, dtype=torch.float64, device=device)
        found: list[list[float]] = self._all_to_all(rows, what).tolist()
        return found

    def largest(self, given: Sequence[float], device: torch.device, what: str) -> list[float]:
        """Return the maximum of each number over all ranks, the same on all of them."""
        return [max(column) for column in zip(*self.gathered(given, device, what), strict=True)]

    def _all_to_all(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        into, ones = torch.empty_like(rows), [1] * self.world
        self.start(into, rows, ones, ones, what).wait()
        return into
