"""Runs featurizers and probes, code of the user's that only advises.

It runs without gradients, random numbers that it draws are drawn again, and writes into its
arguments are detected. Writes into weights, buffers, or the generators of Python and numpy are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dynoffload.errors import TraceError


@contextmanager
def advising(who: str, given: Any) -> Iterator[None]:
    """Let the body change nothing of what the network computes.

    Args:
        who: what runs there, for messages.
        given: its arguments, in lists, tuples and dicts of any depth.

    Raises:
        TraceError: it wrote into one of them: the forward would go on with other values.
    """
    leaves = tree_leaves(given)
    tensors = [one for one in leaves if isinstance(one, Tensor) and not one.is_inference()]
    versions = [one._version for one in tensors]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _uncached():
        yield
    if [one._version for one in tensors] != versions:
        raise TraceError(
            f"{who} writes into what its module is given, and changes what the network computes: "
            "have it work on copies"
        )


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast keep no weight that it casts here: one that was cast without gradients would
    stand in for it in the forward itself."""
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
