"""The guard thread: makes a deferred update when another thread touches its tensors."""

from __future__ import annotations

import threading

from dynoffload.memory.device import Device
from dynoffload.memory.pager import Pager
from dynoffload.runtime.updates.pending import PendingUpdates


class Guard:
    """Serves the accesses that a pager hands over until `end` is called."""

    def __init__(self, device: Device, pending: PendingUpdates) -> None:
        assert isinstance(device, Pager)
        self._device, self._pending = device, pending
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dynoffload-guard", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            region = self._device.handed(0.05)
            if region >= 0:
                self._pending.serve(region)
            elif region == -2:
                return

    def end(self) -> None:
        """Finish the current access, and end the thread."""
        self._closing.set()
        self._thread.join()
