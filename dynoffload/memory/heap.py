"""The C library's heap: what was freed is not given back to the system by itself.

[Note: freed heap]  glibc serves tensors up to 32 MiB from its heap once some were freed, and keeps
what is freed below the top: 1.4 GB after one forward of a 330M-parameter network whose live
temporaries took 70 MB. A lower mmap threshold avoids that but zeroes every temporary anew, which
cost 10-20% of a step. Handing the free pages back only when they have grown past a slack costs
next to nothing.
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
    """Return a function of the C library; None where there is none, as in another library."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    if name == "mallinfo2":  # of glibc 2.33
        found.restype = _Counts
    return cast(Callable[..., Any], found)


def live_bytes() -> int | None:
    """Return the bytes of the heap that are in use, mapped ones too, in a few microseconds.

    None where the C library does not tell, or another allocator has taken its place.
    """
    count = _function("mallinfo2")
    if count is None:
        return None
    counts = count()
    return int(counts.uordblks + counts.hblkhd) or None


def give_back() -> bool:
    """Hand the heap's free pages back to the system; return whether the C library can."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))
    return trim is not None
