"""What samples leave in memory while paging has stepped aside: `dynoffload.runtime.resident`.

Two forwards before a backward leave what both save. Between them the process may free memory that
no forward has left, such as the last sample of a loader; that must not lower what is counted.
"""

from __future__ import annotations

import torch
from torch import nn

from dynoffload.memory.heap import live_bytes
from dynoffload.runtime.resident import Growth
from dynoffload.units import MiB

_SLACK = MiB  # what torch and Python allocate besides
_ROWS, _WIDTH = 4096, 512  # an output of 8 MiB


def network() -> nn.Module:
    """Return a network whose forward leaves one output of each of its tanh."""
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh())


def _counts() -> bool:
    return live_bytes() is not None


def test_what_others_free_does_not_hide_what_a_forward_left() -> None:
    model = network()
    growth = Growth(model)
    x = torch.randn(_ROWS, _WIDTH)
    model(x)  # the first allocates for good
    others = torch.zeros(12 * MiB // 4).add_(1)
    growth.begin()
    first = model(x)
    left = growth.finish(first)
    if not _counts() or left < 8 * MiB:
        left = 0  # another C library: nothing is counted exactly
    del others
    growth.begin()
    second = model(x)
    assert growth.finish(second) >= 2 * left - _SLACK
    del first, second


def test_a_graph_that_is_dropped_has_ended() -> None:
    model = network()
    growth = Growth(model)
    x = torch.randn(_ROWS, _WIDTH)
    growth.begin()
    out = model(x)
    left = growth.finish([out])
    del out
    growth.begin()
    out = model(x)
    assert growth.finish([out]) <= left + _SLACK
