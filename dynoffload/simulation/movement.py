"""A step as a sequence of visits to layers, timed with serial or overlapped transfers.

`visits` gives the sequence for a placement, with the regions each visit fetches from and stores to
remote memory. Three functions time it. All devices do the same at the same time.

[Note: two orders]  In *sweeps*, all layers are recomputed before backward begins: weights are read
three times, and the activations of all layers are in remote memory at once. *Beside*, each layer is
recomputed just before its backward: weights are read twice, and activations stay local.

[Note: moving ahead]  While a visit runs, the link first stores the results of the previous visit
and then fetches the regions of the next one, with two buffers for each. Regions shared by two
neighbouring visits stay. The link carries one transfer at a time; a step waits for its first fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from dynoffload.simulation.designs import Placement
from dynoffload.simulation.moe_cluster import GRADIENT, STATE, Layer, MoeShard
from dynoffload.simulation.ranks import Floats, Resource, Timeline
from dynoffload.simulation.roofline import ELEMENT, Accelerator, Operator, SharedLink, work


class Order(Enum):
    """When layers are recomputed; see [Note: two orders]."""

    SWEEPS = "sweeps"
    BESIDE = "beside"


class Update(Enum):
    """Which part of the optimizer belongs to the step."""

    NONE = "none"
    GRADIENTS = "gradients kept"
    BESIDE_MEMORY = "beside remote memory"
    ON_DEVICE = "on the device"


@dataclass(frozen=True)
class Visit:
    """One visit to a layer.

    Attributes:
        operators: the operators that run.
        network_bytes: bytes received from other devices.
        fetched: region -> bytes fetched from remote memory.
        stored: region -> bytes created and stored to remote memory.
    """

    operators: tuple[Operator, ...]
    network_bytes: float
    fetched: Mapping[str, float] = field(default_factory=dict)
    stored: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segments:
    """Seconds of a step: arithmetic, and the exposed time of both memories and the network."""

    compute_s: float
    local_s: float
    remote_s: float
    network_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.busy_s + self.remote_s

    @property
    def busy_s(self) -> float:
        """Seconds of the step if remote memory were infinitely fast."""
        return self.compute_s + self.local_s + self.network_s


def visits(
    shard: MoeShard,
    placement: Placement,
    order: Order = Order.SWEEPS,
    update: Update = Update.NONE,
) -> list[Visit]:
    """Return the visits of a step: forward, the head, recomputation and backward."""
    head = shard.head
    layers = list(enumerate(shard.layers))

    def weights(number: int, layer: Layer) -> dict[str, float]:
        nbytes = ELEMENT * layer.parameters
        return {f"weights {number}": nbytes} if placement.weights else {}

    def checkpoint(number: int) -> dict[str, float]:
        return {f"checkpoint {number}": shard.own} if placement.checkpoints else {}

    def activations(number: int, layer: Layer) -> dict[str, float]:
        return {f"activations {number}": layer.saved} if placement.activations else {}

    found = [
        Visit(layer.forward, layer.forward_network, weights(n, layer), checkpoint(n))
        for n, layer in layers
    ]
    received = head.forward_network + head.backward_network + head.reduced
    found.append(Visit((*head.forward, *head.backward), received))
    if order is Order.SWEEPS:
        for n, layer in layers:
            needed = {**weights(n, layer), **checkpoint(n)}
            made = activations(n, layer)
            found.append(Visit(layer.forward, layer.forward_network, needed, made))
    for n, layer in reversed(layers):
        operators, received = layer.backward, layer.backward_network + layer.reduced
        kept = activations(n, layer)
        if order is Order.BESIDE:
            operators = (*layer.forward, *operators)
            received += layer.forward_network
            kept = checkpoint(n)
        last = _update(shard, layer, n, placement, update)
        needed = {**weights(n, layer), **kept, **last.fetched}
        found.append(Visit(operators, received + last.network_bytes, needed, last.stored))
    return found


def _update(
    shard: MoeShard, layer: Layer, number: int, placement: Placement, update: Update
) -> Visit:
    """Return a layer's update as a separate visit, without its arithmetic."""
    if update is Update.NONE:
        return Visit((), 0.0)
    state = shard.state_bytes(layer)
    parameters = state / STATE
    gradient = {f"gradient {number}": GRADIENT * parameters}
    if update is Update.GRADIENTS:
        return Visit((), 0.0, {}, gradient)
    gathered = ELEMENT * layer.dense * (1 - 1 / shard.division.data)
    if update is Update.BESIDE_MEMORY:
        new = 0.0 if placement.weights else ELEMENT * parameters
        return Visit((), gathered, {}, {**gradient, f"new weights {number}": new})
    new = ELEMENT * layer.parameters if placement.weights else 0.0
    kept = (STATE - GRADIENT) * parameters
    stored = {f"new state {number}": kept, f"new weights {number}": new}
    return Visit((), gathered, {f"state {number}": state}, stored)


