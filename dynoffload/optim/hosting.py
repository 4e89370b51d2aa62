"""Updates on the host: ZeRO-Offload's half of a step (ATC 2021, section 4).

What it is: the loop over tiles in which the crew reads gradients as they arrive, runs torch's fused
kernel over the masters, and rounds them to the parameters' dtype, while the calling thread uploads
what is finished. What it is not: streaming masters through the accelerator; see `streaming`.

[Note: where uploads wait]  What becomes of a parameter is rounded into the memory that its gradient
has come in: pinned, as large, and of no more use. So uploads need no buffers of their own, and
those of a step that is not uploaded before the next one has ended (a delayed one) are kept at no
cost. The next gradient is copied there by the queue for copies out, after a moment of the compute
queue that comes after the upload.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace

import torch

from dynoffload.optim.crew import Crew
from dynoffload.optim.rules import Part, Rule
from dynoffload.optim.shelves import MASTER
from dynoffload.optim.staging import Lease
from dynoffload.optim.stores import Stores
from dynoffload.optim.tiles import Tile
from dynoffload.optim.work import Work, count, mark_uploaded, upload


class Hosting:
    """Computes updates on the host.

    Args:
        rule: the optimizer's code.
        crew: that runs it.
        stores: whose masters and moments they are.
    """

    def __init__(self, rule: Rule, crew: Crew, stores: Stores) -> None:
        self._rule, self._crew, self._stores = rule, crew, stores
        self._scratch = torch.empty(0)

    def begin(self, work: Work, on_tile: Callable[[Tile | None], None]) -> Future[None]:
        """Have the crew make updates, beside the calling thread.

        Args:
            work: the updates.
            on_tile: called by the crew with each tile that is finished, and with None at the end,
                whatever happened.
        """
        # What was computed on the caller's stream is read there, and not on that of a thread.
        here = replace(work, reading=work.reading.to(torch.device("cpu")))
        return self._crew.give(self._run, here, on_tile)

    def run(self, work: Work) -> KeyboardInterrupt | None:
        """Make updates and upload them; the compute queue has all uploads when it returns.

        Returns:
            Ctrl-C, if it came meanwhile: the step was made nevertheless, and whoever called raises
            it.

        Raises:
            SpillError: a file cannot be read or written; some updates were made, others not.
        """
        finished: queue.SimpleQueue[Tile | None] = queue.SimpleQueue()
        made = self.begin(work, finished.put)
        interrupt = None
        try:
            while (tile := finished.get()) is not None:
                upload(tile, work.arrived)
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            wait([made])  # the crew must not run on while an error is told
        made.result()
        if interrupt is not None:
            for tile in work.tiles:  # those that were uploaded already, too: it does no harm
                upload(tile, work.arrived)
        mark_uploaded(list(work.groups))
        return interrupt

    def _run(self, work: Work, on_tile: Callable[[Tile | None], None]) -> None:
        try:
            with torch.no_grad():
                with contextlib.closing(self._stores.staging.through(work.tiles)) as leases:
                    for lease in leases:
                        self._update(lease, work)
                        on_tile(lease.tile)
                count(work)
        finally:
            on_tile(None)

    def _update(self, lease: Lease, work: Work) -> None:
        tile = lease.tile
        needed = sum(end - begin for _, begin, end in tile.pieces)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        parts: list[Part] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        taken = 0
        views = tile.views(lease.memory, packed=lease.packed)
        for (entry, begin, end), kept in zip(tile.pieces, views, strict=True):
            group = work.groups.get(entry)
            if group is None:
                continue
            arrived = work.arrived[entry]
            arrived.wait()
            gradient = arrived.memory[begin:end]
            wide = work.reading.read(gradient, self._scratch[taken:])
            taken += end - begin
            master = kept.pop(MASTER)
            parts.append(Part(master, wide, kept, float(entry.step), group))
            results.append((gradient, master))
        self._rule.run(parts)
        for gradient, master in results:  # see [Note: where uploads wait]
            gradient.copy_(master)
