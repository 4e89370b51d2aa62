"""The budget is a hard cap: what is counted, and what the process takes.

What is counted is `StepStats.peak_fast_bytes`; what is real is the memory of a child process, by
its resident set and, where the system lets us make one, by its control group. Each expected peak is
computed from the budget, none is copied from a run.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from devices import script
from exactness import (
    SMALL_PAGES,
    Loop,
    Twin,
    compare_runs,
    least_budget,
    needs_pager,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.sizing import sizing_of
from dynoffload.units import MiB


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of most tests here."""
    return AdamW(parameters, lr=1e-2)


class Chain(nn.Module):
    """Activations without parameters: ``links`` times a saved ``[rows, 64]`` of each kind."""

    def __init__(self, links: int) -> None:
        super().__init__()
        self.links = links
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.links):
            x = torch.sin(x).tanh()
        return self.last(x)


def chain_loss(model: nn.Module, sample: Tensor) -> Tensor:
    """Return the loss of one sample."""
    return model(sample).square().mean()


def chain(links: int) -> Chain:
    """Return a network whose weights are always the same."""
    torch.manual_seed(0)
    return Chain(links)


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
def test_activations_larger_than_the_budget_spill(backend: str) -> None:
    """A sample whose saved tensors are many times the budget trains within it."""
    rows, links, budget = 256, 30, 512 * 1024
    saved = 2 * links * rows * 64 * 4
    assert saved > 6 * budget
    samples = [torch.randn(rows, 64) for _ in range(4)]
    session = compare_runs(
        Twin(chain(links), adamw),
        Loop(steps=4),
        samples,
        chain_loss,
        budget,
        config={"backend": backend, "min_paged_bytes": 4096},
    )
    moved = sum(step.bytes_out for step in session.log.steps)
    assert moved > saved, "nothing was spilled"


def test_many_tiny_activations_are_counted_too() -> None:
    """Thousands of saved tensors of a few bytes each do not slip past the budget."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(600):
                x = torch.tanh(self.cell(x))
            return x

    torch.manual_seed(0)
    budget = 96 * 1024
    assert budget // 2 < 600 * 24 * 4
    samples = [torch.randn(1, 24) for _ in range(3)]
    compare_runs(Twin(Tiny(), adamw), Loop(steps=3), samples, chain_loss, budget)


# What is counted outside of the pool


class Odd(nn.Module):
    """Tied weights, a buffer that is a view of another, one expanded, and a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8, sparse=True)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("whole", torch.zeros(500))
        self.register_buffer("part", self.whole[100:200])
        self.register_buffer("row", torch.zeros(1, 1).expand(2000, 2000))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(self.words(tokens))) + self.whole.sum()


def test_what_lies_outside_of_a_device_is_counted_once_and_whole() -> None:
    model = Odd()
    embedding, linear, buffer = 100 * 8 * 4, 8 * 8 * 4, 500 * 4 + 4
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert ordinary_bytes(model, None) == embedding + linear + buffer
    model(torch.arange(3)).sum().backward()
    sparse = 3 * 8 + 3 * 8 * 4  # three rows and their numbers
    assert ordinary_bytes(model, optimizer) == embedding + 2 * linear + buffer + sparse
    model.words.weight.grad = None
    optimizer.step()
    assert ordinary_bytes(model, optimizer) == embedding + 3 * linear + buffer
    with torch.device("meta"):
        assert ordinary_bytes(Odd(), None) == 0


class Statistics(nn.Module):
    """A running mean beside a layer: its buffer is larger than what is paged."""

    def __init__(self, size: int = 30_000) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.mean[:64]


def test_buffers_take_of_the_budget() -> None:
    """They are planned for, counted in each step, and refused where they alone are too much."""
    model = Statistics()
    buffer = model.mean.nbytes
    plain, _ = least_budget(nn.Linear(64, 64), adamw(model.parameters()), 1, SMALL_PAGES)
    budget, _ = least_budget(model, adamw(model.parameters()), plain, SMALL_PAGES)
    assert budget >= plain + buffer
    samples = [torch.randn(8, 64) for _ in range(4)]
    session = compare_runs(Twin(model, adamw), Loop(steps=4), samples, chain_loss, budget)
    assert min(step.peak_fast_bytes for step in session.log.steps) > buffer
    with pytest.raises(BudgetError, match="raise the budget"):
        sizing_of(model, None, buffer, OffloadConfig.of(SMALL_PAGES))


# The process

SLACK = 16 * MiB  # of freed heap and temporaries, at which the heap is handed back

