"""Updates made in backward: the bits of plain training, or an error.

A loop that only steps gets the bits of plain PyTorch, and gradients that never move. Any other use
of gradients is refused: in the first step before anything is changed, later as a lost step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    Loop,
    LyingPilot,
    Twin,
    compare_runs,
    footprint_of,
    least_budget,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from fused_networks import PAGES, Chosen, chosen_loss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exact_property import OPTIMIZERS, SCHEDULERS, backends, orders
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import dynoffload
from dynoffload.errors import ConfigError, StepLostError
from dynoffload.runtime.consumed import ConsumedGradient
from dynoffload.runtime.updates.step_commit import StepCommit

OPTION: dict[str, Any] = {"optimizer_in_backward": True}
BUDGET = "120KB"


def twin(make: Callable[[Any], Optimizer] = lambda p: AdamW(p, lr=1e-2)) -> Twin:
    """Return a small network in two copies."""
    return Twin(small(), make)


def backward(pair: Twin, seed: int) -> None:
    """Make both copies' gradients of one sample."""
    for model, _ in pair.sides:
        torch.manual_seed(seed)
        small_loss(model, small_samples(1, seed)[0]).backward()


def step(pair: Twin) -> None:
    """Step both copies, and zero the gradients."""
    for _, optimizer in pair.sides:
        optimizer.step()
        optimizer.zero_grad()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    backend=backends,
    share=st.floats(0.05, 2.0),
    lies=st.none() | orders,
    scheduler=st.sampled_from(list(SCHEDULERS)),
    autocast=st.sampled_from([None, torch.bfloat16]),
    aside=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_case_changes_a_bit(
    optimizer: str,
    backend: str,
    share: float,
    lies: list[list[int]] | None,
    scheduler: str,
    autocast: torch.dtype | None,
    aside: bool,
    seed: int,
) -> None:
    """Optimizers, budgets, backends and wrong predictions."""
    model = small(seed, layers=1)
    pair = Twin(model, OPTIMIZERS[optimizer])
    schedule = None if optimizer.endswith("tensor lr") else SCHEDULERS[scheduler]
    loop = Loop(steps=5, autocast=autocast, scheduler=schedule)
    accelerator = backend == "accelerator"
    place = "auto" if accelerator else backend
    config = {**SMALL_PAGES, **OPTION, "step_aside": aside, "backend": place}
    wanted = int(footprint_of(model) * share)
    budget, _ = least_budget(model, pair.optimizer, wanted, config, flat=not accelerator)
    pilot = None if lies is None else LyingPilot(model, lies)
    samples = small_samples(5, seed)
    options: dict[str, Any] = {"pilot": pilot, "config": config}
    if accelerator:
        with accelerated(seed, elsewhere=seed % 2 == 0):
            compare_runs(pair, loop, samples, small_loss, budget, device=DEVICE, **options)
    else:
        compare_runs(pair, loop, samples, small_loss, budget, **options)


@needs_pager
def test_gradients_are_not_moved() -> None:
    """After the first step fewer bytes are written, and no gradient is."""
    written = []
    for option in (False, True):
        pair = twin()
        config = {"optimizer_in_backward": option}
        loop, samples = Loop(steps=12), small_samples(12)
        session = compare_runs(pair, loop, samples, small_loss, 120_000, config=config)
        moved = [one for one in session.log.transfers if one.region.endswith(".grad")]
        after = session.log.steps[3:]
        began = session.log.phases[0].start + sum(s.seconds for s in session.log.steps[:3])
        written.append(sum(one.bytes_out for one in after))
        assert any(one.start > began for one in moved) is not option
    assert written[1] < 0.9 * written[0]


