"""Hazard: how each optimizer makes its updates, when they are split by parameter and put off.

The graph: a few linear layers, with every optimizer of `torch.optim` in some of its variants
(fused, capturable, differentiable, maximize, rates that are tensors; `tests/test_exact_property.py`
has the others), over an odd-sized and a small parameter too, and for Muon, which takes
matrices only, wide and tall ones without biases; transformers' Adafactor, whose state is factored;
the user's own optimizers, and those that are refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import (
    Side,
    compared,
    each_backend,
    each_backend_in_time,
    guarded,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import dynoffload
from dynoffload.errors import ConfigError

REFUSED = {
    "LBFGS": "updates all parameters together, with one state for the group",
    "SparseAdam": "takes sparse gradients, which are not paged",
}
EXTRAS: dict[type[Optimizer], list[dict[str, Any]]] = {
    SGD: [
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "fused": True},
    ],
    torch.optim.Adam: [{"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": False}],
    AdamW: [{"lr": "tensor", "amsgrad": True, "fused": True}],
    torch.optim.Adagrad: [{"initial_accumulator_value": 0.1, "lr": "tensor"}],
    torch.optim.ASGD: [{"t0": 2.0, "weight_decay": 0.01}],
    torch.optim.Rprop: [{"etas": (0.4, 1.3)}],
    Muon: [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": "tensor"},
        {"dtype": torch.bfloat16, "nesterov": False},
    ],
}
"""Options beside those of `tests/test_exact_property.py`."""


def _variants() -> list[Any]:
    return [
        pytest.param(kind, options, id=f"{name}-{options or 'default'}")
        for name, kind in sorted(vars(torch.optim).items())
        if inspect.isclass(kind) and issubclass(kind, Optimizer)
        if kind is not Optimizer and name not in REFUSED
        for options in [{}, *EXTRAS.get(kind, [])]
    ]


class Uneven(nn.Module):
    """Layers of odd sizes: 67 × 67 and 67 × 5, and a scale of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(67, 67) for _ in range(3))
        self.head = nn.Linear(67, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.scale)
        return self.head(x)


class Matrices(nn.Module):
    """Layers without biases, wide and tall, of odd and of even sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(67, 67), (67, 128), (128, 128), (128, 67), (67, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def uneven_loss(model: nn.Module, step: int) -> Tensor:
    """Return a loss of the networks above."""
    return loss_of(model, step, width=67, classes=5)


@pytest.mark.parametrize(("kind", "options"), _variants())
@each_backend_in_time
def test_every_optimizer_of_torch(
    backend: str, kind: type[Optimizer], options: dict[str, Any]
) -> None:
    options = dict(options)
    options["lr"] = torch.tensor(1e-2) if options.get("lr") == "tensor" else 1e-2
    dtype = options.pop("dtype", torch.float32)

    def network() -> nn.Module:
        return (Matrices() if kind is Muon else Uneven()).to(dtype)

    def make(parameters: Any) -> Optimizer:  # each side has its rate
        return kind(parameters, **copy.deepcopy(options))

    hazard(backend, trained(network, loss=uneven_loss, optimizer=make, steps=5))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_split_is_refused(name: str) -> None:
    """Before anything is touched, with the optimizer's name and what to use."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    address = model.weight.data_ptr()
    with pytest.raises(ConfigError, match=f"{name} {REFUSED[name]}: use an optimizer with dense"):
        with dynoffload.offload(model, optimizer, budget="10MB"):
            raise AssertionError("it was accepted")
    assert model.weight.data_ptr() == address


