"""What ranks tell one another beside their collectives: a line each, in the group's store.

What it is: `Board`, which puts up this rank's line and reads the others'. A store is asked and
answers; nobody waits for another rank here, so nothing hangs. What it is not: the judgement of what
the lines mean (`dynoffload.runtime.ranks.watch`).

[Note: whose process]  Ranks of one machine, which see one another's processes, are known to be gone
as soon as the process is; of others one knows that their line does not change any more.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from dynoffload.runtime.ranks.standing import Standing

logger = logging.getLogger(__name__)

_ANSWER = datetime.timedelta(seconds=5)  # of a store
_MOST_SAID = 200


@dataclass(frozen=True)
class Line:
    """What one rank has told.

    Attributes:
        beat: how many lines it had put up.
        block: how many blocks it had entered.
        standing: where it stood.
        place: machine and process namespace.
        pid: its process there.
        born: when that was started, in ticks since the machine was.
        left: why it has left the block: "" at its end, None if it has not.
    """

    beat: int
    block: int
    standing: Standing
    place: str
    pid: int
    born: int
    left: str | None = None

    def text(self) -> str:
        """Return it as it is put up."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Line:
        """Return what `text` gave.

        Raises:
            ValueError: it is no line of this version.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            known = {field.name for field in fields(cls)} & found.keys()
            standing = Standing(**found.pop("standing"))
            line = cls(standing=standing, **{key: found[key] for key in known if key in found})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from None
        numbers = line.beat, line.block, line.pid, line.born, standing.step, standing.progress
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"{text:.80} has other types")
        return line

    def is_gone(self) -> bool:
        """Return whether its process is known to have ended; see [Note: whose process]."""
        return self.place == _place() and _born(self.pid) != self.born


class Board:
    """The lines of all ranks of the default process group.

    Args:
        block: how many blocks this process has entered.

    Attributes:
        rank: this one.
        size: the number of ranks.
        lines: the last line of each other rank, as far as there is one.
        changed: when a rank's progress was last seen to change, by this process's clock.
        heard: when its line was.
        answers: whether the store has answered when it was asked last.
    """

    def __init__(self, block: int) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = _get_default_store()
        self._store = store
        with contextlib.suppress(RuntimeError):  # a store that knows no other client of itself
            self._store = store.clone()
            self._store.set_timeout(_ANSWER)
        self._block, self._beat = block, 0
        self._own = _place(), os.getpid(), _born(os.getpid())
        self._known: set[int] = set()
        self._unreadable: set[int] = set()  # of which that was said
        self.lines: dict[int, Line] = {}
        self.changed: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        self.answers = True

    def tell(self, standing: Standing, left: str | None = None) -> bool:
        """Put up this rank's line; return whether the store has taken it."""
        self._beat += 1
        left = None if left is None else left[:_MOST_SAID]
        line = Line(self._beat, self._block, standing, *self._own, left=left)
        try:
            self._store.set(_key(self.rank), line.text())
        except RuntimeError:
            return False
        return True

    def look(self) -> bool:
        """Read what the others have told; return whether the store has answered."""
        try:
            for rank in range(self.size):
                if (
                    rank not in self._known
                    and rank != self.rank
                    and self._store.check([_key(rank)])
                ):
                    self._known.add(rank)
            ranks = sorted(self._known)
            texts = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        except RuntimeError:
            self.answers = False
            return False
        self.answers = True
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            try:
                line, before = Line.read(text.decode()), self.lines.get(rank)
            except ValueError as error:
                self._say_unreadable(rank, error)
                continue  # a rank of which nothing is read counts as silent
            if before is None or line.beat != before.beat or line.pid != before.pid:
                self.heard[rank] = now
            if before is None or line.standing != before.standing or line.block != before.block:
                self.changed[rank] = now
            self.lines[rank] = line
        return True

    def _say_unreadable(self, rank: int, error: ValueError) -> None:
        if rank not in self._unreadable:
            self._unreadable.add(rank)
            logger.warning(
                "what rank %d tells of itself cannot be read (%s): run the same version of "
                "dynoffload on all ranks",
                rank,
                error,
            )


def _key(rank: int) -> str:
    return f"dynoffload/rank/{rank}"


def _place() -> str:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = str(os.getpid())  # other processes cannot be looked at
    return f"{socket.gethostname()} {space}"


def _born(pid: int) -> int:
    """Return when a process was started, in ticks since the machine was; -1: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *values = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(values[18])
