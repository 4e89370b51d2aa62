"""Hazard: torch modules that choose another kernel by what is around them.

The graph: attention layers in evaluation, whose fast path torch leaves where a module below has a
hook, a tensor has a `__torch_function__`, autocast is on, or a gradient is asked for. Each choice
must be the plain one: as the block begins, after steps, and after the block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import Side, compared, each_backend, each_backend_in_time, stepwise
from torch import Tensor, nn
from torch.optim import AdamW

WIDTH, LENGTH = 64, 8

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors, by torch


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, **options)


def encoder(nested: bool, **options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(**options), 2, enable_nested_tensor=nested)


class Attention(nn.MultiheadAttention):
    """Attention of a sequence to itself."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__(WIDTH, 2, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Any:
        y, weights = super().forward(
            x, x, x, key_padding_mask=src_key_padding_mask, need_weights=self.needs_weights
        )
        return y if weights is None else y + weights.mean()


class Decoder(nn.TransformerDecoder):
    """A decoder over its own input."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True), 2)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Any:
        return super().forward(x, x, tgt_key_padding_mask=src_key_padding_mask)


class Whole(nn.Transformer):
    """Encoder and decoder."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 1, 1, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Any:
        return super().forward(x, x, src_key_padding_mask=src_key_padding_mask)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer": layer,
    "norm first": partial(layer, norm_first=True, activation="gelu"),
    "encoder": partial(encoder, nested=False),
    "nested": partial(encoder, nested=True),
    "attention": partial(Attention, needs_weights=False),
    "attention's weights": partial(Attention, needs_weights=True),
    "decoder": Decoder,
    "transformer": Whole,
}
FAST = ("layer", "norm first", "encoder")
"""Where a hook changes the bits."""

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: autocast(),
    "grad": torch.enable_grad,
}


@contextmanager
def autocast() -> Iterator[None]:
    with torch.no_grad(), torch.autocast(HOME.type, torch.bfloat16):
        yield


class Net(nn.Module):
    """Linear layers around what chooses."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.inner(self.first(x), src_key_padding_mask=mask))


def sample(step: int) -> tuple[Tensor, Tensor]:
    """Return sequences, and which of their ends are padding."""
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    padding = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[LENGTH], [LENGTH - 3]])
    return x.to(HOME), padding.to(HOME)


def looks(side: Side, model: nn.Module, when: str) -> None:
    """Note what the model says in each mode, or that torch raises, with and without padding."""
    model.eval()
    x, padding = sample(0)
    for mode, enter in MODES.items():
        for what, mask in (("whole", None), ("padded", padding)):
            with enter():
                try:
                    side.see(f"{when}, {mode}, {what}", model(x, mask))
                except RuntimeError as error:  # autocast over nested tensors
                    side.see(f"{when}, {mode}, {what}", str(error))
    model.train()


def train(side: Side, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        side.step(model(*sample(step)).square().mean(), optimizer)


def bytes_at(weight: torch.Tensor) -> Any:
    """Return what a kernel that is given the address would touch."""
    nbytes = weight.numel() * weight.element_size()
    return (ctypes.c_char * nbytes).from_address(weight.data_ptr())


class Scaled(torch.autograd.Function):
    """Multiplies by a weight that it reads at its address, as kernels of one's own do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * torch.frombuffer(bytearray(bytes_at(weight)), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        read = torch.frombuffer(bytearray(bytes_at(weight)), dtype=x.dtype)
        return gradients[0] * read, (gradients[0] * x).sum(0)


class Scale(nn.Module):
    """A layer by `Scaled`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


@compared(each_backend_in_time)
@pytest.mark.parametrize("writes", [False, True])
def test_a_kernel_is_given_the_address_of_a_weight(side: Side, backend: str, writes: bool) -> None:
    """And reads it in forward and backward, or writes it between steps, hidden from autograd."""
    if backend == "torch":
        pytest.skip("its memory cannot be read at its address")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), Scale(512)) for _ in range(4)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, watched=False, share=0.3):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 512, generator=generator)
            side.step(model(x).square().mean(), optimizer)
            if writes:
                for layer in model:
                    values = torch.full((512,), 0.5 + step).numpy().tobytes()
                    bytes_at(layer[1].weight)[: len(values)] = values
            with torch.no_grad():
                side.see("score", model(x))


@compared(each_backend_in_time)
@pytest.mark.parametrize("kind", LAYERS)
def test_each_layer_takes_the_kernel_that_it_takes_plainly(side: Side, kind: str) -> None:
    model = Net(LAYERS[kind]).to(HOME)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    looks(side, model, "before the block")
    with side.offload(model, optimizer, share=0.5):
        looks(side, model, "at its start")
        train(side, model, optimizer, range(4))
        looks(side, model, "after steps")
        train(side, model, optimizer, range(4, 7))
    looks(side, model, "after it")


@pytest.mark.parametrize("kind", FAST)
def test_a_hook_would_change_the_bits(kind: str) -> None:
    """So the test above can fail."""
    torch.manual_seed(0)
    model = Net(LAYERS[kind]).eval()
    with torch.no_grad():
        plain = model(*sample(0))
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: None)
        assert not torch.equal(model(*sample(0)), plain)


@compared(each_backend)
@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_a_root_that_chooses(side: Side, kind: str) -> None:
    """The managed root itself is what chooses, and its own hooks count."""
    model = LAYERS[kind]()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with side.offload(model, optimizer, share=0.5):
        for step in range(4):
            x, mask = sample(step)
            with torch.no_grad():
                side.see("score", model.eval()(x, src_key_padding_mask=mask))
            side.step(model.train()(x, src_key_padding_mask=mask).square().mean(), optimizer)
    with torch.no_grad():
        side.see("after it", model.eval()(*sample(0)[:1]))


class Products(nn.Module):
    """Operators whose kernels hang on what stands above a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pairs = nn.Linear(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.transpose(0, 1)).float()
        return self.pairs(x, torch.tanh(x)) / WIDTH


@stepwise(each_backend, Products, optimizer=partial(AdamW, lr=1e-3), share=0.5)
def test_operators_made_of_others(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """A transposed batch in inference mode; products within an operator under autocast."""
    x = sample(step)[0]
    for mode, enter in MODES.items():
        with enter():
            side.see(mode, model(x))
    with torch.autocast(HOME.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    side.step(loss, optimizer)


@compared(each_backend_in_time)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_hook_of_the_users_keeps_its_meaning(side: Side, when: str) -> None:
    """Torch leaves the fast path for it, and its module is called."""
    model = Net(LAYERS["layer"])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    calls: list[int] = []

    def register() -> Any:
        return model.inner.linear1.register_forward_hook(lambda *_: calls.append(1))

    handle = register() if when == "before" else None
    with side.offload(model, optimizer, share=0.5):
        handle = handle or register()
        looks(side, model, "with a hook")
        train(side, model, optimizer, range(3))
        looks(side, model, "with a hook, after steps")
        handle.remove()
        looks(side, model, "without")
    side.see("calls", len(calls))
