"""Whatever is done with a device, bytes survive and fast memory never passes its capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from devices import (
    SMALL,
    each_device,
    opened,
    pattern,
    schedule,
    view,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scans import compared

from dynoffload.memory.device import Device
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Use


@st.composite
def plans(draw: st.DrawFn, count: int) -> tuple[str, list[int], list[tuple[int, int, int]]]:
    """Return a policy's name, or "wrong"; an order of regions; actions that nobody checked."""
    name = draw(st.sampled_from(["look-ahead", "on-demand", "wrong"]))
    order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    actions = draw(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, count)), max_size=12
        )
    )
    return name, order, sorted(actions)


def steps(count: int) -> st.SearchStrategy[list[Any]]:
    """Return a list of things to do with ``count`` regions."""
    one = st.integers(0, count - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["write", "read", "acquire", "touch", "pin", "unpin"]), one),
            st.tuples(st.sampled_from(["silent write", "discard", "clear"]), one),
            st.tuples(st.sampled_from(["renew", "advance"]), one),
            st.tuples(st.just("copy"), one, one),
            st.tuples(st.just("follow"), plans(count)),
        ),
        min_size=5,
        max_size=40,
    )


class Machine:
    """A device beside what its regions must hold."""

    def __init__(self, device: Device, sizes: list[int]) -> None:
        self.device, self.sizes = device, sizes
        self.regions = [device.allocate(size) for size in sizes]
        self.content: list[torch.Tensor | None] = [None] * len(sizes)
        self.pins = [0] * len(sizes)
        self.seed = 0

    def held(self) -> int:
        """Return the pages that pins hold."""
        pages = [self.device.size(r) // self.device.page_bytes for r in self.regions]
        return sum(n for n, pins in zip(pages, self.pins, strict=True) if pins)

    def write(self, i: int, announced: bool) -> None:
        self.seed += 1
        if announced:
            self.device.acquire([self.regions[i]])
        self.content[i] = pattern(self.sizes[i], self.seed)
        view(self.device, self.regions[i]).copy_(self.content[i])

    def check(self, i: int) -> None:
        expected = self.content[i]
        if expected is not None:
            assert torch.equal(view(self.device, self.regions[i]), expected)

    def run(self, step: Any) -> None:
        name, i, *rest = step
        device = self.device
        region = self.regions[i] if isinstance(i, int) else -1
        if name in ("write", "silent write"):
            self.write(i, name == "write")
        elif name == "read":
            self.check(i)
        elif name == "acquire":
            device.acquire([region])
            self.check(i)
        elif name == "touch":
            device.touch(self.regions)
        elif name == "pin":
            pages = device.size(region) // device.page_bytes
            if self.pins[i] or self.held() + pages <= 4:  # the rest must fit the largest region
                device.acquire([region], pin=True)
                self.pins[i] += 1
                assert region in device.resident()
        elif name == "unpin" and self.pins[i]:
            device.unpin([region])
            self.pins[i] -= 1
        elif name == "discard" and not self.pins[i]:
            device.discard(region)
            self.content[i] = None
        elif name == "clear" and not self.pins[i]:
            device.clear([region])
            self.content[i] = torch.zeros(self.sizes[i], dtype=torch.uint8)
            self.check(i)
        elif name == "renew" and not self.pins[i]:
            device.release(region)
            self.content[i] = None
            self.regions[i] = device.allocate(self.sizes[i])
        elif name == "copy" and self.sizes[i] == self.sizes[rest[0]] and i != rest[0]:
            both = 2 * (device.size(region) // device.page_bytes)
            if self.content[i] is not None and self.held() + both <= 8:
                view(device, self.regions[rest[0]]).copy_(view(device, region))
                self.content[rest[0]] = self.content[i]
        elif name == "advance":
            device.advance(i)
        elif name == "follow":
            self.follow(*i)

    def follow(self, name: str, order: list[int], actions: list[tuple[int, int, int]]) -> None:
        device = self.device
        uses = [Use((self.regions[i],)) for i in order]
        if name == "wrong":
            names = [*self.regions, 60000]
            plan = schedule(*(Action(at, Kind(kind), names[i]) for at, kind, i in actions))
        else:
            sizes = [device.size(region) for region in range(max(self.regions) + 1)]
            here = [region for region in device.resident() if region < len(sizes)]
            ahead = LookAhead().plan(uses, sizes, device.capacity, here, here)
            plan = ahead if name == "look-ahead" else schedule()
        device.follow(uses, plan)


@each_device()
def test_bytes_survive_anything(kind: str, page: int, tmp_path: Path) -> None:
    """On an accelerator whatever its streams do, with host memory for all or with a file below.
    What is evicted is what a scan of all regions finds."""
    count = 5
    options = st.just({})
    if kind == "accelerator":
        budget = st.sampled_from([None, 4 * page, 9 * page, 30 * page])
        options = st.fixed_dictionaries({"seed": st.integers(0, 1000), "host_budget": budget})

    @settings(
        max_examples=80 if page == SMALL else 20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        pages=st.lists(st.integers(1, 4), min_size=count, max_size=count),
        less=st.integers(0, SMALL - 1),
        work=steps(count),
        options=options,
    )
    def run(pages: list[int], less: int, work: list[Any], options: dict[str, Any]) -> None:
        with compared(), opened(kind, 8 * page, page, tmp_path, **options) as device:
            machine = Machine(device, [n * page - less for n in pages])
            for step in work:
                machine.run(step)
                counters = device.counters()
                assert counters.peak_bytes <= device.capacity
                assert counters.resident_bytes <= device.capacity
                assert sum(map(device.size, device.resident())) <= device.capacity
            for i in range(count):
                machine.check(i)

    run()
