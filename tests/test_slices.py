"""Fused experts are paged by slice, and train to the bits of plain PyTorch.

Each way in which users train or interfere is a function of one step that returns what there is to
see. It runs on a paged network and on a plain copy, over several steps in which changing experts
are hit, and everything seen is compared bit for bit, as are parameters, gradients and optimizer
state at the end. The networks reach their experts in three ways: a user's own by indexing the
parameter, a Mixtral of transformers whose eager loop is given parts, and one that takes the
parameter whole (grouped_mm).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import Twin, assert_same, assert_same_training, bits, footprint_of, needs_pager
from fused_networks import PAGES, Chosen, chosen_loss, fused_of, mixtral, mixtral_loss, paging_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import dynoffload
import dynoffload.moe
from dynoffload.errors import BudgetError
from dynoffload.runtime.updates import slices
from dynoffload.runtime.updates.slices import SliceUpdate

_EMULATED = pytest.param("emulated", marks=pytest.mark.slow)  # see tests/test_accelerator_rows.py
BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped", _EMULATED]
Loss = Callable[[int], Tensor]
Step = Callable[[nn.Module, Optimizer, Loss, int], Any]

pytestmark = pytest.mark.timeout(120)

HITS = [[0, 1], [2], [1, 4], [0, 3], [2, 4], [4], [1, 3], [5, 0]]


def chosen_step(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's sample, which hits the experts of `HITS`."""
    return chosen_loss(model, (step, HITS[step % len(HITS)]))


def transformers_mixtral(implementation: str) -> nn.Module:
    """Return a Mixtral; skip without transformers."""
    pytest.importorskip("transformers")
    return mixtral(implementation)


def use(model: nn.Module, implementation: str) -> None:
    """Have a model of transformers run its experts by a registered implementation."""
    dynoffload.moe.register()
    model.set_experts_implementation(implementation)  # type: ignore[operator]


def use_in_both(twin: Twin, implementation: str) -> None:
    """Have both copies run their experts so."""
    use(twin.model, implementation)
    use(twin.reference, implementation)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "indexed": (Chosen, chosen_step),
    "parts": (partial(transformers_mixtral, "eager"), mixtral_loss),
    "whole": (partial(transformers_mixtral, "grouped_mm"), mixtral_loss),
}


def signed_experts() -> nn.Module:
    """Return an experts' class of transformers whose gradients are -0."""
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation
    class Signed(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * 32 * 32).view(4, 32, 32))

        def forward(self, hit: list[int]) -> Tensor:
            return torch.stack([(self.weight[number] * -0.0).sum() for number in hit]).sum()

    experts = Signed(SimpleNamespace(_experts_implementation="eager"))
    return nn.Sequential(experts)


