"""The budget that a `BudgetError` names is enough to train under, and its words are true.

What is pinned at one time must fit the pool, or a step waits for room that nobody makes: so each
optimizer, each size of pages and each kind of parameter trains some steps at exactly that budget,
bit for bit as plainly. Patience is cut to seconds here, so that a wait without end fails soon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from devices import KINDS, needs_pager
from exactness import SMALL_PAGES, Loop, Twin, compare_runs, least_budget, small_samples
from fused_networks import Chosen, chosen_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.pager import Pager
from dynoffload.runtime import paging
from dynoffload.units import parse_bytes

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Mixed(nn.Module):
    """An embedding, matrices without biases and a long vector, whose state Adafactor keeps whole.

    Args:
        width: of all layers; at 64 the state that Adafactor keeps of a row is paged, too.
        vector: have the vector.
    """

    def __init__(self, width: int, *, vector: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(3000)) if vector else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[tokens, 50]`` for ``[tokens]``."""
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.scale is not None:
            x = x * self.scale[: x.shape[1]] + self.scale.mean()
        logits: Tensor = self.head(torch.sin(x) * x)
        return logits


class Odd(nn.Module):
    """A complex matrix, two matrices over one storage, and one in double precision."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 40, 40) / 8
        self.one, self.two = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.wave = nn.Parameter(torch.randn(40, 40, dtype=torch.complex64) / 8)
        self.fine = nn.Parameter(torch.randn(40, 40, dtype=torch.float64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 40]`` for the same."""
        x = ((x @ self.one @ self.two).to(torch.complex64) @ self.wave).abs()
        fine: Tensor = x.double() @ self.fine
        return fine


def mixed_loss(model: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of one sample of `small_samples`."""
    return F.cross_entropy(model(sample[0]), sample[1])


def odd_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample."""
    generator = torch.Generator().manual_seed(seed)
    loss: Tensor = model(torch.randn(3, 40, generator=generator)).square().mean()
    return loss


def of_transformers(parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    """Return transformers' Adafactor."""
    from transformers.optimization import Adafactor

    options = {"lr": 1e-2, "relative_step": False, "scale_parameter": False, **options}
    return Adafactor(parameters, **options)  # type: ignore[no-any-return, no-untyped-call]


def of_torch(name: str, **options: Any) -> Make:
    """Return how to make an optimizer of `torch.optim`."""
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=1e-2, **options)


MAKES: dict[str, Make] = {
    "AdamW": of_torch("AdamW"),
    "Adafactor": of_torch("Adafactor"),
    "amsgrad": of_torch("Adam", amsgrad=True),
    "SGD": of_torch("SGD"),
    "momentum": of_torch("SGD", momentum=0.9),
    "nesterov": of_torch("SGD", momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": of_torch("RMSprop", centered=True, momentum=0.9),
    **{
        name: of_torch(name)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
    },
    "transformers' Adafactor": of_transformers,
    "Muon": of_torch("Muon"),
    "the same with beta1": lambda parameters: of_transformers(parameters, beta1=0.9),
}
CORE = ("AdamW", "Adafactor", "momentum", "Muon")
DEFAULT: dict[str, Any] = {"page_bytes": None, "min_paged_bytes": None}
"""What the budget's size decides; of a budget this small they are pages of 4 KiB."""
PAGES: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "16 KiB": {**SMALL_PAGES, "page_bytes": 16384},
    "all paged": {**SMALL_PAGES, "min_paged_bytes": 64},
}

each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(kind, marks=[needs_pager] * (kind == "pager")) for kind in KINDS]
)


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test with `make` set to each of these optimizers."""
    marks = {name: [] if name in CORE else [pytest.mark.slow] for name in MAKES}
    return pytest.mark.parametrize(
        "make", [pytest.param(MAKES[name], id=name, marks=marks[name]) for name in names]
    )


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for room for longer than seconds."""
    begin = paging.open_device

    def opened(*args: Any) -> Device:
        device = begin(*args)
        if isinstance(device, Pager):
            device._native.pager_set_patience(device._handle, 3)
        return device

    monkeypatch.setattr(paging, "open_device", opened)
    monkeypatch.setattr("dynoffload.memory.mapped._GRACE_S", 3.0)


