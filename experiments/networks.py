"""Links between processes of one machine that are as slow as one wants.

`namespaces` gives each rank a network namespace of its own on one bridge; `limit_link` slows what
leaves a rank. Where namespaces cannot be made, every exchange of `SlowExchange` takes the time of
its bytes. There is no latency, and the bridge is no bottleneck.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.exchange import Exchange, Pending

_numbers = itertools.count()

_NEW_NETWORK = 0x40000000  # of Linux

DEVICE = "eth0"
"""The name of a rank's end of its link."""


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}")


@contextlib.contextmanager
def namespaces(ranks: int) -> Iterator[list[str]]:
    """Yield the names of network namespaces whose links meet in a bridge; they are removed at last.

    Raises:
        ConfigError: the tools ip and tc are missing, or this user may not make them.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is missing: install iproute2, or pass links='delays'")
    mark = f"{os.getpid() % 100_000}x{next(_numbers)}"  # a name is gone a while after its removal
    bridge, names = f"dyb{mark}", [f"dyn{mark}r{rank}" for rank in range(ranks)]
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "link", "set", bridge, "up")
        for rank, name in enumerate(names):
            outer = f"dyv{mark}r{rank}"
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", outer, "type", "veth", "peer", "name", DEVICE, "netns", name)
            _call("ip", "link", "set", outer, "master", bridge)
            _call("ip", "link", "set", outer, "up")
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"10.113.0.{rank + 1}/24", "dev", DEVICE)
            _call(*inside, "link", "set", DEVICE, "up")
            _call(*inside, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # a link goes with its namespace
            with contextlib.suppress(ConfigError, subprocess.TimeoutExpired):
                _call("ip", "netns", "del", name)
        with contextlib.suppress(ConfigError, subprocess.TimeoutExpired):
            _call("ip", "link", "del", bridge)


def enter(namespace: str) -> None:
    """Have this thread, and those that it starts from now on, be in a network namespace."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def limit_link(mbit: float) -> None:
    """Have what leaves this process's namespace pass at ``mbit`` million bits a second."""
    burst = max(int(mbit * 1e6 / 8 / 250), 64_000)  # what passes in a tick
    _call(
        "tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf",
        "rate", f"{mbit}mbit", "burst", str(burst), "limit", "100000000",
    )  # fmt: skip


class SlowExchange(Exchange):
    """An exchange whose bytes to other ranks take a link's time, one after the other.

    Attributes:
        rate: bytes a second.
    """

    rate = float("inf")
    _free = 0.0

    def start(
        self,
        into: torch.Tensor,
        given: torch.Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        what: str,
    ) -> Pending:
        """See `Exchange.start`."""
        row = given[0].numel() * given.element_size() if len(given) else 0
        others = sum(rows for rank, rows in enumerate(gives) if rank != self.rank)
        pending = super().start(into, given, takes, gives, what)
        self._free = max(self._free, time.monotonic()) + others * row / self.rate
        return Pending(_Due(pending, self._free), self.timeout, what, (), self._waited)


class _Due:
    """Stands for an exchange that has arrived once it is due."""

    def __init__(self, pending: Pending, due: float) -> None:
        self._pending, self._due = pending, due

    def wait(self, *_: Any) -> None:
        self._pending.wait()
        time.sleep(max(self._due - time.monotonic(), 0.0))
