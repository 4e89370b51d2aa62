"""Training the same thing twice, plainly and under a budget, and comparing every bit: the networks,
the training loop and the comparators that tests share.

Bits are compared, not values: -0 differs from +0, and a NaN equals itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dynoffload
from dynoffload.around import is_around
from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError
from dynoffload.experiments.bits import first_difference
from dynoffload.experiments.predictors import LyingPilot as LyingPilot
from dynoffload.memory.pager import probe
from dynoffload.runtime.adoption.held import holders
from dynoffload.runtime.counting import tensors_of
from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.session import Session
from dynoffload.runtime.sizing import sizing_of
from dynoffload.units import parse_bytes

needs_pager = pytest.mark.skipif(bool(probe()), reason=f"the pager cannot work here: {probe()}")

HOME = torch.device("cpu")
"""Where samples are made; `tests/backend` sets another."""

SMALL_PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 1024}
"""Options that page networks of a few hundred kilobytes."""


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in the order of its indices."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Assert that two values, or nests of them, are equal bit for bit."""
    difference = first_difference(actual, expected, what)
    assert not difference, difference


def assert_same_training(
    model: nn.Module, optimizer: Optimizer | None, reference: nn.Module, its: Optimizer | None
) -> None:
    """Assert that two models and their optimizers are in the same state, bit for bit."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same(parameter.detach(), expected[name].detach(), name)
        assert (parameter.grad is None) == (expected[name].grad is None), f"{name}.grad"
        if parameter.grad is not None:
            assert_same(parameter.grad, expected[name].grad, f"{name}.grad")
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers")
    if optimizer is not None and its is not None:
        assert_same(optimizer.state_dict(), its.state_dict(), "optimizer")


def assert_ordinary(
    model: nn.Module, optimizer: Optimizer | None = None, *, hooks: bool = True, held: bool = False
) -> None:
    """Assert that nothing of a session is left: all tensors lie in memory of their own.

    Args:
        model: that was managed.
        optimizer: of it.
        hooks: no hook is left, either; copies made inside a block carry some that do nothing.
        held: leave out tensors of which somebody holds a view.
    """
    arenas = arena_ranges()
    for tensor in tensors_of(model, optimizer):
        if tensor.layout is torch.strided and not (held and holders(tensor) > 1):
            address = tensor.data_ptr()
            inside = any(start <= address < end for start, end in arenas)
            assert not inside, f"one of shape {list(tensor.shape)} lies in an arena"
            assert tensor.clone() is not None  # it can be read
    for path, module in model.named_modules() if hooks else ():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            assert not isinstance(hook, Hook), f"a hook is left on {path or 'the root'}"
        assert not is_around(module), f"a hook is left around {path or 'the root'}"


def arena_ranges() -> list[tuple[int, int]]:
    """Return the address ranges of this process that a pager would reserve: 32 GiB and more."""
    ranges = []
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if end - start >= 32 << 30:
            ranges.append((start, end))
    return ranges


def is_paged(session: Session, tensor: Tensor) -> bool:
    """Return whether the session's device holds a tensor."""
    paging = session._paging
    return paging is not None and paging.device.owner(tensor) >= 0


def footprint_of(model: nn.Module, states: int = 2) -> int:
    """Return the bytes of parameters, gradients and ``states`` tensors of optimizer state each."""
    return sum(
        p.numel() * p.element_size() * ((2 + states) if p.requires_grad else 1)
        for p in model.parameters()
    )


def least_budget(
    model: nn.Module,
    optimizer: Optimizer | None,
    wanted: int,
    config: Mapping[str, Any] | None,
    *,
    flat: bool = False,
) -> tuple[int, bool]:
    """Return ``wanted``, or what `BudgetError` says is the least, and whether it is ``wanted``.

    The error's word must be true: the budget that it names is accepted. Unless ``flat``, the budget
    is large enough that no parameter is flat.
    """
    options, budget = OffloadConfig.of(config), wanted
    refusal = _refusal(model, optimizer, wanted, options)
    if not refusal:
        while not flat and sizing_of(model, optimizer, budget, options).flat:
            budget += budget // 20
        return budget, budget == wanted
    named = re.search(r"at least ([0-9.]+ [KMG]?i?B)", refusal)
    assert named, f"the error names no budget that would do: {refusal}"
    least = parse_bytes(named.group(1))
    assert least > wanted, f"{least} is no more than the {wanted} that were refused"
    assert not _refusal(model, optimizer, least, options), "the budget that it names is refused"
    return least_budget(model, optimizer, least, config, flat=flat)[0], False


def _refusal(
    model: nn.Module, optimizer: Optimizer | None, budget: int, options: OffloadConfig
) -> str:
    """Return with which words a budget is refused, "" if it is not."""
    try:
        sizing_of(model, optimizer, budget, options)
    except BudgetError as error:
        return str(error)
    return ""


