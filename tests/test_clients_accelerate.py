"""accelerate: a loop over what ``prepare`` returns, inside ``offload()``, to the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged, each_backend, network, quarter, samples
from exactness import assert_ordinary, assert_same, assert_same_training
from torch import Tensor, nn

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.runtime.updates.update import innermost

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerators share a state; each test begins with none."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(precision: str = "no") -> tuple[Any, nn.Module, Any, Any, Any]:
    """Return an accelerator and what it prepared: model, optimizer, batches, schedule."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
    )
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    batches = torch.utils.data.DataLoader(samples(), batch_size=2)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(model, optimizer, batches, schedule)


def train(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any, schedule: Any) -> Any:
    """Run an epoch of six steps of two batches each, and return the losses."""
    losses: list[Tensor] = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@each_backend
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_prepared_loop_trains_to_the_same_bits(backend: str, precision: str) -> None:
    """Accumulation, clipping, a schedule and autocast, all by accelerate."""
    plain = prepared(precision)
    expected = train(*plain)
    accelerator, model, optimizer, batches, schedule = prepared(precision)
    with dynoffload.offload(model, optimizer, **quarter(backend)) as session:
        losses = train(accelerator, model, optimizer, batches, schedule)
        assert session.optimizer is optimizer.optimizer
        assert accelerator.unwrap_model(model) is model
    assert_paged(session, steps=6)
    assert_same(losses, expected, "losses")
    assert_ordinary(model, innermost(optimizer))
    assert_same_training(model, innermost(optimizer), plain[1], innermost(plain[2]))


def test_preparing_inside_the_block_is_the_same() -> None:
    """``prepare`` moves the model and loads the optimizer's own state into it."""
    plain = prepared()
    expected = train(*plain)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dynoffload.offload(model, optimizer, **quarter()) as session:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        batches = torch.utils.data.DataLoader(samples(), batch_size=2)  # type: ignore[arg-type]
        losses = train(accelerator, *accelerator.prepare(model, optimizer, batches, schedule))
    assert_paged(session, steps=6)
    assert_same(losses, expected, "losses")
    assert_same_training(model, optimizer, plain[1], innermost(plain[2]))


def test_its_checkpoints_are_exact_in_both_directions(tmp_path: Path) -> None:
    """``save_state`` in a block and out of it write the same; a block reads either."""
    plain = prepared()
    train(*plain)
    plain[0].save_state(tmp_path / "plain")
    expected = train(*plain)

    accelerator, model, optimizer, batches, schedule = prepared()
    with dynoffload.offload(model, optimizer, **quarter()):
        train(accelerator, model, optimizer, batches, schedule)
        accelerator.save_state(tmp_path / "paged")
    for name in ("optimizer.bin", "scheduler.bin"):
        found = [torch.load(tmp_path / d / name, weights_only=False) for d in ("paged", "plain")]
        assert_same(*found, name)
    from safetensors.torch import load_file

    found = [load_file(tmp_path / d / "model.safetensors") for d in ("paged", "plain")]
    assert_same(*found, "weights")

    accelerator, model, optimizer, batches, schedule = prepared()
    with dynoffload.offload(model, optimizer, **quarter()) as session:
        accelerator.load_state(tmp_path / "plain")
        losses = train(accelerator, model, optimizer, batches, schedule)
    assert_paged(session, steps=6)
    assert_same(losses, expected, "losses")
    assert_same_training(model, innermost(optimizer), plain[1], innermost(plain[2]))


def test_a_model_on_the_meta_device_is_prepared_and_given_its_weights() -> None:
    """`materialize` notes them; ``prepare`` leaves the model where it is."""

    @torch.no_grad()
    def give(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))

    accelerator = accelerate.Accelerator(cpu=True)
    reference = network()
    for module in reference.modules():
        give(module)
    with torch.device("meta"):
        model = network()
    dynoffload.materialize(model, give)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with dynoffload.offload(model, optimizer, **quarter()):
        pass
    assert_same(dict(model.state_dict()), dict(reference.state_dict()), "weights")


def test_one_optimizer_in_two_wrappers_is_one() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, other = network(), network()
    inner = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    wrappers = [accelerator.prepare_optimizer(inner), copy.copy(accelerator.prepare(inner))]
    with dynoffload.offload(model, wrappers[0], **quarter()):
        with pytest.raises(ConfigError, match="this AdamW already belongs to an offload"):
            with dynoffload.offload(other, wrappers[1], **quarter()):
                pytest.fail("the block must not begin")


def test_a_model_that_is_spread_is_refused() -> None:
    wrapped = nn.DataParallel(network())
    with pytest.raises(
        ConfigError,
        match=r"Recurrent is wrapped in DataParallel.*serves one device in a process; pass",
    ):
        with dynoffload.offload(wrapped, **quarter()):
            pytest.fail("the block must not begin")
