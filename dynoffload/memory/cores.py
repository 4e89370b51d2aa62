"""Memory nodes and their cores, and which of them a process updates parameters on: its share.

Read from Linux's /sys, torchrun's variables and the process's affinity;
`dynoffload.optim.crew` makes and binds the threads.

An accelerator hangs on one memory node (NUMA), and host memory of another node is slower to reach
for it and for the cores here. Ranks of one machine that have accelerators on one node share its
cores. A launcher that binds its ranks to cores of their own has divided them already; the number of
threads is fixed with ``threads=`` there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_PCI = "sys/bus/pci/devices"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class Cores:
    """Where updates are computed.

    Attributes:
        numbers: of the cores.
        node: memory node of the accelerator; -1 where none is known, or none of its cores is ours.
    """

    numbers: tuple[int, ...]
    node: int


def cores_of_list(text: str) -> set[int]:
    """Return the cores that a list of the kernel names, such as ``"0-3,8"``.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if part:
            found.update(range(int(first), int(last if dash else first) + 1))
    return found


def node_of(address: str | None, root: Path = Path("/")) -> int:
    """Return the memory node of a PCI device such as ``"0000:3b:00.0"``; -1 if nobody knows."""
    if address is None:
        return -1
    try:
        return int((root / _PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def nodes(root: Path = Path("/")) -> dict[int, set[int]]:
    """Return the cores of each memory node; none where the system does not say."""
    found = {}
    for folder in sorted((root / _NODES).glob("node[0-9]*")):
        try:
            found[int(folder.name.removeprefix("node"))] = cores_of_list(
                (folder / "cpulist").read_text()
            )
        except (OSError, ValueError):
            continue
    return found


def address_of(device: torch.device) -> str | None:
    """Return the PCI address of an accelerator, as /sys writes it; None where torch has none."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, number = (
            int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
        )
    except AttributeError:  # of a build for other hardware
        return None
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def cores_for(
    address: str | None,
    peers: Sequence[str | None] = (),
    *,
    affinity: Collection[int] | None = None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Cores:
    """Return the cores on which this process updates the parameters of an accelerator.

    They are those of the process's affinity that lie on the accelerator's node, or all of the
    affinity where the node is not known or has none of them; split evenly among the ranks that
    share them. Nobody gets none: ranks that are more than cores share those.

    Args:
        address: of the accelerator on the PCI bus, or None.
        peers: the addresses of the accelerators of all ranks of this machine, by rank, where they
            are known: ranks of the same node share its cores. Else all ranks are taken to.
        affinity: cores that the process may use; the system's word by default.
        environment: torchrun's variables, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        root: of the file system.
    """
    own = _affinity() if affinity is None else set(affinity)
    node = node_of(address, root)
    here = sorted(nodes(root).get(node, set()) & own)
    if not here:
        node, here = -1, sorted(own)
    ranks = max(1, _number(environment, "LOCAL_WORLD_SIZE", 1))
    rank = _number(environment, "LOCAL_RANK", 0) % ranks
    if node >= 0 and len(peers) >= ranks and peers[rank] == address:
        sharing = [other for other in range(ranks) if node_of(peers[other], root) == node]
        ranks, rank = len(sharing), sharing.index(rank)
    begin, end = (len(here) * at // ranks for at in (rank, rank + 1))
    if begin == end:
        return Cores((here[rank % len(here)],), node)
    return Cores(tuple(here[begin:end]), node)


def _affinity() -> set[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environment.get(name, default))
    except ValueError:
        return default
