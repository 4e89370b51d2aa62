"""A step as visits to layers, and how long it takes when bytes move serially, or ahead.

The sequence of visits that a placement makes of a step, with the regions each needs from remote
memory and leaves there, and three ways to time it. All devices do the same at the same time.

[Note: two orders]  In *sweeps*, all layers are recomputed before backward begins: weights are read
three times, and the activations of all layers lie in remote memory at once. *Beside*, each layer is
recomputed just before its backward: weights are read twice, and activations never leave.

[Note: moving ahead]  While a visit runs, the link first stores what the visit before it made and
then fetches what the next one needs: two buffers for each. What two neighbouring visits share does
not move. The link carries one transfer at a time, and the first fetch of a step is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from dynoffload.simulation.designs import Placement
from dynoffload.simulation.moe_cluster import Layer, MoeShard
from dynoffload.simulation.ranks import Floats, Resource, Timeline
from dynoffload.simulation.roofline import Accelerator, Operator, SharedLink, work


class Order(Enum):
    """Where recomputation stands; see [Note: two orders]."""

    SWEEPS = "sweeps"
    BESIDE = "beside"


class Update(Enum):
    """What of the optimizer belongs to the step."""

    NONE = "none"
    GRADIENTS = "gradients kept"
    BESIDE_MEMORY = "beside remote memory"
    ON_DEVICE = "on the device"


@dataclass(frozen=True)
class Visit:
    """What happens to one layer at one time.

    Attributes:
        operators: that run.
        network_bytes: received from other devices.
        fetched: region -> bytes that must come from remote memory.
        stored: region -> bytes that are made and belong to remote memory.
    """

    operators: tuple[Operator, ...]
    network_bytes: float
    fetched: Mapping[str, float] = field(default_factory=dict)
    stored: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segments:
    """Seconds of a step: arithmetic, and what three other things add to it."""

    compute_s: float
    local_s: float
    remote_s: float
    network_s: float

    @property
    def total_s(self) -> float:
        """The step."""
        return self.busy_s + self.remote_s

    @property
    def busy_s(self) -> float:
        """The step, were remote memory infinitely fast."""
        return self.compute_s + self.local_s + self.network_s


def visits(
    shard: MoeShard,
    placement: Placement,
    order: Order = Order.SWEEPS,
    update: Update = Update.NONE,
) -> list[Visit]:
    """Return the visits of a step: forward, the head, recomputation and backward."""
    element, head = shard.precision.element, shard.head
    layers = list(enumerate(shard.layers))

    def weights(number: int, layer: Layer) -> dict[str, float]:
        nbytes = element * layer.parameters
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
    """Return the update of a layer as a visit of its own, without its arithmetic."""
    if update is Update.NONE:
        return Visit((), 0.0)
    precision = shard.precision
    state = shard.state_bytes(layer)
    parameters = state / precision.state
    gradient = {f"gradient {number}": precision.gradient * parameters}
    if update is Update.GRADIENTS:
        return Visit((), 0.0, {}, gradient)
    gathered = precision.element * layer.dense * (1 - 1 / shard.division.data)
    if update is Update.BESIDE_MEMORY:
        new = 0.0 if placement.weights else precision.element * parameters
        return Visit((), gathered, {}, {**gradient, f"new weights {number}": new})
    new = precision.element * layer.parameters if placement.weights else 0.0
    kept = (precision.state - precision.gradient) * parameters
    stored = {f"new state {number}": kept, f"new weights {number}": new}
    return Visit((), gathered, {f"state {number}": state}, stored)


def moved_bytes(steps: Sequence[Visit], *, ahead: bool = False) -> float:
    """Return all bytes that cross to or from remote memory, serially or ahead."""
    if ahead:
        return sum(fetched + stored for fetched, stored in _planned(steps))
    return sum(sum(v.fetched.values()) + sum(v.stored.values()) for v in steps)


def serial(steps: Sequence[Visit], device: Accelerator) -> Segments:
    """Return the step when nothing overlaps."""
    done = [work(visit.operators, device) for visit in steps]
    return Segments(
        sum(w.compute_s for w in done),
        sum(w.local_s for w in done),
        device.remote.seconds(moved_bytes(steps)),
        device.network.seconds(sum(visit.network_bytes for visit in steps)),
    )


def partly_hidden(whole: Segments, share: float) -> Segments:
    """Return a serial step whose movement runs under ``share`` of the rest, 0 to 1."""
    return replace(whole, remote_s=max(0.0, whole.remote_s - share * whole.busy_s))


def ahead(steps: Sequence[Visit], device: Accelerator) -> Segments:
    """Return the step when bytes move while layers run; see [Note: moving ahead]."""
    rate, whole, planned = device.remote.share, serial(steps, device), _planned(steps)
    tasks, ended = Timeline(1), list[Floats]()

    def store(number: int) -> None:
        tasks.add(Resource.LINK, planned[number][1] / rate, [ended[number]])

    for number, (visit, (fetched, _)) in enumerate(zip(steps, planned, strict=True)):
        if number >= 2:  # then a buffer is free for what will be made
            store(number - 2)
        arrived = tasks.add(Resource.LINK, fetched / rate)
        done = work(visit.operators, device)
        busy = done.compute_s + done.local_s + device.network.seconds(visit.network_bytes)
        ended.append(tasks.add(Resource.COMPUTE, busy, [arrived]))
    for number in range(max(0, len(steps) - 2), len(steps)):
        store(number)
    return replace(whole, remote_s=tasks.seconds - whole.busy_s)


def buffer_bytes(steps: Sequence[Visit]) -> float:
    """Return the local memory that moving ahead takes beyond moving serially."""
    planned = _planned(steps)
    return max(
        (planned[n + 1][0] if n + 1 < len(planned) else 0.0) + (planned[n - 1][1] if n > 0 else 0.0)
        for n in range(len(planned))
    )


def in_turns(whole: Segments, count: float, link: SharedLink) -> Segments:
    """Return a serial step when the devices of a pool move in turns, perfectly staggered.

    Each moves ``count`` bytes at the rate of its port while others compute, or waits for the pool
    where all of them together ask more of it than it gives: no order of theirs is faster.
    """
    alone = count / min(link.port_bytes_per_s, link.bytes_per_s)
    pool = link.sharers * count / link.bytes_per_s
    return replace(whole, remote_s=max(alone, pool - whole.busy_s))


def _planned(steps: Sequence[Visit]) -> list[tuple[float, float]]:
    """Return the bytes that each visit fetches and stores when neighbours keep what they share."""
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