def train_at_the_least(
    model: nn.Module,
    make: Make,
    loss_of: Callable[[nn.Module, Any], Tensor],
    samples: list[Any],
    *,
    times: int = 1,
    **config: Any,
) -> None:
    """Train at exactly the budget that the error names, or at so many ``times`` that, and compare
    with plain PyTorch."""
    twin = Twin(model, make)
    budget, as_wanted = least_budget(model, twin.optimizer, 1, {**SMALL_PAGES, **config})
    assert not as_wanted
    loop = Loop(steps=len(samples))
    budget *= times
    compare_runs(twin, loop, samples, loss_of, budget, config=config, pilot=None)


@each_backend
@each_of(MAKES)
@pytest.mark.parametrize("width", [pytest.param(32, marks=pytest.mark.slow), 64])
def test_every_optimizer(backend: str, make: Make, width: int) -> None:
    """On default pages, where state of other sizes than the parameter's is paged too."""
    torch.manual_seed(0)
    samples = small_samples(5, words=50)
    model = Mixed(width, vector=make is not MAKES["Muon"])  # which takes matrices alone
    train_at_the_least(model, make, mixed_loss, samples, backend=backend, **DEFAULT)


@each_backend
@each_of(name for name in MAKES if name != "Muon")
def test_fused_experts(backend: str, make: Make) -> None:
    """An expert that is hit, then is not for some steps, and then is hit again: behind the update
    that has a gradient wait others of zeros, which need a region of their own."""
    samples = [(seed, [seed % 3, 5] if seed % 4 else [0]) for seed in range(8)]
    config = {**SMALL_PAGES, "backend": backend}
    train_at_the_least(Chosen(), make, chosen_loss, samples, **config)


@each_backend
@pytest.mark.parametrize("pages", PAGES)
def test_odd_parameters(backend: str, pages: str) -> None:
    """Complex, of several dtypes, and two over one storage."""
    torch.manual_seed(0)
    config = {**PAGES[pages], "backend": backend}
    train_at_the_least(Odd(), MAKES["AdamW"], odd_loss, list(range(4)), **config)


