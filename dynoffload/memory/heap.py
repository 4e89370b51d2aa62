"""Returns free memory of the C library's heap to the system.

[Note: freed heap]  Once some tensors were freed, glibc serves tensors up to 32 MiB from its heap
and keeps what is freed below the top. That was 1.4 GB after one forward of a 330M-parameter network
whose live temporaries took 70 MB. A lower mmap threshold avoids that, but then every temporary is
zeroed again, which cost 10-20% of a step. Returning free pages only beyond a slack is almost free.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, cast


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library, or None if this library lacks it."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    if name == "mallinfo2":  # since glibc 2.33
        found.restype = _Counts
    return cast(Callable[..., Any], found)


def live_bytes() -> int | None:
    """Return the heap bytes in use, mmapped blocks included; takes a few microseconds.

    None if the C library does not count them, or another allocator replaces it.
    """
    count = _function("mallinfo2")
    if count is None:
        return None
    counts = count()
    return int(counts.uordblks + counts.hblkhd) or None


def give_back() -> bool:
    """Return the heap's free pages to the system; return whether the C library can."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))
    return trim is not None