def moved_bytes(steps: Sequence[Visit], *, ahead: bool = False) -> float:
    """Return all bytes moved to or from remote memory, serially or ahead."""
    if ahead:
        return sum(fetched + stored for fetched, stored in _planned(steps))
    return sum(sum(v.fetched.values()) + sum(v.stored.values()) for v in steps)


def serial(steps: Sequence[Visit], device: Accelerator) -> Segments:
    """Return the seconds of the step when nothing overlaps."""
    done = [work(visit.operators, device) for visit in steps]
    return Segments(
        sum(w.compute_s for w in done),
        sum(w.local_s for w in done),
        device.remote.seconds(moved_bytes(steps)),
        device.network.seconds(sum(visit.network_bytes for visit in steps)),
    )


def partly_hidden(whole: Segments, share: float) -> Segments:
    """Return a serial step whose transfers overlap with ``share`` (0 to 1) of its other time."""
    return replace(whole, remote_s=max(0.0, whole.remote_s - share * whole.busy_s))


def ahead(steps: Sequence[Visit], device: Accelerator) -> Segments:
    """Return the seconds of the step when transfers overlap; see [Note: moving ahead]."""
    rate, whole, planned = device.remote.share, serial(steps, device), _planned(steps)
    tasks, ended, waited = Timeline(1), list[Floats](), 0.0

    def store(number: int) -> None:
        tasks.add(Resource.LINK, planned[number][1] / rate, [ended[number]])

    for number, (visit, (fetched, _)) in enumerate(zip(steps, planned, strict=True)):
        if number >= 2:  # frees a buffer for this visit's results
            store(number - 2)
        arrived = tasks.add(Resource.LINK, fetched / rate)
        waited += max(0.0, float(arrived[0] - (ended[-1][0] if ended else 0.0)))
        done = work(visit.operators, device)
        busy = done.compute_s + done.local_s + device.network.seconds(visit.network_bytes)
        ended.append(tasks.add(Resource.COMPUTE, busy, [arrived]))
    for number in range(max(0, len(steps) - 2), len(steps)):
        store(number)
    return replace(whole, remote_s=waited + tasks.seconds - float(ended[-1][0]))


def buffer_bytes(steps: Sequence[Visit]) -> float:
    """Return the additional bytes of local memory that moving ahead takes."""
    planned = _planned(steps)
    return max(
        (planned[n + 1][0] if n + 1 < len(planned) else 0.0) + (planned[n - 1][1] if n > 0 else 0.0)
        for n in range(len(planned))
    )


def in_turns(whole: Segments, count: float, link: SharedLink) -> Segments:
    """Return a serial step when the devices of a pool take turns, perfectly staggered.

    Each moves ``count`` bytes at the rate of its port while others compute, or waits if together
    they exceed the pool's rate. This is a lower bound over all orders of the devices.
    """
    alone = count / min(link.port_bytes_per_s, link.bytes_per_s)
    pool = link.sharers * count / link.bytes_per_s
    return replace(whole, remote_s=max(alone, pool - whole.busy_s))


def _planned(steps: Sequence[Visit]) -> list[tuple[float, float]]:
    """Return the bytes each visit fetches and stores if neighbours keep shared regions local."""
    planned = []
    for number, visit in enumerate(steps):
        before = steps[number - 1] if number else None
        after = steps[number + 1] if number + 1 < len(steps) else None
        there = {**before.fetched, **before.stored} if before else {}
        taken = after.fetched if after else {}
        fetched = sum(size for region, size in visit.fetched.items() if region not in there)
        stored = sum(size for region, size in visit.stored.items() if region not in taken)
        planned.append((fetched, stored))
    return planned
