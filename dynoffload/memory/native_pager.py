"""Loads the native pager's library and declares its signatures.

The library is plain C (``native/``), built when the package is installed. It is called through
ctypes, which releases the GIL during each call.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from importlib import machinery
from pathlib import Path

from dynoffload.errors import BackendError

TOTALS = (
    *("bytes_in", "bytes_out", "prefetched_bytes", "used_bytes", "wasted_bytes"),
    *("faults", "stalls", "events_lost", "stall_s"),
)
"""Fields that `NativeCounters` shares with `Counters`; the last is in seconds."""


class NativeEvent(ctypes.Structure):
    """``struct event`` of pager.h."""

    _fields_ = (
        ("start", ctypes.c_double),
        ("end", ctypes.c_double),
        ("nbytes", ctypes.c_uint64),
        ("region", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("cause", ctypes.c_uint16),
    )


class NativeExtent(ctypes.Structure):
    """``struct extent`` of pager.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("fd", "direct")),
        *((name, ctypes.c_int64) for name in ("offset", "nbytes", "size", "modified_ns")),
    )


class NativeCounters(ctypes.Structure):
    """``struct counters`` of pager.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in TOTALS[:-1]),
        (TOTALS[-1], ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("pages_in_use", "pages_taken", "peak_pages")),
        ("error", ctypes.c_int32),
        ("error_region", ctypes.c_uint32),
        ("error_is_write", ctypes.c_int32),
    )


class NativeFailure(ctypes.Structure):
    """``struct failure`` of pager.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("region", ctypes.c_uint32),
    )


class FailureKind(IntEnum):
    """``enum failure_kind`` of pager.h."""

    READ = 1
    WRITE = 2
    PINNED = 3
    LOCKED = 4
    MOVE = 5


EVENT_CAPACITY = 65536

_P = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I64 = ctypes.c_int64
_INT = ctypes.c_int

_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pager_probe": (_INT, ()),
    "pager_open": (_P, (_INT, _U64, _U32, _U32, _U32, _U32, _INT, _P)),
    "pager_close": (None, (_P,)),
    "pager_base": (_U64, (_P,)),
    "pager_set_reserve": (None, (_P, _U32)),
    "pager_limit": (None, (_P, _U32)),
    "pager_create": (_INT, (_P, _U32, _U32, _U32, _U64, _I64)),
    "pager_source": (_INT, (_P, _U32, _P, _U32, ctypes.c_char_p)),
    "pager_sourced": (_INT, (_P, _U32)),
    "pager_discard": (None, (_P, _U32)),
    "pager_clear": (None, (_P, _P, _U32)),
    "pager_is_clear": (None, (_P, _P, _U32, _P)),
    "pager_release": (None, (_P, _U32)),
    "pager_set_patience": (None, (_P, _U32)),
    "pager_acquire": (_INT, (_P, _P, _U32, _INT, _P)),
    "pager_unpin": (None, (_P, _P, _U32)),
    "pager_touch": (None, (_P, _P, _U32)),
    "pager_lock": (_INT, (_P, _P, _U32, _P)),
    "pager_unlock": (None, (_P, _P, _U32)),
    "pager_handed": (_I64, (_P, ctypes.c_double)),
    "pager_show": (_INT, (_P, _U32, _U32, _P)),
    "pager_hide": (None, (_P, _U32, _U32)),
    "pager_exchange": (_INT, (_P, _P, _U32, _P, _P)),
    "pager_plan": (_INT, (_P, _P, _U32, _P, _U32)),
    "pager_advance": (None, (_P, _I64)),
    "pager_states": (None, (_P, _P, _P, _U32)),
    "pager_counters": (None, (_P, _P, _INT)),
    "pager_events": (_U32, (_P, _P)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library.

    Raises:
        BackendError: it was not built when the package was installed.
    """
    here = Path(__file__).resolve().parent
    for suffix in machinery.EXTENSION_SUFFIXES:
        path = here / f"_pager{suffix}"
        if path.exists():
            library = ctypes.CDLL(str(path), use_errno=True)
            break
    else:
        raise BackendError(
            "the native pager was not built: install a C compiler and reinstall dynoffload, or "
            "use backend='mapped'"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