def fused(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hold one matrix for each expert."""
    return [p for p in model.parameters() if p.dim() == 3]


@contextmanager
def on(backend: str) -> Iterator[dict[str, Any]]:
    """Yield what a session on a backend is told, which may be an emulated accelerator."""
    if backend == "emulated":
        with accelerated(elsewhere=True):
            yield {"device": DEVICE, "config": PAGES}
    else:
        yield {"config": {**PAGES, "backend": backend}}


def _with(its: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Return what a session is told, with more options."""
    return {**its, "config": {**its["config"], **config}}


def matched(
    network: str,
    step: Step,
    *,
    backend: str = "auto",
    make: Callable[..., Optimizer] = AdamW,
    steps: int = 7,
    share: int = 2,
    bounded: bool = False,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Twin:
    """Run ``step`` on both copies of a network, and compare all there is to see."""
    build, loss_of = NETWORKS[network]
    twin = Twin(build(), lambda p: make(p, lr=1e-2, **options))
    budget = footprint_of(twin.model) // share
    with on(backend) as its, twin.paged(budget, **_with(its, **(config or {}))) as session:
        assert len(fused_of(session)) == len(fused(twin.model)), "nothing is paged by slices"
        for number in range(steps):
            seen = []
            for model, optimizer in twin.sides:
                torch.manual_seed(number)
                seen.append(step(model, optimizer, partial(loss_of, model), number))
            assert_same(seen[0], seen[1], f"step {number}")
            assert not bounded or session.stats["peak_fast_bytes"].max() <= budget
    twin.assert_same()
    return twin


# Loops


def plain(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Forward, backward, step."""
    value = loss(number)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def clipped(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The norm of all gradients reads them whole, and scaling writes them."""
    loss(number).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def clipped_by_value(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Each gradient in place."""
    loss(number).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return number


def accumulated(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Three backwards to a step: experts hit by one, by all, by none."""
    for part in range(3):
        (loss(3 * number + part) / 3).backward()
    seen = [p.grad.clone() for p in fused(model) if p.grad is not None] if number % 3 == 0 else []
    optimizer.step()
    optimizer.zero_grad()
    return seen


def late_zeroing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Gradients are read after the step."""
    optimizer.zero_grad()
    loss(number).backward()
    optimizer.step()
    return [p.grad.sum() for p in fused(model) if p.grad is not None]


def scaled(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A gradient scaler, which overflows now and then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    value = loss(number) * (float("inf") if number == 3 else 1.0)
    scaler.scale(value).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def autocast(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Half precision where autocast wants it."""
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(number)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


LOOPS = [plain, clipped, clipped_by_value, accumulated, late_zeroing, scaled, autocast]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_loops(step: Step, network: str) -> None:
    """A user's own experts, and Mixtral's."""
    matched(network, step, bounded=True)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("network", NETWORKS)
def test_other_backends(network: str, backend: str) -> None:
    """All ways into the experts."""
    matched(network, accumulated, backend=backend, steps=4)


# Graphs


def two_forwards(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Autograd sums what both contribute before it hands it over."""
    (loss(number) + loss(number + 1) + loss(number + 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [bits(p.detach()) for p in fused(model)]


def weight_penalty(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The parameter is used beside its experts."""
    (loss(number) + loss(number + 1) + sum((p**2).sum() for p in fused(model))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return number


def gradients_asked_for(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Gradients go to the caller, and stay with him over later steps."""
    parameters = fused(model)
    gradients = torch.autograd.grad(loss(number), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    held = model.__dict__.setdefault("_held", [])
    held.append(gradients)
    return list(held)


def some_inputs(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Backward to some parameters only."""
    loss(number).backward(inputs=fused(model)[:1])
    optimizer.step()
    optimizer.zero_grad()
    return number


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
    optimizer.step()
    optimizer.zero_grad()
    return seen


GRAPHS = [two_forwards, weight_penalty, gradients_asked_for, some_inputs, with_hooks]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("step", GRAPHS, ids=lambda step: step.__name__)
def test_graphs(step: Step, network: str) -> None:
    """What backward is asked for."""
    matched(network, step, steps=6)


# Interference


def writing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Parameters, gradients and state are changed in place."""
    loss(number).backward()
    first, second, *_ = fused(model)
    with torch.no_grad():
        if second.grad is not None:
            second.grad[number % 4].add_(0.5)
        optimizer.step()
        first.mul_(0.99)
        second[number % 4].add_(0.01)
        optimizer.state[first]["exp_avg"][number % 4].mul_(0.5)
        optimizer.state[first]["step"].add_(1)
    optimizer.zero_grad()
    return number


def replacing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Other tensors take the place of gradient, parameter and state."""
    loss(number).backward()
    first, second, *_ = fused(model)
    if number == 1:
        assert first.grad is not None
        first.grad = first.grad * 2
    if number == 3:
        second.data = second.data.clone()
    optimizer.step()
    if number == 4:
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"] * 0.5
    if number == 6:
        second.data = second.data.clone()
    optimizer.zero_grad()
    return number


def copying(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A copy of the model computes by itself."""
    plain(model, optimizer, loss, number)
    other = copy.deepcopy(model)
    return [p.detach() for p in other.parameters()]


def changing_groups(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The hyperparameters of a step are those that were set at that step."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + number)
        group["weight_decay"] = 0.1 * (number % 2)
    return plain(model, optimizer, loss, number)


def skipping(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A gradient is taken away before the step: that parameter has none."""
    loss(number).backward()
    if number % 2:
        fused(model)[0].grad = None
    optimizer.step()
    optimizer.zero_grad()
    return number


def swapping(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Another gradient takes the place of the one for which updates may be made already."""
    loss(number).backward()
    parameters = [p for p in fused(model) if p.grad is not None]
    others = torch.autograd.grad(loss(number + 1), parameters)
    for parameter, gradient in zip(parameters, others, strict=True):
        if number % 3 == 2:
            parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return number


INTERFERENCE = [writing, replacing, copying, changing_groups, skipping]


@pytest.mark.parametrize("network", ["indexed", "parts"])
@pytest.mark.parametrize("step", INTERFERENCE, ids=lambda step: step.__name__)
def test_interference(step: Step, network: str) -> None:
    """What users do between."""
    matched(network, step)


@needs_pager
def test_another_gradient_of_ours() -> None:
    """It lies in a row like the one before it; every update that can be is drafted."""
    config = {"draft_share": 1.0}
    matched("parts", swapping, steps=9, share=1, config=config)


ON_ACCELERATORS = [*LOOPS, *GRAPHS, *INTERFERENCE]


@pytest.mark.slow
@pytest.mark.parametrize("network", ["parts", "whole"])
@pytest.mark.parametrize("step", ON_ACCELERATORS, ids=lambda step: step.__name__)
def test_on_an_accelerator(step: Step, network: str) -> None:
    """What users do with transformers' experts, on an emulated one."""
    matched(network, step, backend="emulated", steps=5, share=1)


# Optimizers


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adagrad from 0.1": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW maximize": (AdamW, {"maximize": True, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (SGD, {}),
    "SGD decay": (SGD, {"weight_decay": 0.1}),
    "SGD momentum": (SGD, {"momentum": 0.9}),
    "SGD nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (SGD, {"momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("backend", ["auto", _EMULATED])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, backend: str) -> None:
    """Those whose step is the same for every element; steps add up while experts are not hit."""
    make, options = OPTIMIZERS[name]
    matched("indexed", late_zeroing, make=make, steps=10, backend=backend, **options)


def rmsprop(parameters: Any) -> Optimizer:
    """An optimizer whose step rounds often."""
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1)


def fused_adam(parameters: Any) -> Optimizer:
    """One whose kernel cuts between cache lines."""
    return AdamW(parameters, lr=1e-2, fused=True)


def half_loss(model: nn.Module, seed: int) -> Tensor:
    """Return a loss in half precision, of a sample that hits all experts."""
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed))
    return (model(x.to(torch.bfloat16), range(5)) ** 2).mean()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", [rmsprop, fused_adam], ids=lambda make: make.__name__)
def test_half_precision(make: Callable[[Any], Optimizer], threads: int) -> None:
    """Where scalar code rounds otherwise than vectors do, slices must end where threads do not: a
    third of the parameter is no multiple of the vector size, so it is updated whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        twin = Twin(Chosen(5, 128).to(torch.bfloat16), make)
        with twin.paged(footprint_of(twin.model), config=PAGES) as session:
            assert fused_of(session)
            twin.train(half_loss, range(6))
        twin.assert_same()
    finally:
        torch.set_num_threads(before)


class Mixed(AdamW):
    """An optimizer of a user's own."""


@pytest.mark.parametrize(
    ("make", "options"),
    [(Mixed, {}), (torch.optim.Adafactor, {})],
    ids=["a user's own", "Adafactor"],
)
def test_other_optimizers_see_the_parameter_whole(make: Any, options: dict[str, Any]) -> None:
    """What is not known to treat elements apart is given whole parameters."""
    twin = Twin(Chosen(), lambda p: make(p, lr=1e-2, **options))
    with twin.paged(footprint_of(twin.model), config=PAGES) as session:
        assert not fused_of(session)
        twin.train(chosen_step, range(3))
    twin.assert_same()


# Zeros


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hit", [[1], [1, 3], []], ids=["one", "two", "none"])
def test_signed_zeros(hit: list[int], backend: str) -> None:
    """The only expert's gradient keeps its -0; a sum with another's zeros does not."""

    def step(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
        (p,) = [p for name, p in model.named_parameters() if name == "experts.up"]
        value = (model.head * 1.0).sum()  # type: ignore[operator]
        for expert in hit:
            value = value + (p[expert] * -0.0).sum()
        value.backward()
        first = None if p.grad is None else p.grad.clone()
        (p[2] * -0.0).sum().backward()
        seen = [first, None if p.grad is None else p.grad.clone()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        return [one for one in seen if one is not None]

    matched("indexed", step, backend=backend, steps=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hit", [[1], [1, 3], [3, 0, 1]], ids=str)
def test_signed_zeros_of_gradients_per_expert(hit: list[int], backend: str) -> None:
    """The same where an experts' class of transformers runs on parts; a second backward adds."""
    pytest.importorskip("transformers")
    twin = Twin(signed_experts(), lambda p: AdamW(p, lr=1e-2))
    with (
        on(backend) as its,
        twin.paged(footprint_of(twin.model) * 2, **_with(its, draft_share=1.0)) as session,
    ):
        assert fused_of(session)
        for number in range(4):
            seen = []
            for model, optimizer in twin.sides:
                model(hit).backward()
                seen.append([p.grad.clone() for p in fused(model) if p.grad is not None])
                if number % 2:
                    model([2]).backward()
                    seen[-1] += [p.grad.clone() for p in fused(model) if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
            assert_same(seen[0], seen[1], f"gradients of step {number}")
            minus = torch.signbit(seen[0][0]).flatten(1).any(1).tolist()
            assert minus == [len(hit) == 1 and number == hit[0] for number in range(4)]
    twin.assert_same()


# What moves


def moved(session: Any, first: int) -> dict[str, int]:
    """Return the bytes moved in or out from step ``first`` on, by name of region."""
    counts: dict[str, int] = {}
    began = min(span.start for span in session.log.phases if span.step >= first)
    for transfer in session.log.transfers:
        if transfer.start >= began:
            name = transfer.region
            counts[name] = counts.get(name, 0) + transfer.nbytes
    return counts


def zeroing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A step that keeps gradients and writes zeros over them; between steps no graph holds what
    adds to them, and what nobody holds is collected some time."""
    if number == 1:
        gc.collect()
    value = loss(number)
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return value.detach()


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), _EMULATED])
@pytest.mark.parametrize(
    "loop", [plain, clipped, clipped_by_value, zeroing], ids=lambda loop: loop.__name__
)
def test_experts_that_are_not_hit_move_no_byte(loop: Step, backend: str) -> None:
    """Over forty steps of AdamW, which in plain PyTorch changes all experts in each; under a budget
    that holds neither all parameters nor half of the state. Clipping reads and writes every
    gradient as a whole: those of experts that are not hit are zeros before and after."""
    twin = Twin(Chosen(8), lambda p: AdamW(p, lr=1e-2))
    hits = [[1, 5], [5], [1, 6]]

    def loss(model: nn.Module, number: int) -> Tensor:
        return chosen_loss(model, (number, hits[number % 3]))

    budget = footprint_of(twin.model) // 5
    with on(backend) as its, twin.paged(budget, **its) as session:
        for number in range(45):
            for model, optimizer in twin.sides:
                loop(model, optimizer, partial(loss, model), number)
        counts = moved(session, 8)  # copies on the queues of an accelerator may be late by a step
        assert session.stats["bytes_in"].iloc[5:].min() > 0, "everything fits: this shows nothing"
        for number in range(8):
            mine = {k: n for k, n in counts.items() if k.startswith("experts.") and n}
            mine = {k: n for k, n in mine.items() if f"[{number}]" in k}
            assert bool(mine) == (number in (1, 5, 6)), mine
        expected = twin.reference.experts.up[3].detach()  # type: ignore[union-attr, operator]
        assert not torch.equal(expected, Chosen(8).experts.up[3]), "AdamW changes all of them"
    twin.assert_same()


@needs_pager
@pytest.mark.parametrize("implementation", ["eager", "dynoffload"])
def test_experts_of_transformers_that_are_not_hit_move_no_byte(implementation: str) -> None:
    """By the loop on parts, over twenty steps; the router's choice is fixed."""
    model = transformers_mixtral("eager")
    for layer in model.model.layers:  # type: ignore[union-attr]
        gate = layer.mlp.gate  # type: ignore[union-attr]
        gate.weight.requires_grad_(False).zero_()[1] = 1.0  # type: ignore[union-attr, operator]

        def choose(module: nn.Module, args: Any, output: Any) -> Any:
            logits, scores, indices = output
            return logits, scores, torch.tensor([1, 3]).expand_as(indices)

        gate.register_forward_hook(choose)  # type: ignore[union-attr, operator]
    twin = Twin(model, lambda p: AdamW(p, lr=1e-2))
    use_in_both(twin, implementation)
    with twin.paged(footprint_of(model) // 4, config=PAGES) as session:
        twin.train(mixtral_loss, range(25))
        counts = moved(session, 5)
        experts = {name: n for name, n in counts.items() if ".experts." in name and n}
        assert any("[1]" in name for name in experts), "the experts that are hit move"
        assert not [name for name in experts if "[0]" in name or "[2]" in name]
    twin.assert_same()


@needs_pager
def test_a_slice_lags_behind_by_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its updates are made, so what waits is bounded; not those of all slices at once, and the
    bits are the same."""
    monkeypatch.setattr(slices, "MOST_STEPS", 16)
    twin = Twin(Chosen(8), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2, config=PAGES) as session:
        pending = paging_of(session).updates.pending.by_slot  # type: ignore[union-attr]
        seen = set()
        for number in range(40):
            twin.train(lambda model, n: chosen_loss(model, (n, [0])), range(number, number + 1))
            lags = [len(u.steps) for u in pending.values() if isinstance(u, SliceUpdate)]
            assert max(lags) <= 16
            seen.add(tuple(lags))
        assert any(len(set(lags)) > 1 for lags in seen), "all slices were updated at once"
    twin.assert_same()


@needs_pager
def test_gradients_are_made_per_expert() -> None:
    """By the loop on parts no tensor of the whole parameter's form is made; the stock loop makes
    one for each expert hit."""
    twin = Twin(transformers_mixtral("eager"), lambda p: AdamW(p, lr=1e-2))
    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 3 and out.shape[1:] in sizes:
                made.append(str(function))
            return out

    sizes = {p.shape[1:] for p in fused(twin.model)}
    with twin.paged(footprint_of(twin.model) // 2, config=PAGES):
        twin.train(mixtral_loss, range(3))
        loss = mixtral_loss(twin.model, 3)
        with Watch():
            loss.backward()
        fresh = [name for name in made if "select_backward" in name or "zeros" in name]
        assert not fresh
        with Watch():
            mixtral_loss(twin.reference, 3).backward()
        assert any("select_backward" in name for name in made), "the watch sees the stock loop"
    assert_same(
        [p.grad for p in twin.model.parameters()],
        [p.grad for p in twin.reference.parameters()],
        "gradients",
    )


# Around


def test_what_is_no_multiple_of_a_page_stays_whole() -> None:
    """As do parameters over a part of a storage, and those of other forms."""
    twin = Twin(Chosen(3, 34), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model), config=PAGES) as session:
        assert not fused_of(session)
    both = torch.randn(8, 32, 32)
    model = nn.Module()
    model.register_parameter("one", nn.Parameter(both[:4]))
    model.register_parameter("two", nn.Parameter(both[4:]))
    model.register_parameter("flat", nn.Parameter(torch.randn(64, 64)))
    with dynoffload.offload(model, budget="1MiB", config=PAGES) as session:
        assert not fused_of(session)


def test_a_budget_below_one_fused_parameter_will_do() -> None:
    """What must fit at once is an expert's update, not that of all."""
    twin = Twin(Chosen(32), lambda p: AdamW(p, lr=1e-2))
    largest = max(p.numel() * 4 for p in twin.model.parameters())
    with twin.paged(largest, config=PAGES) as session:
        twin.train(chosen_step, range(4))
        assert session.stats["peak_fast_bytes"].max() <= largest
    twin.assert_same()
    with pytest.raises(BudgetError), twin.paged(largest, config={**PAGES, "slices": False}):
        pass


def test_the_registry_is_as_it_was_after_the_block() -> None:
    """Nor is the model's configuration changed, or its class."""
    twin = Twin(transformers_mixtral("eager"), lambda p: AdamW(p, lr=1e-2))
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = dict(ALL_EXPERTS_FUNCTIONS.items())

    def interrupted() -> None:
        with twin.paged(footprint_of(twin.model), config=PAGES):
            assert "eager" in ALL_EXPERTS_FUNCTIONS
            assert twin.model.config._experts_implementation == "eager"  # type: ignore[union-attr]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert dict(ALL_EXPERTS_FUNCTIONS.items()) == before


@needs_pager
def test_slices_are_blocks_of_their_own() -> None:
    """What forward uses is known by expert, and so is what it is predicted to use."""
    twin = Twin(transformers_mixtral("eager"), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2, config=PAGES) as session:
        twin.train(mixtral_loss, range(3))
        assert any(".experts[" in name for name in session.log.blocks[-1].actual)


def test_stepping_aside_and_back() -> None:
    """Rows become ordinary tensors while everything fits, and rows again for a larger sample."""
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2))
    config = {**PAGES, "step_aside": True}
    with twin.paged(footprint_of(twin.model) * 3, config=config) as session:
        twin.train(chosen_step, range(6))
        assert not session.paging
        twin.train(lambda m, n: (m(torch.ones(64, 32), [0, 4]) ** 2).mean(), range(6, 7))
        assert session.paging
        twin.train(chosen_step, range(7, 9))
    twin.assert_same()


def test_weights_from_the_meta_device() -> None:
    """Slice by slice, and to the same bits."""
    torch.manual_seed(3)
    expected = Chosen()
    with torch.device("meta"):
        model = Chosen()

    def init(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data.copy_(
                dict(expected.named_parameters())[f"experts.{name}" if name != "head" else name]
            )

    optimizer = AdamW(model.parameters(), lr=1e-2)
    dynoffload.materialize(model, init)
    with dynoffload.offload(model, optimizer, budget="256KiB", config=PAGES) as session:
        assert fused_of(session)
        assert_same(chosen_step(model, 0), chosen_step(expected, 0), "loss")
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()), "weights")


@needs_pager
def test_a_gradient_that_waits_outlives_a_draft_of_the_step_before() -> None:
    """A draft is taken over in one step; in the next, which runs and clips without the root, the
    gradient comes to lie in the same place and waits; then the root runs."""
    twin = Twin(transformers_mixtral("eager"), lambda p: AdamW(p, lr=1e-2))
    ids = torch.arange(2, 8).view(1, 6)
    config = {**PAGES, "draft_share": 1.0, "policy": "repeat"}
    owed = 0
    with twin.paged(footprint_of(twin.model), config=config) as session:
        drafts = paging_of(session).updates.speculative  # type: ignore[union-attr]
        for number in range(6):
            for model, optimizer in twin.sides:
                mixtral_loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number < 3:
                    continue
                spent = set(drafts._spent)  # type: ignore[union-attr]
                hidden = model.model(input_ids=ids).last_hidden_state  # type: ignore[operator]
                model.lm_head(hidden).square().mean().backward()  # type: ignore[operator]
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                if model is twin.model:
                    owed += sum(s.owed is not None and s.owed == s.gradient for s in spent)
    assert owed, "no such gradient waited: this would show nothing"
    twin.assert_same()


@needs_pager
@pytest.mark.parametrize("what", ["data", "state", "state of a model that has grown"])
def test_replaced_without_a_look_while_updates_wait(what: str) -> None:
    """What waits is made from the old memory, though the new moves into its place."""
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2, config=PAGES):
        for number in range(6):
            for model, optimizer in twin.sides:
                chosen_step(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number != 3:
                    continue
                for parameter in fused(model):
                    new = torch.full(parameter.shape, 0.1)
                    new[:3] = 0.0
                    if what == "data":
                        parameter.data = new
                    else:
                        optimizer.state[parameter]["exp_avg"] = new
                    del new
                if what == "state of a model that has grown":
                    model.more = nn.Parameter(torch.ones(32, 32))
    twin.assert_same()


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints(backend: str, tmp_path: Path) -> None:
    """What is saved while updates of slices wait is the state of a finished step; it goes on whole,
    and by slices under another budget, to the same bits."""
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2))
    budget = footprint_of(twin.model) // 2
    with on(backend) as its, twin.paged(budget, **its) as session:
        twin.train(chosen_step, range(4))
        session.save(tmp_path / "saved")
        twin.train(chosen_step, range(4, 7))
    for sliced in (True, False):
        again = Chosen()
        optimizer = AdamW(again.parameters(), lr=1e-2)
        with (
            on(backend) as its,
            dynoffload.offload(
                again,
                optimizer,
                budget=footprint_of(again),
                **_with(its, slices=sliced, step_aside=False),
            ) as session,
        ):
            session.load(tmp_path / "saved")
            for number in range(4, 7):
                plain(again, optimizer, partial(chosen_step, again), number)
        assert_same_training(again, optimizer, twin.reference, twin.its)
