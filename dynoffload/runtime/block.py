"""The block that ``offload()`` returns: its beginning and its end are atomic."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from dynoffload.errors import ConfigError
from dynoffload.runtime.budgeted import BudgetedSession
from dynoffload.runtime.frames import clear_frames
from dynoffload.runtime.interrupts import admit, hold
from dynoffload.runtime.session import Session


class Planned(NamedTuple):
    """What entering a block will do; nothing has changed yet."""

    block: contextlib.AbstractContextManager[Session]  # undoes its beginning if that fails
    report: Callable[[Session], None]  # called after the block has ended


class OffloadBlock(contextlib.AbstractContextManager[Session]):
    """What `offload` returns: entered once, by ``with`` or `start`, it yields the session.

    Until then nothing is offloaded. A block that is never entered is probably a mistake, so a
    `RuntimeWarning` is issued.

    It ends when ``with`` is left, when the session's ``close()`` is called, or when the interpreter
    exits, whichever comes first. No tensor may remain in paged memory at exit.

    ``with`` calls `__exit__` only after `__enter__` has returned. A signal that arrives in between
    is deferred, and an exception from its handler undoes the beginning.
    """

    def __init__(self, plan: Callable[[], Planned]) -> None:
        self._plan = plan
        self._entered = self._left = False
        caller = sys._getframe(2)  # of `offload`
        place = caller.f_code.co_filename, caller.f_lineno
        self._forgotten = weakref.finalize(self, _warn_of_forgotten, *place)

    def start(self) -> Session:
        """Enter the block where ``with`` is impractical, such as across cells of a notebook.

        Returns:
            The session, whose ``close()`` ends the block.

        Raises:
            DynOffloadError: see `offload`.
        """
        return self.__enter__()

    def __enter__(self) -> Session:
        if self._entered:
            raise ConfigError(
                "this offload() block was entered before: each 'with' needs an offload() of its own"
            )
        self._entered = True
        self._pid = os.getpid()
        self._forgotten.detach()
        self._planned = self._plan()
        begun = False
        try:
            hold()
            try:
                self._session = self._planned.block.__enter__()
                begun = True
                self._session._leave_block = self._leave_now
                if not _entered:
                    atexit.register(leave_all)
                _entered.append(self)
            finally:
                admit()
            return self._session
        except BaseException as error:
            if begun:
                self._leave(type(error), error, error.__traceback__, undo=True)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._left:
            return None
        try:
            return self._leave(kind, error, trace)
        finally:
            if os.getpid() == self._pid:  # else the block belongs to the parent process
                self._planned.report(self._session)

    def _leave_now(self) -> None:
        self.__exit__(None, None, None)

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        *,
        undo: bool = False,
    ) -> bool | None:
        try:
            hold()
        except BaseException:  # from an earlier signal; the block ends all the same
            self._leave(kind, error, trace, undo=undo)
            raise
        self._left, self._session._leave_block = True, None
        _entered.remove(self)
        if not _entered:
            atexit.unregister(leave_all)
        try:
            if undo and isinstance(self._session, BudgetedSession):
                self._session._undo(error)
            clear_frames(error)
            return self._planned.block.__exit__(kind, error, trace)
        except BaseException as ending:
            known = error is None or ending in (error, error.__cause__, error.__context__)
            if not known and ending.__cause__ is ending.__context__ is None:
                ending.__context__ = error  # which `ExitStack.close` drops
            raise
        finally:
            admit()


_entered: list[OffloadBlock] = []  # blocks entered and not left, in order


def leave_all() -> None:
    """Leave the open blocks, last first; called when the interpreter exits."""
    with contextlib.ExitStack() as each:
        for block in _entered:
            if block._pid == os.getpid():  # else this is a forked child, and the block its parent's
                each.callback(block._leave_now)


def _warn_of_forgotten(file: str, line: int) -> None:
    warnings.warn_explicit(
        "offload() was called without 'with', so nothing was offloaded: write "
        "'with dynoffload.offload(...) as session:' around the training loop",
        RuntimeWarning,
        file,
        line,
    )
