"""The two networks of the zoo on real data: bitwise equal to plain PyTorch over twenty steps.

At a quarter, an eighth and a sixteenth of the footprint (parameters, gradients, optimizer state and
saved activations of a recorded step), with a trained pilot, with one that lies, without one,
learning, repeating and on demand, in float32 and under bfloat16 autocast. The Tree-LSTM is the
untied one, of which a sixteenth holds every update; the tied one, whose matrices are large shares
of it, trains at the least budget that the refusal itself names.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Loop, LyingPilot, Twin, compare_runs, least_budget, needs_pager
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.config import OffloadConfig
from dynoffload.experiments import zoo
from dynoffload.memory.pager import probe
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import train_pilot
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import load_trace, profile
from dynoffload.runtime.sizing import sizing_of

STEPS = 20
PRESETS = {"moe": "tiny", "tree": "tiny-untied"}
PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": None}
SHAPES: dict[str, dict[str, int]] = {
    "moe": {"rows": 1, "length": 24},
    "tree": {"min_nodes": 8, "max_nodes": 48},
}
SHARES = (4, 8, 16)
ADAMW = partial(AdamW, lr=1e-3)


@cache
def samples(network: str, count: int, seed: int = 0) -> list[Any]:
    """Return samples of real source text."""
    return list(islice(zoo.samples(network, seed=seed, **SHAPES[network]), count))


def loss_of(model: nn.Module, sample: Any) -> Tensor:
    """Return the loss of one sample."""
    loss: Tensor = model(*sample.args).loss
    return loss


@dataclass(frozen=True)
class Profiled:
    """What profiling a network gave: its footprint in bytes, and a pilot trained on the traces."""

    footprint: int
    pilot: Pilot


@cache
def profiled(network: str) -> Profiled:
    """Profile a network on other samples than it is tested on, and train its pilot."""
    model = zoo.build(network, PRESETS[network])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        paths = profile(
            model, samples(network, 8, seed=5), out=folder, optimizer=optimizer, progress=False
        )
        total = max(footprint(load_trace(path)).total for path in paths)
        pilot = train_pilot(folder, progress=False).pilot
        path = Path(folder) / "tiny.pilot"
        pilot.save(path)
        return Profiled(total, Pilot.load(path))


def lies(seed: int, count: int = 7) -> list[list[int]]:
    """Return orders of any length, with repetitions and blocks that do not exist."""
    chance = random.Random(seed)
    lengths = [chance.randrange(80) for _ in range(count)]
    return [[chance.randrange(-3, 80) for _ in range(length)] for length in lengths]


def pilot_of(network: str, steering: str, model: nn.Module) -> tuple[Any, str]:
    """Return the pilot and the policy of a way to steer."""
    return {
        "trained": (profiled(network).pilot, "pilot"),
        "lying": (LyingPilot(model, lies(seed=len(network))), "pilot"),
        "none": (None, "pilot"),
        "auto": ("auto", "pilot"),
        "repeat": (None, "repeat"),
        "on-demand": (None, "on-demand"),
    }[steering]


def check(
    network: str,
    share: int,
    steering: str,
    *,
    autocast: torch.dtype | None = None,
    optimizer: Any = ADAMW,
    loop: Loop | None = None,
    **config: Any,
) -> Any:
    """Train a network under one share of its footprint, and compare everything."""
    model = zoo.build(network, PRESETS[network])
    twin = Twin(model, optimizer)
    config = {**PAGES, **config}
    budget = profiled(network).footprint // share
    pilot, policy = pilot_of(network, steering, model)
    session = compare_runs(
        twin,
        loop or Loop(steps=STEPS, autocast=autocast),
        samples(network, 2 * STEPS),
        loss_of,
        budget,
        pilot=pilot,
        config={**config, "policy": policy},
    )
    stats = session.stats
    assert len(stats) == STEPS
    assert stats["bytes_in"].sum() > 0, "nothing was paged"
    if isinstance(pilot, LyingPilot):
        assert pilot.asked >= STEPS, "the pilot was not asked"
    return session


@pytest.mark.parametrize("network", zoo.NETWORKS)
def test_the_shares_are_three_different_budgets(network: str) -> None:
    """Each is accepted as it is, and divided into a pool of its own."""
    model = zoo.build(network, PRESETS[network])
    options = OffloadConfig.of(PAGES)
    budgets = [profiled(network).footprint // share for share in SHARES]
    pools = [sizing_of(model, ADAMW(model.parameters()), b, options).pool_bytes for b in budgets]
    assert budgets[0] > 1.9 * budgets[1] > 3.6 * budgets[2]
    assert pools[0] > 1.5 * pools[1] > 2.25 * pools[2]


OTHERS = ("auto", "repeat", "on-demand")  # which need no pilot of before
WAYS = ("trained", "lying", "none")
ONE_OF_TWO = ["moe", pytest.param("tree", marks=pytest.mark.slow)]
BRIEF = set(zip(SHARES, WAYS, strict=True))  # every budget and every way to steer, once
BRIEF_OTHERS = set(zip(("moe", "tree", "tree"), (SHARES[1],) * 3, OTHERS, strict=True))


def _steerings() -> list[Any]:
    """Return every budget and every way to steer once, and the policies that need no pilot under
    one budget and on one of the networks; all pairs are in ``make slow``."""
    cases = []
    for network, share, steering in product(zoo.NETWORKS, SHARES, (*WAYS, *OTHERS)):
        brief = (share, steering) in BRIEF or (network, share, steering) in BRIEF_OTHERS
        marks = [] if brief else [pytest.mark.slow]
        cases.append(pytest.param(network, share, steering, marks=marks))
    return cases


@pytest.mark.parametrize(("network", "share", "steering"), _steerings())
def test_float32(network: str, share: int, steering: str) -> None:
    """Losses, parameters, optimizer state and the ledger."""
    session = check(network, share, steering)
    if steering == "trained":
        assert session.stats["accuracy"].notna().all(), "the pilot did not predict"


def _steerings_of_bfloat16() -> list[Any]:
    """Return every budget and every way to steer once, on one network or the other; all are in
    ``make slow``."""
    brief = {("moe", 4, "trained"), ("tree", 8, "lying"), ("moe", 16, "none")}
    cases = product(zoo.NETWORKS, SHARES, WAYS)
    return [pytest.param(*c, marks=[] if c in brief else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize(("network", "share", "steering"), _steerings_of_bfloat16())
def test_bfloat16_autocast(network: str, share: int, steering: str) -> None:
    """The casts of weights are made anew in each forward, as autocast makes them."""
    check(network, share, steering, autocast=torch.bfloat16)


@pytest.mark.parametrize(
    ("network", "lies"),
    [
        ("moe", 2),
        pytest.param("moe", 4, marks=pytest.mark.slow),
        pytest.param("tree", 4, marks=pytest.mark.slow),
    ],
)
def test_no_lie_changes_a_bit(network: str, lies: int) -> None:
    """Any orders, for the tiny networks; the tied Tree-LSTM at the least budget that it takes."""

    @settings(max_examples=lies, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        orders=st.lists(st.lists(st.integers(-3, 80), max_size=60), min_size=1, max_size=5),
        share=st.sampled_from(SHARES),
        autocast=st.sampled_from([None, torch.bfloat16]),
    )
    def one(orders: list[list[int]], share: int, autocast: torch.dtype | None) -> None:
        check_lie(network, orders, share, autocast)

    one()


def check_lie(
    network: str, orders: list[list[int]], share: int, autocast: torch.dtype | None
) -> None:
    """Train a tiny network with a pilot that says ``orders``, and compare everything."""
    model = zoo.build(network, "tiny")
    twin = Twin(model, ADAMW)
    wanted = profiled(network).footprint // share
    budget, _ = least_budget(model, twin.optimizer, wanted, PAGES)
    pilot = LyingPilot(model, orders)
    loop = Loop(steps=STEPS, autocast=autocast)
    drawn = samples(network, STEPS)
    session = compare_runs(twin, loop, drawn, loss_of, budget, pilot=pilot, config=PAGES)
    assert pilot.asked >= STEPS
    assert session.stats["bytes_in"].sum() > 0, "nothing was paged"


@pytest.mark.parametrize(
    ("network", "way"),
    [
        ("moe", "foreach"),
        ("tree", "fused"),
        pytest.param("moe", "fused", marks=pytest.mark.slow),
        pytest.param("tree", "foreach", marks=pytest.mark.slow),
    ],
)
def test_accumulation_and_clipping(network: str, way: str) -> None:
    """Two samples a step and clipped gradients, with each way to run AdamW."""
    loop = Loop(steps=STEPS, accumulate=2, clip=0.5)
    check(network, 8, "trained", optimizer=partial(AdamW, lr=1e-3, **{way: True}), loop=loop)


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
@pytest.mark.parametrize("network", ONE_OF_TWO)
def test_each_backend_by_name(network: str, backend: str) -> None:
    """The same bits from both, under the same budget."""
    session = check(network, 8, "trained", backend=backend)
    assert session.backend == backend


@pytest.mark.parametrize("network", zoo.NETWORKS)
def test_larger_pages(network: str) -> None:
    """Pages that several parameters would fit into, each to its own."""
    model = zoo.build(network, PRESETS[network])
    twin = Twin(model, ADAMW)
    config = {**PAGES, "page_bytes": 8192}
    budget, _ = least_budget(model, twin.optimizer, profiled(network).footprint // 4, config)
    loop = Loop(steps=STEPS)
    drawn = samples(network, STEPS)
    session = compare_runs(twin, loop, drawn, loss_of, budget, pilot=None, config=config)
    assert session.stats["bytes_in"].sum() > 0, "nothing was paged"


@needs_pager
def test_updates_are_put_off_on_the_pager() -> None:
    """The runs above would show less if nothing had been deferred."""
    assert not probe()
    model = zoo.build("moe", "tiny")
    twin = Twin(model, ADAMW)
    with twin.paged(profiled("moe").footprint // 8, pilot=None, config=PAGES) as session:
        loop = Loop(steps=3)
        loop.run(model, twin.optimizer, samples("moe", 3), loss_of)
        assert session._paging is not None
        assert session._paging.updates is not None
        assert session._paging.updates.pending.by_slot


@pytest.mark.slow
@pytest.mark.parametrize("network", zoo.NETWORKS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_hundred_steps(network: str, autocast: torch.dtype | None) -> None:
    """At length, learning on the way."""
    model = zoo.build(network, PRESETS[network])
    twin = Twin(model, partial(AdamW, lr=1e-3, fused=True))
    budget, _ = least_budget(model, twin.optimizer, profiled(network).footprint // 4, PAGES)
    compare_runs(
        twin,
        Loop(steps=200, clip=1.0, autocast=autocast),
        samples(network, 200),
        loss_of,
        budget,
        pilot="auto",
        config=PAGES,
    )
