"""The simulated runtime: its strings are the runtime's own, and so are the bytes that it moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import needs_pager
from torch import nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.experiments import zoo
from dynoffload.planning.reference import Reference
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.trace import Trace
from dynoffload.runtime.migration.migrator import Migrator
from dynoffload.runtime.sizing import Sizing
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.overhead import Division, RuntimeOverhead
from dynoffload.simulation.recorded import Network, Recorded, network_of, recorded
from dynoffload.simulation.training import Training
from dynoffload.telemetry import StepStats

pytestmark = needs_pager

STEPS = 6
ROOMY = 1.5  # of the footprint: nothing leaves, so that no clock decides what is at hand
MACHINE = Machine(Link(2e9, 2e9, 3e9, latency_s=5e-5), fast_bytes=1, workers=4)


def moe() -> nn.Module:
    return zoo.build("moe", "tiny", hidden=128, width=192, layers=2)


def tree() -> nn.Module:
    return zoo.build("tree", "tiny-untied", hidden=64, cells=6)


def mixtral() -> nn.Module:
    """Experts whose slices are no whole pages, so that they are paged whole."""
    return zoo.build("fused", "tiny", hidden=120, width=92, layers=3, experts=4)


def t5() -> nn.Module:
    """Its embedding is its head too: one region of three modules."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=256, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model: nn.Module = T5ForConditionalGeneration(config)
    return model.train()


def texts() -> Iterator[dict[str, Any]]:
    for one in zoo.samples("moe", rows=1, length=16):
        yield dict(zip(("tokens", "targets"), one.args, strict=True))


def trees() -> Iterator[dict[str, Any]]:
    for one in zoo.samples("tree", max_nodes=24):
        yield {"tree": one.args[0]}


def pairs() -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        source, target = torch.randint(3, 256, (2, 1, 16), generator=generator)
        yield {"input_ids": source, "labels": target}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[dict[str, Any]]]]] = {
    "moe": (moe, texts),
    "tree": (tree, trees),
    "mixtral": (mixtral, texts),
    "t5": (t5, pairs),
}


def built(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = NETWORKS[name][0]()
    return model, AdamW(model.parameters(), lr=1e-3, fused=True)


def train(name: str, model: nn.Module, optimizer: Optimizer, steps: int = STEPS) -> None:
    for inputs in itertools.islice(NETWORKS[name][1](), steps):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cache
def plain(name: str, steps: int = STEPS) -> tuple[Network, list[Recorded], list[Trace]]:
    """Return what moves of a network, and its plain steps."""
    model, optimizer = built(name)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        train(name, model, optimizer, steps)
    network = network_of(model)
    made = [recorded(trace, network) for trace in traces]
    states = {number: sizes for one in made for number, sizes in one.states.items()}
    return network, [replace(one, states=states) for one in made], traces


def footprint(network: Network) -> int:
    return 4 * sum(one.nbytes for one in network.parameters)


@contextmanager
def followed(kind: type[Any]) -> Iterator[list[Reference[Any]]]:
    """Yield the strings that migrators, real or simulated, follow meanwhile."""
    strings: list[Reference[Any]] = []
    follow = kind._follow

    def kept(self: Any, reference: Reference[Any]) -> None:
        strings.append(reference)
        follow(self, reference)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_follow", kept)
        yield strings


def real(
    name: str, budget: int, steps: int = STEPS, **config: Any
) -> tuple[list[StepStats], Sizing, list[Reference[Any]], int]:
    """Return what a session does: its steps, its division, the strings that it follows, and the
    bytes that it moves into chunks."""
    model, optimizer = built(name)
    options = {"step_aside": False, **config}
    with (
        followed(Migrator) as strings,
        dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=options) as session,
    ):
        train(name, model, optimizer, steps)
        steps_made, sizing = list(session.log.steps), session.sizing
        assert session._paging is not None
        saved = session._paging.activations.saved_bytes
    return steps_made, sizing, strings, saved


def divided(sizing: Sizing) -> Division:
    return Division(**{key: getattr(sizing, key) for key in Division.__dataclass_fields__})


