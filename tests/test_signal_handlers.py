"""Handlers of signals are put off while the library works, and are back in their places after it:
unit tests of `runtime.interrupts`; see `test_interrupts` for blocks and steps.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest
from signalled import At, handled, tracing

from dynoffload.runtime import interrupts
from dynoffload.runtime.interrupts import interruptible, let_come, uninterrupted


def test_handlers_are_put_back_whatever_is_raised_meanwhile() -> None:
    """One signal comes within the call, and another, whose handler raises too, at any line of what
    puts handlers off and admits them."""
    numbers = [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    @uninterrupted
    def call() -> None:
        signal.raise_signal(signal.SIGTERM)

    def sends_at(line: int) -> bool:
        """Send a signal at a line; return whether there are so many."""
        at = At(line, interrupts.__file__, number=signal.SIGUSR1)
        came.clear()
        with pytest.raises(KeyboardInterrupt), tracing(at):
            call()
        return at.lines >= line

    with handled(interrupt, *numbers):
        line = 1
        while sends_at(line):
            assert came.count(signal.SIGUSR1) == 1, line
            assert [signal.getsignal(number) for number in numbers] == [interrupt] * 3, line
            line += 1
    assert line > 20


def test_handlers_of_the_users_are_kept() -> None:
    """One that returns, one set between two calls, and one that the call itself sets."""
    came: list[int] = []
    with handled(lambda number, frame: came.append(number), signal.SIGTERM):

        @uninterrupted
        def call() -> str:
            signal.raise_signal(signal.SIGTERM)
            assert not came
            return "result"

        assert call() == "result"
        assert came == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(-number))
        came.clear()
        assert call() == "result"
        assert came == [-signal.SIGTERM]

        @uninterrupted
        def sets() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        sets()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_signals_are_let_in_where_it_is_said() -> None:
    """And put off again afterwards."""
    done: list[str] = []

    @uninterrupted
    def call() -> None:
        let_come()
        signal.raise_signal(signal.SIGINT)
        done.append("before")
        try:
            let_come()
        except KeyboardInterrupt:
            done.append("let in")
        signal.raise_signal(signal.SIGINT)
        done.append("after")

    with handled():
        with pytest.raises(KeyboardInterrupt):
            call()
        let_come()
    assert done == ["before", "let in", "after"]


def test_what_is_the_users_is_interrupted_at_once() -> None:
    """Whatever line of what lets signals through another comes at, they are put off again until
    the outermost call is over, and the handlers are in their places then."""
    numbers = [signal.SIGINT, signal.SIGUSR1]
    came: list[int] = []
    done: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        came.append(number)
        raise KeyboardInterrupt

    @interruptible
    def users() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("went on")

    @uninterrupted
    def inner() -> None:
        users()

    @uninterrupted
    def outer(trace: Any) -> None:
        sys.settrace(trace)
        try:
            inner()
        except KeyboardInterrupt:
            sys.settrace(None)
            seen = len(came)
            signal.raise_signal(signal.SIGINT)
            assert len(came) == seen, "signals come, though they are held off"
            done.append("undone")
        finally:
            sys.settrace(None)

    def sends_at(line: int) -> bool:
        at = At(line, interrupts.__file__, number=signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            outer(at)
        return at.lines >= line

    with handled(interrupt, *numbers):
        line = 1
        while sends_at(line):
            assert [signal.getsignal(number) for number in numbers] == [interrupt] * 2, line
            assert (interrupts._depth, interrupts._held) == (0, None), line
            assert done == ["undone"], line
            assert came.count(signal.SIGUSR1) == 1, line
            came.clear()
            done.clear()
            line += 1
    assert line > 20