@needs_pager
@pytest.mark.parametrize(
    "options",
    [
        {"rollback": True},
        {"policy": "repeat"},
        {"defer_updates": "never"},
        {"page_activations": False},
        {"policy": "on-demand"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("network", ["plain", "fused"])
def test_ways_to_make_updates(options: dict[str, Any], network: str) -> None:
    """Each pins other regions, at other times."""
    torch.manual_seed(0)
    if network == "plain":
        samples = small_samples(4, words=50)
        train_at_the_least(Mixed(64), MAKES["AdamW"], mixed_loss, samples, **DEFAULT, **options)
    else:
        hits = [(seed, [seed % 3]) for seed in range(6)]
        train_at_the_least(Chosen(), MAKES["AdamW"], chosen_loss, hits, **options)


@each_backend
def test_what_is_frozen_and_still_has_state(backend: str) -> None:
    """With a gradient of zeros beside it ``step()`` updates it all the same, as in plain PyTorch;
    small state of what is frozen stays in memory and counts."""
    torch.manual_seed(0)
    twin = Twin(Mixed(64), MAKES["AdamW"])
    samples = small_samples(5, words=50)
    for model, optimizer in twin.sides:
        mixed_loss(model, samples[0]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.head.requires_grad_(False)
        model.layers.requires_grad_(False)
    config = {**SMALL_PAGES, "backend": backend, "min_paged_bytes": 14_000}
    budget, _ = least_budget(twin.model, twin.optimizer, 1, config)
    loop = Loop(steps=4, set_to_none=False)
    compare_runs(twin, loop, samples[1:], mixed_loss, budget, config=config, pilot=None)


@each_backend
def test_experts_that_are_updated_whole_are_kept_for_rollback(backend: str) -> None:
    """As those are whose gradients lie in memory of the user's."""
    twin = Twin(Chosen(count=40), MAKES["AdamW"])
    config = {**SMALL_PAGES, "backend": backend, "rollback": True}
    budget, _ = least_budget(twin.model, twin.optimizer, 1, config)

    def train(model: nn.Module, optimizer: Optimizer) -> None:
        for step in range(3):
            chosen_loss(model, (step, [step, 30])).backward()
            mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            for parameter, gradient in zip(model.parameters(), mine, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    train(twin.reference, twin.its)
    with twin.paged(budget, config=config):
        train(twin.model, twin.optimizer)
    twin.assert_same()


# An update that becomes larger


@each_backend
def test_more_state_than_fits_is_refused_until_it_is_switched_off(backend: str) -> None:
    """Of an option that is set after the block has begun; nothing is changed by the refusal."""
    torch.manual_seed(0)
    twin = Twin(Mixed(128), lambda p: Adam(p, lr=1e-2))
    config = {**SMALL_PAGES, "backend": backend}
    budget, _ = least_budget(twin.model, twin.optimizer, 1, config)
    samples = small_samples(3, words=50)
    loop = Loop(steps=3)
    expected = loop.run(twin.reference, twin.its, samples, mixed_loss)
    with twin.paged(budget, config=config) as session:
        group = twin.optimizer.param_groups[0]
        group["amsgrad"] = True
        for _ in range(2):
            with pytest.raises(BudgetError, match="of which the optimizer keeps more now, needs"):
                mixed_loss(twin.model, samples[0])
        assert not session.log.steps
        group["amsgrad"] = False
        losses = loop.run(twin.model, twin.optimizer, samples, mixed_loss)
    assert [a.item() for a in losses] == [b.item() for b in expected]
    twin.assert_same()


@each_backend
def test_more_state_that_fits_is_trained_with(backend: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Mixed(64), lambda p: Adam(p, lr=1e-2))
    config = {**SMALL_PAGES, "backend": backend}
    amsgrad = Adam(twin.model.parameters(), amsgrad=True)
    budget, _ = least_budget(twin.model, amsgrad, 1, config)
    samples = small_samples(3, words=50)
    loop = Loop(steps=3)
    twin.its.param_groups[0]["amsgrad"] = True
    loop.run(twin.reference, twin.its, samples, mixed_loss)
    with twin.paged(budget, config=config):
        twin.optimizer.param_groups[0]["amsgrad"] = True
        loop.run(twin.model, twin.optimizer, samples, mixed_loss)
    twin.assert_same()


@needs_pager
def test_an_update_that_has_grown_is_refused_by_step_too() -> None:
    """Before anything is changed: parameters that are converted back are as they were."""
    torch.manual_seed(0)
    model = Mixed(64)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    config = {**SMALL_PAGES, "step_aside": False}
    budget, _ = least_budget(model, optimizer, 1, config)
    samples = small_samples(2, words=50)
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=config):
        mixed_loss(model, samples[0]).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.double()
        with pytest.raises(
            BudgetError, match=r"has .* now and had .*, needs .*, or change it back"
        ):
            optimizer.step()
        model.float()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        optimizer.step()
        mixed_loss(model, samples[1]).backward()
        optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Wide(nn.Module):
    """Small layers on many rows: what backward is to have is larger than any parameter.

    Args:
        cache: replace a buffer in forward by one as large.
    """

    def __init__(self, *, cache: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.cache = cache
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for ``[rows, 32]``."""
        if self.cache:
            self.seen = torch.tanh(x.detach())
            x = x[:16] + self.seen.mean()
        for layer in self.layers:
            x = torch.sigmoid(layer(x)) * torch.tanh(x)
        return x.square().mean()


@pytest.mark.parametrize("cache", [False, True], ids=["saved", "buffer"])
@each_backend
def test_a_tensor_larger_than_the_pool_names_a_budget_that_has_room(
    backend: str, cache: bool
) -> None:
    """The state is that of the last step, and smaller samples go on."""
    torch.manual_seed(3)
    twin = Twin(Wide(cache=cache), MAKES["AdamW"])
    config = {"backend": backend, "min_paged_bytes": 512}
    few, many = torch.randn(16, 32), torch.randn(2_000, 32)
    with twin.paged(200_000, config=config):
        twin.train(nn.Module.__call__, [few] * 2)
        with pytest.raises(BudgetError, match=r"raise the budget to ([\d.]+ \w+)") as told:
            twin.model(many).backward()
        twin.train(nn.Module.__call__, [few])
    twin.assert_same()
    if not cache:
        assert re.search(r"module 'layers\.0'.*, or make the sample smaller$", str(told.value))
    named = re.search(r"raise the budget to ([\d.]+ \w+)", str(told.value))
    assert named is not None
    with twin.paged(parse_bytes(named[1]), config=config):
        twin.train(nn.Module.__call__, [many] * 3)
    twin.assert_same()