@dataclass
class Loop:
    """A training loop and all that users vary about it.

    Attributes:
        steps: optimizer steps.
        accumulate: backward passes per step.
        clip: norm to clip gradients to, or None.
        autocast: dtype of autocast, or None.
        zero_first: zero the gradients before the forward, not after the step.
        seeded: seed before each forward, so that something else may draw numbers in between.
        set_to_none: as `Optimizer.zero_grad` takes it.
        scheduler: makes a learning rate scheduler, or None.
        peek: called after each step with the step's number, the model and the optimizer.
    """

    steps: int = 20
    accumulate: int = 1
    clip: float | None = None
    autocast: torch.dtype | None = None
    zero_first: bool = False
    seeded: bool = False
    set_to_none: bool = True
    scheduler: Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    peek: Callable[[int, nn.Module, Optimizer], None] | None = None

    def run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        samples: Iterable[Any],
        loss_of: Callable[[nn.Module, Any], Tensor],
    ) -> list[Tensor]:
        """Train, and return the losses."""
        stream = iter(samples)
        scheduler = self.scheduler(optimizer) if self.scheduler is not None else None
        losses = []
        for step in range(self.steps):
            if self.zero_first:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            for _ in range(self.accumulate):
                sample = next(stream)
                if self.seeded:
                    torch.manual_seed(step)
                with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
                    loss = loss_of(model, sample)
                (loss / self.accumulate).backward()
                losses.append(loss.detach().clone())
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if not self.zero_first:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            if self.peek is not None:
                self.peek(step, model, optimizer)
        return losses


@dataclass
class Twin:
    """A model and its optimizer in two copies: one to be paged, one as the reference."""

    model: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    reference: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)
    its: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.reference = copy.deepcopy(self.model)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.its = self.make_optimizer(self.reference.parameters())

    @property
    def sides(self) -> tuple[tuple[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]:
        """Both copies, each with its optimizer; the first is to be paged."""
        return (self.model, self.optimizer), (self.reference, self.its)

    def train(self, loss_of: Callable[[nn.Module, Any], Tensor], samples: Iterable[Any]) -> None:
        """Train both, one step for each sample."""
        for sample in samples:
            for model, optimizer in self.sides:
                loss_of(model, sample).backward()
                optimizer.step()
                optimizer.zero_grad()

    def assert_same(self) -> None:
        """Assert that both are in the same state."""
        assert_same_training(self.model, self.optimizer, self.reference, self.its)

    @contextmanager
    def paged(self, budget: int, *, loses: bool = False, **options: Any) -> Iterator[Session]:
        """Page the first copy; steps aside never, unless ``config`` says so.

        A block that ``loses`` a step leaves hooks that refuse to use what is left.
        """
        config = {**SMALL_PAGES, "step_aside": False, **options.pop("config", {})}
        with dynoffload.offload(
            self.model, self.optimizer, budget=budget, config=config, **options
        ) as session:
            yield session
        assert_ordinary(self.model, self.optimizer, hooks=not loses)


def compare_runs(
    twin: Twin,
    loop: Loop,
    samples: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    budget: int,
    **options: Any,
) -> Session:
    """Train both copies by ``loop`` and assert that nothing differs; return the session."""
    torch.manual_seed(0)
    expected = loop.run(twin.reference, twin.its, samples, loss_of)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    with twin.paged(budget, **options) as session:
        losses = loop.run(twin.model, twin.optimizer, samples, loss_of)
        assert_same(torch.get_rng_state(), drawn, "state of the random numbers")
    assert_same(losses, expected, "losses")
    twin.assert_same()
    for step in session.log.steps:
        assert step.peak_fast_bytes <= budget, f"step {step.step} took {step.peak_fast_bytes} bytes"
    return session


# Small networks


class Gate(nn.Module):
    """Some of four experts, chosen by the data, one after the other."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        weights, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        out = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows = (chosen[:, 0] == index).nonzero()[:, 0]
            out = out.index_add(0, rows, (self.experts[index](x[rows]) * weights[rows]).to(x.dtype))
        return x + out


class Small(nn.Module):
    """Embedding, gated experts, a dropout and a head: 32-wide, some 50 kB of parameters."""

    def __init__(self, width: int = 32, layers: int = 2, words: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.layers = nn.ModuleList(Gate(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[tokens, words]`` for ``[tokens]``."""
        x = self.embedding(tokens) + self.position[: len(tokens)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(self.norm(x)))


def small(seed: int = 0, **sizes: int) -> Small:
    """Return a `Small` network whose weights follow from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Small(**sizes)


def small_samples(count: int, seed: int = 0, words: int = 64) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` pairs of tokens and targets, of 1 to 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(1, 17, (), generator=generator))
        row = torch.randint(0, words, (2, length), generator=generator)
        samples.append((row[0], row[1]))
    return samples


def small_loss(model: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of one sample."""
    return F.cross_entropy(model(sample[0]).float(), sample[1])


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`small_samples` as a dataset that worker processes can import."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return small_samples(24)[index]


def only(batch: list[Any]) -> Any:
    """Return the one sample of a batch."""
    return batch[0]


class Mlp(nn.Module):
    """Linear layers with residuals: each weight takes four small pages."""

    def __init__(self, width: int = 64, depth: int = 5, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[rows, classes]`` for ``[rows, width]``."""
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def batch(step: int, rows: int = 8, width: int = 64, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that follow from ``step``, drawn from no shared generator."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, width, generator=generator)
    return x.to(HOME), torch.randint(0, classes, (rows,), generator=generator).to(HOME)


def loss_of(model: nn.Module, step: int, **sizes: int) -> Tensor:
    """Return the cross-entropy of ``model`` on `batch`."""
    x, y = batch(step, **sizes)
    return F.cross_entropy(model(x).float(), y)
