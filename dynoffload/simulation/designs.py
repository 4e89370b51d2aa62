"""Four ways to give an accelerator more memory, as Heo et al. (2023) set them side by side.

What it is: their rates, and one pool that many devices share, which is ours. What it is not: their
simulator.
"""

from __future__ import annotations

from dataclasses import replace

from dynoffload.simulation.hardware import Accelerator, SharedLink

GB_PER_S = 1e9
DEVICES_PER_NODE = 4


def _design(name: str, remote: SharedLink, network_gb: float) -> Accelerator:
    return Accelerator(name, 2048e12, 4096 * GB_PER_S, remote, SharedLink(network_gb * GB_PER_S))


DESIGNS: dict[int, Accelerator] = {
    1: _design("memory per node", SharedLink(128 * GB_PER_S, DEVICES_PER_NODE), 900),
    2: _design("CXL memory per GPU", SharedLink(512 * GB_PER_S), 900),
    3: _design("integrated, network by CPU", SharedLink(900 * GB_PER_S), 512),
    4: _design("integrated, network by GPU", SharedLink(900 * GB_PER_S), 900),
}
"""By the number that the paper gives them."""


def pooled(sharers: int, pool_links: int = 4) -> Accelerator:
    """Return design 2 with one pool for ``sharers`` devices in place of a memory for each.

    Args:
        sharers: devices whose ports, as fast as in design 2, lead to the pool.
        pool_links: how many such links the pool can serve at full rate.
    """
    private = DESIGNS[2]
    rate = private.remote.bytes_per_s
    return replace(
        private,
        name=f"pool of {pool_links} links for {sharers} GPUs",
        remote=SharedLink(pool_links * rate, sharers, rate),
    )