@needs_pager
@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_experts_that_are_paged_by_slices(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of an expert that was hit is made in backward; of others, it waits."""
    pair = Twin(Chosen(), lambda p: AdamW(p, lr=lr))
    samples = [(number, [number % 4, (number // 2) % 3]) for number in range(8)]
    config = {**PAGES, **OPTION}
    budget, _ = least_budget(pair.model, pair.optimizer, 1, {**SMALL_PAGES, **config})
    made: list[Any] = []
    make_now = StepCommit.make_now
    monkeypatch.setattr(
        StepCommit, "make_now", lambda self, groups: (made.append(groups), make_now(self, groups))
    )
    compare_runs(pair, Loop(steps=8), samples, chosen_loss, budget, config=config)
    assert len(made) == 7 * len(list(pair.model.parameters()))


# Loops that do not suit


def clip(model: nn.Module, optimizer: Optimizer) -> None:
    """Clip by the norm."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model: nn.Module, optimizer: Optimizer) -> None:
    """Read one gradient."""
    gradient = model.get_parameter("head.weight").grad
    assert gradient is not None
    gradient.norm()


def add(model: nn.Module, optimizer: Optimizer) -> None:
    """Accumulate another gradient."""
    (2 * model.get_parameter("head.weight")).sum().backward()


def change(model: nn.Module, optimizer: Optimizer) -> None:
    """Change the learning rate, and step."""
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def replace(model: nn.Module, optimizer: Optimizer) -> None:
    """Set a gradient, and step."""
    weight = model.get_parameter("head.weight")
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def skip(model: nn.Module, optimizer: Optimizer) -> None:
    """Skip the step, as after a loss that is not finite."""
    optimizer.zero_grad()
    small_loss(model, small_samples(1)[0])


def look(model: nn.Module, optimizer: Optimizer) -> None:
    """Evaluate between backward and step."""
    with torch.no_grad():
        small_loss(model, small_samples(1)[0])


def fill(model: nn.Module, optimizer: Optimizer) -> None:
    """Keep gradients as zeros."""
    optimizer.zero_grad(set_to_none=False)


def share(model: nn.Module, optimizer: Optimizer) -> None:
    """Give a gradient's memory to others."""
    gradient = model.get_parameter("head.weight").grad
    assert gradient is not None
    gradient.share_memory_()


def decay(model: nn.Module, optimizer: Optimizer) -> None:
    """Write a parameter, and step."""
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(0.9)
    optimizer.step()


LOOPS = [clip, read, add, change, replace, skip, look, fill, share, decay]
READS = {
    "state_dict": lambda pair, session: pair.model.state_dict(),
    "state": lambda pair, session: pair.optimizer.state_dict(),
    "copy": lambda pair, session: copy.deepcopy(pair.model),
    "flush": lambda pair, session: session.flush(),
    "save": lambda pair, session: session.save("/nowhere"),
}


@pytest.mark.parametrize("unsuited", LOOPS)
def test_another_loop_is_refused_before_anything_is_changed(
    unsuited: Callable[[nn.Module, Optimizer], None],
) -> None:
    """In the first step. After the block, training goes on as if there had been none."""
    pair = twin(lambda p: SGD(p, lr=1e-2, momentum=0.9))
    before = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
    with pair.paged(120_000, config=OPTION):
        backward(pair, 0)
        with pytest.raises(ConfigError, match="leave that option off"):
            unsuited(pair.model, pair.optimizer)
        if unsuited is not decay:
            for name, parameter in pair.model.named_parameters():
                assert torch.equal(parameter, before[name])
        assert not pair.optimizer.state


@pytest.mark.parametrize("read_by", READS)
def test_half_a_step_is_not_read(read_by: str) -> None:
    """Between backward and step; after the step all is as in plain training."""
    pair = twin()
    with pair.paged(120_000, config=OPTION) as session:
        for seed in range(3):
            backward(pair, seed)
            with pytest.raises(ConfigError, match="read after backward"):
                READS[read_by](pair, session)
            step(pair)
    pair.assert_same()


class Twice(nn.Module):
    """Reads the head's weight again in backward, without a gradient for it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.how = how

    def _gated(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            z = self.head(y)
        return y * z

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        if self.how == "detached":
            x = nn.functional.linear(self.first(x), self.head.weight.detach())
        else:
            x = checkpoint(self._gated, x.requires_grad_(), use_reentrant=False)
        return self.head(x).square().sum()


@pytest.mark.parametrize("how", ["detached", "computed again"])
def test_a_weight_that_backward_reads_after_its_gradient_is_refused(how: str) -> None:
    """It would be that of the next step."""
    torch.manual_seed(0)
    pair = Twin(Twice(how), lambda p: SGD(p, lr=1e-2))

    def fails() -> None:
        with pytest.raises(ConfigError, match="again after its gradient"):
            pair.model(torch.randn(4, 32)).backward()

    with pair.paged(200_000, config=OPTION):
        fails()
        gc.collect()


def test_parameters_that_share_memory_are_updated_in_the_step() -> None:
    """Backward may still read the memory by another parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    model[2].weight = nn.Parameter(model[0].weight.data)
    reference = copy.deepcopy(model)
    reference[2].weight = nn.Parameter(reference[0].weight.data)
    sides = [(one, SGD(one.parameters(), lr=1e-2)) for one in (model, reference)]
    config = {**SMALL_PAGES, "step_aside": False, **OPTION}
    with dynoffload.offload(*sides[0], budget="200KB", config=config):
        for seed in range(4):
            for one, optimizer in sides:
                torch.manual_seed(seed)
                one(torch.randn(4, 32)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_denormals_are_flushed_where_the_loop_flushes_them() -> None:
    pair = twin(lambda p: AdamW(p, lr=1e-20, eps=1e-30))
    torch.set_flush_denormal(True)
    try:
        with pair.paged(120_000, config=OPTION):
            for seed in range(3):
                for model, _ in pair.sides:
                    torch.manual_seed(seed)
                    (1e-18 * small_loss(model, small_samples(1, seed)[0])).backward()
                step(pair)
    finally:
        torch.set_flush_denormal(False)
    pair.assert_same()


def test_an_interrupted_backward_loses_the_step() -> None:
    """Some updates were made."""
    pair = twin()

    def goes_on() -> None:
        pair.model.embedding.weight.register_hook(interrupt)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        loss = small_loss(pair.model, small_samples(1, 4)[0])
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        pair.optimizer.zero_grad()
        with pytest.raises(ConfigError):
            small_loss(pair.model, small_samples(1, 4)[0])

    with pytest.raises(StepLostError):
        in_a_fourth_step(pair, goes_on, settles=True)


def interrupt(gradient: Tensor) -> None:
    """Stand for a signal."""
    raise KeyboardInterrupt


def in_a_fourth_step(pair: Twin, goes_on: Callable[[], None], *, settles: bool = False) -> None:
    """Make three steps, and the gradients of a fourth, in a block; then ``goes_on``, and read the
    model if it ``settles``."""
    with pair.paged(120_000, loses=True, config=OPTION):
        for seed in range(3):
            backward(pair, seed)
            step(pair)
        backward(pair, 3)
        goes_on()
        if settles:
            pair.model.state_dict()


@pytest.mark.parametrize("unsuited", LOOPS)
def test_another_loop_later_loses_the_step(
    unsuited: Callable[[nn.Module, Optimizer], None],
) -> None:
    """As updates were made; nobody can go on with half a step."""
    pair = twin()

    def goes_on() -> None:
        with pytest.raises((ConfigError, StepLostError)):
            unsuited(pair.model, pair.optimizer)
        pair.optimizer.zero_grad()
        backward(pair, 4)

    with pytest.raises(StepLostError):
        in_a_fourth_step(pair, goes_on)
    with pytest.raises(StepLostError):
        pair.model(torch.tensor([1]))


def test_a_block_that_ends_before_the_step_says_so() -> None:
    with pytest.raises(StepLostError):
        in_a_fourth_step(twin(), lambda: None)


def test_a_lost_step_is_recovered_by_loading() -> None:
    pair = twin()
    with pair.paged(120_000, config=OPTION):
        for seed in range(3):
            backward(pair, seed)
            step(pair)
        kept = copy.deepcopy((pair.reference.state_dict(), pair.its.state_dict()))
        backward(pair, 3)
        with pytest.raises(ConfigError) as caught:
            clip(pair.model, pair.optimizer)
        assert "the step is lost" in caught.value.__notes__[0]
        pair.model.load_state_dict(kept[0])
        pair.optimizer.load_state_dict(kept[1])
        for _, optimizer in pair.sides:
            optimizer.zero_grad()
        backward(pair, 4)
        step(pair)
    pair.assert_same()


def test_parameters_without_a_gradient_and_those_of_no_optimizer() -> None:
    """They stay as they are, and their gradients are ordinary."""
    model = small()
    own = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizer = AdamW(own, lr=1e-2)
    with dynoffload.offload(model, optimizer, budget=BUDGET, config={"page_bytes": 4096, **OPTION}):
        for seed in range(3):
            small_loss(model, small_samples(1, seed)[0]).backward()
            assert type(model.head.weight.grad) is Tensor
            assert type(model.layers[0].router.weight.grad) is ConsumedGradient
            optimizer.step()
            model.zero_grad()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "needs the optimizer"),
        (lambda p: type("Own", (AdamW,), {})(p), "steps whole"),
        (lambda p: SGD(p, lr=1.0, momentum=0.9, foreach=True), "half precision"),
    ],
)
def test_what_cannot_be_updated_in_backward_is_refused(
    make: Callable[[Any], Optimizer | None], words: str
) -> None:
    model = small()
    if "half" in words:
        model = model.bfloat16()
    optimizer = make(model.parameters())
    with (
        pytest.raises(ConfigError, match=words),
        dynoffload.offload(model, optimizer, budget="1MB", config=OPTION),
    ):
        pass


def test_it_is_not_combined_with_rollback() -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        dynoffload.OffloadConfig(rollback=True, optimizer_in_backward=True)
