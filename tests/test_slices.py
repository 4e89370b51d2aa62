"""Fused experts are paged by slice, and train to the bits of plain PyTorch: see `slice_cases`."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import Twin, footprint_of
from fused_networks import PAGES, Chosen, fused_of
from hazards import Side, each_with_slices_in_time, hazard
from slice_cases import (
    NETWORKS,
    Case,
    Loss,
    adamw,
    chosen_step,
    clipped,
    fused,
    gradients_of,
    matched,
    plain,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

pytestmark = pytest.mark.timeout(120)


class Signed(nn.Module):
    """Experts whose gradients are -0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * 32 * 32).view(4, 32, 32))

    def forward(self, hit: list[int]) -> Tensor:
        """Return 0."""
        return torch.stack([(self.weight[number] * -0.0).sum() for number in hit]).sum()


# Loops


def accumulated(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Three backwards to a step: experts hit by one, by all, by none."""
    for part in range(3):
        (loss(3 * number + part) / 3).backward()
    yield gradients_of(model) if number % 3 == 0 else []


def scaled(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A gradient scaler, which overflows now and then; then a step without gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(number) * (float("inf") if number == 3 else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    yield scaler.get_scale()


def autocast(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Half precision where autocast wants it."""
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(number)
    value.backward()
    yield value


# Graphs


def two_forwards(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Autograd sums what both contribute before it hands it over."""
    (loss(number) + loss(number + 1) + loss(number + 3)).backward()
    yield
    yield fused(model)


def weight_penalty(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The parameter is used beside its experts."""
    (loss(number) + loss(number + 1) + sum((p**2).sum() for p in fused(model))).backward()
    yield


def gradients_asked_for(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Gradients go to the caller, and stay with him over later steps."""
    gradients = torch.autograd.grad(loss(number), fused(model))
    for parameter, gradient in zip(fused(model), gradients, strict=True):
        parameter.grad = gradient
    held = model.__dict__.setdefault("_held", [])
    held.append(gradients)
    yield
    yield held


def some_inputs(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Backward to some parameters only."""
    yield loss(number).backward(inputs=fused(model)[:1])


def with_hooks(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The user's hooks see each gradient, and change one."""
    seen: list[Tensor] = []
    first, *others = fused(model)
    handles = [first.register_hook(lambda gradient: gradient * 2 + 1)]
    handles += [
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))  # type: ignore
        for p in others
    ]
    loss(number).backward()
    for handle in handles:
        handle.remove()
    yield seen


# Interference


def writing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Parameters, gradients and state are changed in place."""
    loss(number).backward()
    first, second, *_ = fused(model)
    with torch.no_grad():
        if second.grad is not None:
            second.grad[number % 4].add_(0.5)
        yield
        first.mul_(0.99)
        second[number % 4].add_(0.01)
        optimizer.state[first]["exp_avg"][number % 4].mul_(0.5)
        optimizer.state[first]["step"].add_(1)


def replacing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Other tensors take the place of gradient, parameter and state."""
    loss(number).backward()
    first, second, *_ = fused(model)
    if number == 1:
        assert first.grad is not None
        first.grad = first.grad * 2
    if number == 3:
        second.data = second.data.clone()
    yield
    if number == 4:
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"] * 0.5
    if number == 6:
        second.data = second.data.clone()


def copying(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A copy of the model has the values of the step."""
    loss(number).backward()
    yield
    yield list(copy.deepcopy(model).parameters())


def changing_groups(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The hyperparameters of a step are those that were set at that step."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + number)
        group["weight_decay"] = 0.1 * (number % 2)
    yield loss(number).backward()


def skipping(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A gradient is taken away before the step: that parameter has none."""
    loss(number).backward()
    if number % 2:
        fused(model)[0].grad = None
    yield


def swapping(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Another gradient, in another row, takes the place of the one that backward made."""
    loss(number).backward()
    parameters = [p for p in fused(model) if p.grad is not None]
    others = torch.autograd.grad(loss(number + 1), parameters)
    for parameter, gradient in zip(parameters, others, strict=True):
        if number % 3 == 2:
            parameter.grad = gradient
    yield


LOOPS = [clipped, accumulated, scaled, autocast]
GRAPHS = [two_forwards, weight_penalty, gradients_asked_for, some_inputs, with_hooks]
INTERFERENCE = [writing, replacing, copying, changing_groups, skipping, swapping]


@each_with_slices_in_time
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.__name__)
def test_loops(backend: str, case: Case, network: str) -> None:
    """A user's own experts, and Mixtral's."""
    matched(backend, network, case, bounded=backend == "pager")


@pytest.mark.parametrize("network", NETWORKS)
def test_other_backends(network: str) -> None:
    """All ways into the experts."""
    matched("mapped", network, accumulated, steps=4)


@each_with_slices_in_time
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.__name__)
def test_graphs(backend: str, case: Case, network: str) -> None:
    """What backward is asked for."""
    matched(backend, network, case, steps=6)


@each_with_slices_in_time
@pytest.mark.parametrize("network", ["indexed", "parts"])
@pytest.mark.parametrize("case", INTERFERENCE, ids=lambda case: case.__name__)
def test_interference(backend: str, case: Case, network: str) -> None:
    """What users do between."""
    matched(backend, network, case)


# Optimizers


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True, "amsgrad": True}),
    "AdamW fused": (AdamW, {"fused": True, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD decay": (SGD, {"weight_decay": 0.1}),
    "SGD nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (SGD, {"momentum": 0.9, "fused": True}),
}


@each_with_slices_in_time
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(backend: str, name: str) -> None:
    """Those whose step is the same for every element; steps add up while experts are not hit."""
    kind, options = OPTIMIZERS[name]
    make = lambda model: kind(model.parameters(), lr=1e-2, **options)  # noqa: E731
    states = 0 if name == "SGD decay" else 2  # half of parameters and gradients, not all of them
    matched(backend, "indexed", plain, make=make, steps=10, states=states)


def half_loss(model: nn.Module, seed: int) -> Tensor:
    """Return a loss in half precision, of a sample that hits all experts."""
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed))
    return (model(x.to(torch.bfloat16), range(5)) ** 2).mean()


ROUNDING: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "rounds often": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "cuts between cache lines": (AdamW, {"fused": True}),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ROUNDING)
def test_half_precision(name: str, threads: int) -> None:
    """Where scalar code rounds otherwise than vectors do, slices must end where threads do not: a
    third of the parameter is no multiple of the vector size, so it is updated whole."""
    kind, options = ROUNDING[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        twin = Twin(Chosen(5, 128).to(torch.bfloat16), lambda p: kind(p, lr=1e-2, **options))
        with twin.paged(footprint_of(twin.model), config=PAGES) as session:
            assert fused_of(session)
            twin.train(half_loss, range(6))
        twin.assert_same()
    finally:
        torch.set_num_threads(before)


class Mixed(AdamW):
    """An optimizer of a user's own."""


@pytest.mark.parametrize("kind", [Mixed, torch.optim.Adafactor])
def test_other_optimizers_see_the_parameter_whole(kind: Any) -> None:
    """What is not known to treat elements apart is given whole parameters."""
    twin = Twin(Chosen(), lambda p: kind(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model), config=PAGES) as session:
        assert not fused_of(session)
        twin.train(chosen_step, range(3))
    twin.assert_same()


# Zeros


@each_with_slices_in_time
@pytest.mark.parametrize("hit", [[1], [1, 3], [3, 0, 1]], ids=str)
@pytest.mark.parametrize("on_parts", [False, True])
def test_signed_zeros(backend: str, hit: list[int], on_parts: bool) -> None:
    """The only expert's gradient keeps its -0; a sum with another's zeros does not. So it is by
    indexing and where an experts' class of transformers runs on parts; a second backward adds."""
    kind: Any = Signed
    if on_parts:
        pytest.importorskip("transformers")
        from transformers.integrations.moe import use_experts_implementation

        kind = use_experts_implementation(type("OnParts", (Signed,), {"forward": Signed.forward}))

    def program(side: Side) -> None:
        model = nn.Sequential(kind(SimpleNamespace(_experts_implementation="eager")))
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=2, **PAGES) as session:
            assert session is None or fused_of(session)
            for number in range(4):
                model(hit).backward()
                (seen,) = gradients_of(model)
                minus = torch.signbit(seen).flatten(1).any(1).tolist()
                alone = len(hit) == 1 and number != 2  # the third is added to zeros
                assert minus == [alone and expert == hit[0] for expert in range(4)]
                side.see("gradient", seen)
                if number % 2:
                    model([2]).backward()
                    side.see("sum", gradients_of(model))
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)

    hazard(backend, program, moves=False)