CHILD = """
    import json, sys
    import torch
    from torch import nn
    import dynoffload
    from dynoffload.memory.limits import resident_bytes

    class Chain(nn.Module):
        "One module with a hundred operators: nothing else is visited between them."

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = self.first(x)
            for _ in range(50):
                x = torch.sin(x).tanh()
            return self.last(x)

    torch.set_num_threads(1)
    budget, backend, network = int(sys.argv[1]), sys.argv[2], sys.argv[4]
    with torch.device("meta"):
        if network == "chain":
            model, sample = Chain(), torch.randn(16384, 64, device="cpu")
        else:
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
            sample = torch.randn(64, 1024, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # What torch itself takes for a step of this size, before anything is managed.
    warm = nn.Linear(1024, 1024)
    warm(torch.randn(64, 1024)).sum().backward()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    del warm
    before = resident_bytes()

    def status(key):
        for line in open("/proc/self/status"):
            if line.startswith(key):
                return int(line.split()[1]) * 1024

    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    config = {"backend": backend, "step_aside": False, "heap_slack_bytes": int(sys.argv[3])}
    with dynoffload.offload(model, optimizer, budget=budget, config=config) as session:
        for step in range(3):
            loss = model(sample).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = status("VmHWM")
        answer = dict(
            before=before,
            peak=peak,
            footprint=sum(p.numel() for p in model.parameters()) * 16
            + (100 * sample.numel() * 4 if network == "chain" else 0),
            fast=max(step.peak_fast_bytes for step in session.log.steps),
            loss=loss.item(),
        )
        print(json.dumps(answer))
        sys.stdout.flush()
        import os
        os._exit(0)  # restoring would take the footprint
"""


@pytest.mark.parametrize(
    ("network", "backend"),
    [
        pytest.param("layers", "pager", marks=needs_pager),
        ("layers", "mapped"),
        pytest.param("chain", "pager", marks=needs_pager),
        pytest.param("chain", "mapped", marks=pytest.mark.slow),
    ],
)
def test_the_process_takes_no_more_than_before_budget_and_headroom(
    network: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 MB of weights, 400 MB with gradients and state, or 400 MB of activations of operators that
    no module stands between, under 64 MB: the resident set says so."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    budget, headroom = 64 * MiB, SLACK + 48 * MiB
    done = script(CHILD, budget, backend, SLACK, network, seconds=90, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["footprint"] >= 6 * budget
    assert answer["fast"] <= budget
    assert answer["peak"] <= answer["before"] + budget + headroom


MEMORY_OF_CASTS = """
    import os
    import torch
    from torch import nn
    import dynoffload
    from dynoffload.memory.heap import give_back
    from dynoffload.memory.limits import resident_bytes

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = {"step_aside": False}
    with dynoffload.offload(model, optimizer, budget="32MiB", pilot=None, config=config):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 1024)).float().square().mean()
            give_back()
            kept = resident_bytes()
            torch.clear_autocast_cache()
            give_back()
            print(kept - resident_bytes(), flush=True)
        os._exit(0)  # what is printed is all there is to know
"""


@needs_pager
def test_the_casts_of_weights_take_no_memory_of_their_own() -> None:
    """48 MiB of casts, made under 32 MiB: nothing is freed when autocast forgets them."""
    done = script(MEMORY_OF_CASTS, seconds=90, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 8 * MiB


# What the error says


class Experts(nn.Module):
    """An embedding that is larger than a slice of the experts, and smaller than all of them.

    Args:
        width: of a slice of ``width`` times ``width`` single numbers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 192)
        self.experts = nn.Parameter(torch.zeros(8, width, width))


def refusal(model: nn.Module, budget: int, **config: Any) -> str:
    """Return the words with which a budget is refused."""
    optimizer = AdamW(model.parameters())
    with pytest.raises(BudgetError) as refused:
        sizing_of(model, optimizer, budget, OffloadConfig.of(config))
    return str(refused.value)


def test_the_culprit_is_that_of_the_budget_that_is_named() -> None:
    """Pages that the user wants keep experts whole: then these are. Their update goes by ranges
    of elements, if it may."""
    model = Experts(width=96)  # slices of nine pages
    pages = {"page_bytes": 16384}
    for budget in (10_000, 1_000_000):
        assert "experts needs 1.12 MiB at once" in refusal(model, budget, slices=False, **pages)
    assert "experts needs 288.00 KiB at once (all of it)" in refusal(model, 10_000, **pages)
    for config in ({"page_bytes": 4096}, {}):
        assert "words.weight needs" in refusal(model, 10_000, rollback=True, **config)


@pytest.mark.parametrize("shape", [(64, 96, 96), (16, 128, 64), (8, 160, 128), (4, 300, 300)])
def test_what_is_enough_is_enough_with_more(shape: tuple[int, ...]) -> None:
    """A larger budget is divided into larger pages; those must not make experts whole for which
    there is no room."""
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(shape))
    optimizer = AdamW(model.parameters())
    accepted = []
    budget = 50_000
    while budget < 30_000_000:
        try:
            sizing_of(model, optimizer, budget, OffloadConfig.of({}))
            accepted.append(True)
        except BudgetError:
            accepted.append(False)
        budget = int(budget * 1.05)
    assert accepted == sorted(accepted)
    assert {True, False} == set(accepted)


def test_what_the_optimizer_does_not_update_has_no_state() -> None:
    """It is not to be blamed for one: its gradient is all that comes to it."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 4))
    config = OffloadConfig.of({"slices": False})
    with pytest.raises(BudgetError, match=r"0\.weight needs 2\.00 MiB at once"):
        sizing_of(model, AdamW(model[1].parameters()), 2_300_000, config)
    with pytest.raises(BudgetError, match=r"0\.weight needs 4\.00 MiB at once"):
        sizing_of(model, AdamW(model.parameters()), 2_300_000, config)
