"""The watch over a mapped spill file in debug mode: what is absent cannot be read unchecked.

What it is: the way to the watch in ``native/debug.c``, which takes the rights to an absent region's
addresses away and compares its bytes with a checksum before it gives them back, also to an access
that nobody announced. What it is not: the pager's checks, which are a part of its transfers.

As long as a region is absent, a system call that is given its addresses fails with EFAULT.
"""

from __future__ import annotations

import ctypes
import os

from dynoffload.errors import BackendError
from dynoffload.memory import native_pager


class Watch:
    """Watches over regions of a mapping; every region is named by its offset in the file.

    Args:
        address: of the mapping.
        page_bytes: all regions begin and end at multiples of it.
        pages: of the mapping.
        fd: the file behind it, opened without O_DIRECT.

    Raises:
        BackendError: the native library is missing, or there is no memory for the watch.
    """

    def __init__(self, address: int, page_bytes: int, pages: int, fd: int) -> None:
        self._page = page_bytes
        try:
            self._native = native_pager.load()
        except (BackendError, OSError) as error:
            raise BackendError(
                f"debug mode needs the native library, also with mapped files: {error}; or set "
                "debug=False (DYNOFFLOAD_DEBUG=0)"
            ) from error
        number = ctypes.c_int()
        self._handle = self._native.watch_open(address, page_bytes, pages, fd, ctypes.byref(number))
        if not self._handle:
            raise BackendError(
                f"debug mode cannot watch over memory here: {os.strerror(number.value)}; set "
                "debug=False (DYNOFFLOAD_DEBUG=0)"
            )

    def begin(self, offset: int, length: int) -> None:
        """A region without content begins."""
        _check(self._native.watch_begin(self._handle, offset // self._page, length // self._page))

    def shut(self, offset: int) -> None:
        """The region is about to leave: take its checksum, and keep everybody out."""
        _check(self._native.watch_shut(self._handle, offset // self._page))

    def admit(self, offset: int) -> None:
        """The region is about to be used.

        Raises:
            OSError: it cannot be read; ``EBADMSG`` if its bytes are not those that left.
        """
        _check(self._native.watch_admit(self._handle, offset // self._page))

    def forget(self, offset: int) -> None:
        """The region's bytes count no more."""
        _check(self._native.watch_forget(self._handle, offset // self._page))

    def end(self, offset: int) -> None:
        """The region is no more: an access to it ends the process."""
        _check(self._native.watch_end(self._handle, offset // self._page))

    def close(self) -> None:
        """The mapping is about to go."""
        self._native.watch_close(self._handle)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
