"""Models on the meta device get their weights inside the block, the same as plain models get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, Loop, assert_same, assert_same_training
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.runtime.session import Session

BUDGET = 256 * 1024
CONFIG = {**SMALL_PAGES, "step_aside": False}


class Net(nn.Module):
    """Large and small parameters, a tied one, a persistent and a computed buffer."""

    scale: Tensor
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("angles", torch.empty(32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the buffers their values; parameters belong to the parts."""
        with torch.no_grad():
            self.scale.fill_(0.5)
            self.angles.copy_(torch.arange(32, device=self.angles.device).float().cos())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.angles
        return self.head(self.hidden(x)) * self.scale


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a sample."""
    return nn.functional.cross_entropy(model(tokens), tokens)


SAMPLES = [torch.arange(i, i + 12) for i in range(12)]


def on_meta() -> tuple[Net, AdamW]:
    """Return a model without memory and its optimizer."""
    with torch.device("meta"):
        model = Net()
    return model, AdamW(model.parameters(), lr=1e-2)


def plain() -> Net:
    """Return the model that plain PyTorch makes of seed 3, reset as `materialize` resets."""
    model = Net()
    torch.manual_seed(3)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


@contextlib.contextmanager
def paged(model: nn.Module, optimizer: Any) -> Iterator[Session]:
    """Page a model under the budget of these tests."""
    with dynoffload.offload(model, optimizer, budget=BUDGET, pilot=None, config=CONFIG) as session:
        yield session


def compare(model: nn.Module, optimizer: Any, reference: nn.Module) -> None:
    """Train the reference as the model was trained, and compare."""
    its = AdamW(reference.parameters(), lr=1e-2)
    Loop(steps=6).run(reference, its, SAMPLES, loss_of)
    assert_same_training(model, optimizer, reference, its)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("where", ["inside", "outside", "by itself"])
def test_reset_parameters_gives_the_weights_of_a_plain_model(where: str) -> None:
    """Inside the block, noted before it, or by the first forward."""
    model, optimizer = on_meta()
    parameters = list(model.parameters())
    if where == "outside":
        assert dynoffload.materialize(model) is model
        assert all(p.is_meta for p in model.parameters())
    with paged(model, optimizer):
        torch.manual_seed(3)
        if where == "inside":
            dynoffload.materialize(model)
        Loop(steps=6).run(model, optimizer, SAMPLES, loss_of)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    compare(model, optimizer, plain())


def test_an_init_function_is_called_with_each_module_that_owns_something() -> None:
    """In the order of the modules; modules without parameters and buffers are left out."""
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            with torch.no_grad():
                tensor.fill_(0.01 * len(seen))

    model, optimizer = on_meta()
    with paged(model, optimizer):
        dynoffload.materialize(model, init)
        Loop(steps=6).run(model, optimizer, SAMPLES, loss_of)
    assert seen == ["Net", "Embedding", "Linear", "LayerNorm", "Linear", "Linear"]
    reference = Net()
    seen.clear()
    for module in reference.modules():
        if type(module).__name__ != "Sequential":
            init(module)
    compare(model, optimizer, reference)


def test_weights_from_a_safetensors_file(tmp_path: Path) -> None:
    """Under the model's own names; a tied weight is stored once."""
    reference = plain()
    tensors = dict(reference.named_parameters()) | dict(reference.named_buffers())
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, path)
    model, optimizer = on_meta()
    with paged(model, optimizer):
        dynoffload.materialize(model, path)
        Loop(steps=6).run(model, optimizer, SAMPLES, loss_of)
    compare(model, optimizer, reference)


def test_a_model_that_is_never_used_gets_its_weights_too() -> None:
    """On leaving the block, nothing is on the meta device any more."""
    model, optimizer = on_meta()
    torch.manual_seed(3)
    with paged(model, optimizer):
        pass
    reference = plain()
    assert_same(dict(model.state_dict()), dict(reference.state_dict()), "weights")


def test_inference_without_an_optimizer() -> None:
    """A model that only answers."""
    model, _ = on_meta()
    with dynoffload.offload(model, budget=BUDGET, pilot=None, config=CONFIG):
        torch.manual_seed(3)
        dynoffload.materialize(model)
        with torch.no_grad():
            answer = model(SAMPLES[0])
    with torch.no_grad():
        assert_same(answer, plain()(SAMPLES[0]), "answer")


# Errors


def test_a_module_that_cannot_reset_itself_is_named() -> None:
    """The error says which, and both remedies; the block can still be left."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)
            self.matrix = nn.Parameter(torch.empty(64, 64))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Own())

    def block() -> None:
        with paged(model, None):
            dynoffload.materialize(model)

    with pytest.raises(ConfigError, match=r"module 1 \(Own\).*reset_parameters.*init="):
        block()


@pytest.mark.parametrize("damage", ["missing tensor", "missing file", "no safetensors", "shape"])
def test_a_file_that_does_not_fit_is_a_clear_error(tmp_path: Path, damage: str) -> None:
    """It names the file, and the tensor where there is one."""
    path = tmp_path / "weights.safetensors"
    reference = plain()
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in (*reference.named_parameters(), *reference.named_buffers())
    }
    if damage == "missing tensor":
        del tensors["hidden.2.weight"]
    elif damage == "shape":
        tensors["hidden.2.weight"] = torch.zeros(3, 3)
    save_file(tensors, path)
    if damage == "missing file":
        path.unlink()
    elif damage == "no safetensors":
        path.write_bytes(b"\x00" * 100)
    model, optimizer = on_meta()
    with pytest.raises(ConfigError) as caught:
        with paged(model, optimizer):
            dynoffload.materialize(model, path)
    assert "weights.safetensors" in str(caught.value)
    if damage in ("missing tensor", "shape"):
        assert "hidden.2.weight" in str(caught.value)