def simulated(
    network: Network, steps: list[Recorded], division: Division, *, prefetch: bool
) -> tuple[list[StepResult], list[Reference[Any]]]:
    """Return what the simulated runtime does, and the strings that it follows."""
    work = RuntimeOverhead(visit_s=1e-5, update_s=1e-4, copy_s=2e-10)
    training = Training(network, division, MACHINE, prefetch=prefetch, work=work)
    with followed(Training) as strings:
        return [training.step(step) for step in steps], strings


@pytest.mark.parametrize(
    ("name", "share"), [("moe", 0.3), ("tree", 0.3), ("mixtral", ROOMY), ("t5", ROOMY)]
)
def test_a_simulated_string_is_the_runtimes_own(name: str, share: float) -> None:
    """Use by use, with the numbers of regions, of forward and of backward in every step; also where
    chunks are filled and emptied, and regions leave and come."""
    network, steps, _ = plain(name)
    stats, sizing, strings, _ = real(name, int(share * footprint(network)), policy="repeat")
    assert bool(sum(step.bytes_in for step in stats)) == (share < 1)
    _, made = simulated(network, steps, divided(sizing), prefetch=True)
    assert len(made) == len(strings) == 2 * STEPS - 1
    for number, (ours, theirs) in enumerate(zip(made, strings, strict=True)):
        assert ours.uses == theirs.uses, f"string {number}"
        for part in ("forward", "backward", "ahead"):
            assert getattr(ours, part) == getattr(theirs, part), f"{part} of string {number}"


@pytest.mark.parametrize("name", ["mixtral", "t5", "tree"])
def test_bytes_moved_on_demand_are_the_runtimes(name: str) -> None:
    """Within 2%, of the steps after the first three together: what moves then follows from the
    order of uses, but for what leaves while somebody else arrives."""
    network, steps, _ = plain(name, 8)
    made, sizing, _, _ = real(name, footprint(network) // 3, 8, policy="on-demand")
    ours, _ = simulated(network, steps, divided(sizing), prefetch=False)
    for key in ("bytes_in", "bytes_out"):
        theirs = sum(getattr(step, key) for step in made[3:])
        assert theirs
        assert sum(getattr(step, key) for step in ours[3:]) == pytest.approx(theirs, rel=0.02)


def test_what_plain_steps_saved_is_what_the_runtime_moves_into_chunks() -> None:
    """To the byte."""
    for name in NETWORKS:
        network, steps, _ = plain(name, 2)
        _, sizing, _, saved = real(name, footprint(network), 2, policy="repeat")
        paged = {n for n, p in enumerate(network.parameters) if p.nbytes >= sizing.min_paged_bytes}
        moved = sum(
            nbytes
            for step in steps
            for storage, nbytes in step.saved.items()
            if step.whole.get(storage, nbytes) >= sizing.min_moved_bytes
            and step.owned.get(storage) not in paged
        )
        assert moved == saved, name


def test_a_step_takes_its_plain_time_if_nothing_moves_and_nothing_else_costs() -> None:
    network, steps, _ = plain("moe", 4)
    steps = [step.timed(0.2, 0.3, 0.1) for step in steps]
    division = Division(1 << 30, 4096, 0, 1 << 20, 1, 1, 0)
    training = Training(network, division, MACHINE, prefetch=True)
    results = [training.step(step) for step in steps]
    # The updates of a step are made in the next, and by parameters: of those that got a gradient.
    assert results[-1].compute_s == pytest.approx(0.6, rel=0.03)
    assert results[-1].seconds == pytest.approx(results[-1].compute_s, rel=1e-6)
    assert results[-1].bytes_in == 0


def test_a_trace_of_another_network_is_refused(tmp_path: Path) -> None:
    _, _, traces = plain("tree", 1)
    network, _, _ = plain("moe", 1)
    with pytest.raises(dynoffload.DynOffloadError, match="which the network does not have"):
        recorded(traces[0], network)


def test_a_division_that_pages_nothing_is_refused() -> None:
    network, _, _ = plain("moe", 1)
    division = Division(1 << 30, 4096, 0, 1 << 20, 1 << 40, 1, 0)
    with pytest.raises(dynoffload.DynOffloadError, match="lower min_paged_bytes"):
        Training(network, division, MACHINE, prefetch=True)