@stepwise(
    each_backend,
    optimizer=lambda p: AdamW(p, lr=1e-2, capturable=True, foreach=False),
    steps=1,
    aside=False,
)
def test_capturable(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Capturable optimizers want an accelerator: the error is torch's, at the step."""
    loss_of(model, 0).backward()
    side.fails("step", optimizer.step)
    optimizer.param_groups[0]["capturable"] = False
    optimizer.state.clear()
    side.step(loss_of(model, 1), optimizer)


@stepwise(
    each_backend,
    optimizer=lambda p: AdamW(p, lr=1e-2, differentiable=True),
    steps=1,
    moves=False,
    aside=False,
)
def test_differentiable(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Torch refuses to write leaf parameters with a graph: the error is its own. It has counted
    the step of one by then, so the user loads what was there before."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss_of(model, 0).backward()
    side.fails("step", optimizer.step)
    optimizer.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


@each_backend
@pytest.mark.parametrize("relative", [True, False])
def test_adafactor_of_transformers(backend: str, relative: bool) -> None:
    """Factored moments, and a rate that comes from the parameter's own size."""
    from transformers.optimization import Adafactor

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        rate = None if relative else 1e-2
        own = {"scale_parameter": relative, "relative_step": relative, "warmup_init": relative}
        return Adafactor(parameters, lr=rate, beta1=0.9, **own)

    hazard(backend, trained(Uneven, loss=uneven_loss, optimizer=make, steps=5))


class Foreach(Optimizer):
    """One of the user's: whole lists at a time, several states to a parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        kept: dict[str, list[Tensor]] = {}
        for key in ("trace", "last", "mean"):
            for p in parameters:
                self.state[p].setdefault(key, torch.zeros_like(p))
            kept[key] = [self.state[p][key] for p in parameters]
        torch._foreach_lerp_(kept["trace"], gradients, 0.1)
        torch._foreach_addcmul_(kept["mean"], kept["trace"], kept["last"], 0.1)
        torch._foreach_copy_(kept["last"], gradients)
        torch._foreach_add_(parameters, kept["trace"], alpha=-group["lr"])
        return loss


class Late(AdamW):
    """A subclass outside of torch's modules: its step runs whole."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] *= 0.9
        return super().step(closure)


@each_backend
@pytest.mark.parametrize("kind", [Foreach, Late])
def test_an_optimizer_of_the_users(backend: str, kind: type[Optimizer]) -> None:
    make = partial(kind, lr=1e-2)
    hazard(backend, trained(Uneven, loss=uneven_loss, optimizer=make, steps=5, states=1))


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def _moved_little(paged: Side) -> None:
    """Operands that evict each other are read a thousand times; at rest a step reads some."""
    for session, budget in paged.sessions:
        assert all(row.bytes_in < 50 * budget for row in session.log.steps)


@each_backend
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
def test_operands_of_a_whole_step_stay_together(backend: str, closure: bool) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        def evaluated() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64).to(HOME)).square().mean()
            loss.backward()
            return loss

        side.see("loss", optimizer.step(evaluated) if closure else evaluated())
        if not closure:
            optimizer.step()

    program = trained(_layers, each, optimizer=Foreach, steps=3, states=1, share=0.4)
    _moved_little(hazard(backend, program, aside=False))


@each_backend
def test_operands_between_backward_and_step_stay_together(backend: str) -> None:
    """Averages of weights, which no forward uses, so that no plan holds them."""

    def averaging() -> nn.Module:
        model = nn.ModuleList(_layers() for _ in range(3))
        model.forward = model[0].forward
        model[1:].requires_grad_(False)
        return model

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        weights, first, second = (list(one.parameters()) for one in model)
        loss = model(torch.randn(8, 64).to(HOME)).square().mean()
        loss.backward()
        with torch.no_grad():
            torch._foreach_lerp_(first, second, 0.1)
            torch._foreach_addcmul_(second, first, weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        side.see("loss", loss)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD([p for p in parameters if p.requires_grad], lr=1e-2)

    program = trained(averaging, each, optimizer=make, steps=3, states=0, share=0.26)
    _moved_little(hazard(backend, program, aside=False))


@compared(each_backend)
def test_a_step_of_the_instance(side: Side) -> None:
    """``optimizer.step`` wrapped by an attribute of the instance, as schedulers do."""
    calls = []

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = SGD(parameters, lr=1e-2, momentum=0.9)
        plain = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return plain(*args, **kwargs)

        optimizer.step = counted  # type: ignore[method-assign]
        return optimizer

    trained(optimizer=make)(side)
    side.see("calls", len(calls))


@stepwise(guarded)
def test_a_closure_that_runs_the_model_twice(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """As line searches do by hand: forward and backward inside ``step()``."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step + 20)
        loss = loss_of(model, step)
        loss.backward()
        return loss

    side.see("loss", optimizer.step(closure))
