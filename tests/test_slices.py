"""Fused experts are paged by slice, and train to the bits of plain PyTorch.

Each way in which users train or interfere is a generator: what comes before its first ``yield`` is
done before ``step()``, what comes after it before ``zero_grad()``, and what it yields is compared.
The networks reach their experts in three ways: a user's own by indexing the parameter, a Mixtral of
transformers whose eager loop is given parts, and one that takes the parameter whole (grouped_mm).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import Twin, assert_same, assert_same_training, footprint_of, needs_pager
from fused_networks import PAGES, Chosen, chosen_loss, fused_of, mixtral, mixtral_loss, paging_of
from hazards import Side, each_paged, each_with_slices_in_time, guarded, hazard
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import dynoffload
import dynoffload.moe
from dynoffload.errors import BudgetError
from dynoffload.runtime.updates import slices
from dynoffload.runtime.updates.slices import SliceUpdate

Loss = Callable[[int], Tensor]
Case = Callable[[nn.Module, Optimizer, Loss, int], Iterator[Any]]

pytestmark = pytest.mark.timeout(120)

HITS = [[0, 1], [2], [1, 4], [0, 3], [2, 4], [4], [1, 3], [5, 0]]


def chosen_step(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's sample, which hits the experts of `HITS`."""
    return chosen_loss(model, (step, HITS[step % len(HITS)]))


def transformers_mixtral(implementation: str) -> nn.Module:
    """Return a Mixtral; skip without transformers."""
    pytest.importorskip("transformers")
    return mixtral(implementation)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "indexed": (Chosen, chosen_step),
    "parts": (partial(transformers_mixtral, "eager"), mixtral_loss),
    "whole": (partial(transformers_mixtral, "grouped_mm"), mixtral_loss),
}


class Signed(nn.Module):
    """Experts whose gradients are -0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * 32 * 32).view(4, 32, 32))

    def forward(self, hit: list[int]) -> Tensor:
        """Return 0."""
        return torch.stack([(self.weight[number] * -0.0).sum() for number in hit]).sum()


def fused(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hold one matrix for each expert."""
    return [p for p in model.parameters() if p.dim() == 3]


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return copies of their gradients."""
    return [p.grad.clone() for p in fused(model) if p.grad is not None]


def adamw(model: nn.Module) -> Optimizer:
    """Return an optimizer of all parameters."""
    return AdamW(model.parameters(), lr=1e-2)


def matched(
    backend: str,
    network: str,
    case: Case,
    *,
    make: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 7,
    share: float = 0.5,
    bounded: bool = False,
    **config: Any,
) -> Side:
    """Train a network by ``case`` on both sides, and compare all there is to see."""
    build, loss_of = NETWORKS[network]

    def program(side: Side) -> None:
        model = build()
        optimizer = make(model)
        with side.offload(model, optimizer, share=share, **PAGES, **config) as session:
            if session is not None:
                assert len(fused_of(session)) == len(fused(model)), "nothing is paged by slices"
            for number in range(steps):
                torch.manual_seed(number)
                run = case(model, optimizer, partial(loss_of, model), number)
                side.see("before the step", next(run))
                optimizer.step()
                side.see("after it", list(run))
                optimizer.zero_grad()

    return hazard(backend, program, moves=share < 1, budgeted=bounded)


# Loops


def plain(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Gradients are read after the step."""
    value = loss(number)
    value.backward()
    yield value
    yield [p.grad.sum() for p in fused(model) if p.grad is not None]


def clipped(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The norm of all gradients reads them whole, and scaling writes them."""
    loss(number).backward()
    yield nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clipped_by_value(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Each gradient in place."""
    loss(number).backward()
    yield nn.utils.clip_grad_value_(model.parameters(), 1e-3)


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
    """Another gradient takes the place of the one for which updates may be made already."""
    loss(number).backward()
    parameters = [p for p in fused(model) if p.grad is not None]
    others = torch.autograd.grad(loss(number + 1), parameters)
    for parameter, gradient in zip(parameters, others, strict=True):
        if number % 3 == 2:
            parameter.grad = gradient
    yield


LOOPS = [plain, clipped, clipped_by_value, accumulated, scaled, autocast]
GRAPHS = [two_forwards, weight_penalty, gradients_asked_for, some_inputs, with_hooks]
INTERFERENCE = [writing, replacing, copying, changing_groups, skipping]


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


@guarded
def test_another_gradient_of_ours(backend: str) -> None:
    """It lies in a row like the one before it; every update that can be is drafted."""
    matched(backend, "parts", swapping, steps=9, share=1, draft_share=1.0)


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


@each_with_slices_in_time
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(backend: str, name: str) -> None:
    """Those whose step is the same for every element; steps add up while experts are not hit."""
    kind, options = OPTIMIZERS[name]
    make = lambda model: kind(model.parameters(), lr=1e-2, **options)  # noqa: E731
    matched(backend, "indexed", plain, make=make, steps=10)


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
        with side.offload(model, optimizer, share=2, draft_share=1.0, **PAGES) as session:
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


# What moves


def moved(session: Any, first: int) -> set[str]:
    """Return the names of regions of which bytes moved from step ``first`` on."""
    began = min(span.start for span in session.log.phases if span.step >= first)
    moves = (one for one in session.log.transfers if one.start >= began and one.nbytes)
    return {one.region for one in moves}


def zeroing(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """A step that keeps gradients and writes zeros over them; between steps no graph holds what
    adds to them, and what nobody holds is collected some time."""
    if number == 1:
        gc.collect()
    loss(number).backward()
    yield
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("pager", marks=needs_pager), pytest.param("emulated", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "case", [plain, clipped, clipped_by_value, zeroing], ids=lambda case: case.__name__
)
def test_experts_that_are_not_hit_move_no_byte(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over forty steps of AdamW, which in plain PyTorch changes all experts in each; under a budget
    that holds neither all parameters nor half of the state. Clipping reads and writes every
    gradient as a whole: those of experts that are not hit are zeros before and after."""
    hits = [[1, 5], [5], [1, 6]]
    monkeypatch.setitem(
        NETWORKS,
        "eight",
        (partial(Chosen, 8), lambda model, n: chosen_loss(model, (n, hits[n % 3]))),
    )
    ((session, _),) = matched(backend, "eight", case, steps=45, share=0.2).sessions
    assert session.stats["bytes_in"].iloc[5:].min() > 0, "everything fits: this shows nothing"
    names = moved(session, 8)  # copies on the queues of an accelerator may be late by a step
    for number in range(8):
        mine = {name for name in names if name.startswith("experts.") and f"[{number}]" in name}
        assert bool(mine) == (number in (1, 5, 6)), mine


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
    dynoffload.moe.register()
    for one in (twin.model, twin.reference):
        one.set_experts_implementation(implementation)  # type: ignore[operator]
    with twin.paged(footprint_of(model) // 4, config=PAGES) as session:
        twin.train(mixtral_loss, range(25))
        experts = {name for name in moved(session, 5) if ".experts." in name}
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
            seen.add(len(set(lags)) > 1)
        assert any(seen), "all slices were updated at once"
    twin.assert_same()


@needs_pager
def test_gradients_are_made_per_expert() -> None:
    """By the loop on parts no tensor of the whole parameter's form is made; the stock loop makes
    one for each expert hit. What forward uses is known by expert, too."""
    twin = Twin(transformers_mixtral("eager"), lambda p: AdamW(p, lr=1e-2))
    sizes = {p.shape[1:] for p in fused(twin.model)}
    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 3 and out.shape[1:] in sizes:
                made.append(str(function))
            return out

    with twin.paged(footprint_of(twin.model) // 2, config=PAGES) as session:
        twin.train(mixtral_loss, range(3))
        assert any(".experts[" in name for name in session.log.blocks[-1].actual)
        for model, wanted in ((twin.model, False), (twin.reference, True)):
            loss = mixtral_loss(model, 3)
            made.clear()
            with Watch():
                loss.backward()
            assert any("select_backward" in name or "zeros" in name for name in made) == wanted
    twin.assert_same()


# Around


def test_what_is_no_multiple_of_a_page_stays_whole() -> None:
    """As do parameters over a part of a storage, and those of other forms."""
    both = torch.randn(8, 32, 32)
    model = nn.Module()
    model.register_parameter("one", nn.Parameter(both[:4]))
    model.register_parameter("two", nn.Parameter(both[4:]))
    model.register_parameter("flat", nn.Parameter(torch.randn(64, 64)))
    for one in (model, Chosen(3, 34)):
        with dynoffload.offload(one, budget="1MiB", config=PAGES) as session:
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
    expected = Chosen()
    values = dict(expected.named_parameters())
    with torch.device("meta"):
        model = Chosen()

    def init(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data.copy_(values[f"experts.{name}" if name != "head" else name])

    optimizer = adamw(model)
    dynoffload.materialize(model, init)
    with dynoffload.offload(model, optimizer, budget="256KiB", config=PAGES) as session:
        assert fused_of(session)
        assert_same(chosen_step(model, 0), chosen_step(expected, 0), "loss")
    assert_same(dict(model.named_parameters()), values, "weights")


@guarded
def test_a_gradient_that_waits_outlives_a_draft_of_the_step_before(backend: str) -> None:
    """A draft is taken over in one step; in the next, which runs and clips without the root, the
    gradient comes to lie in the same place and waits; then the root runs."""
    ids = torch.arange(2, 8).view(1, 6)
    owed = 0

    def program(side: Side) -> None:
        nonlocal owed
        model = transformers_mixtral("eager")
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=1, draft_share=1.0, **PAGES) as session:
            for number in range(6):
                side.step(mixtral_loss(model, number), optimizer)
                if number < 3:
                    continue
                updates = None if session is None else paging_of(session).updates
                spent = set() if updates is None else set(updates.speculative._spent)  # type: ignore[union-attr]
                hidden = model.model(input_ids=ids).last_hidden_state  # type: ignore[operator]
                model.lm_head(hidden).square().mean().backward()  # type: ignore[operator]
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                owed += sum(s.owed is not None and s.owed == s.gradient for s in spent)

    hazard(backend, program)
    assert owed, "no such gradient waited: this would show nothing"


@guarded
@pytest.mark.parametrize("what", ["data", "state", "state of a model that has grown"])
def test_replaced_without_a_look_while_updates_wait(backend: str, what: str) -> None:
    """What waits is made from the old memory, though the new moves into its place."""

    def replaced(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
        yield loss(number).backward()
        for parameter in fused(model) if number == 3 else ():
            new = torch.full(parameter.shape, 0.1)
            new[:3] = 0.0
            if what == "data":
                parameter.data = new
            else:
                optimizer.state[parameter]["exp_avg"] = new
            del new
        if number == 3 and what == "state of a model that has grown":
            model.more = nn.Parameter(torch.ones(32, 32))

    matched(backend, "indexed", replaced, steps=6)


@each_paged
def test_checkpoints(backend: str, tmp_path: Path) -> None:
    """What is saved while updates of slices wait is the state of a finished step; it goes on whole,
    and by slices under another budget, to the same bits."""
    _goes_on({"config": {**PAGES, "backend": backend, "step_aside": False}}, tmp_path)


@pytest.mark.slow
def test_checkpoints_of_an_accelerator(tmp_path: Path) -> None:
    """The same."""
    with accelerated(elsewhere=True):
        _goes_on({"device": DEVICE, "config": {**PAGES, "step_aside": False}}, tmp_path)


def _goes_on(options: dict[str, Any], directory: Path) -> None:
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2, **copy.deepcopy(options)) as session:
        twin.train(chosen_step, range(4))
        session.save(directory / "saved")
        twin.train(chosen_step, range(4, 7))
    for sliced in (True, False):
        again = Chosen()
        optimizer = adamw(again)
        options["config"]["slices"] = sliced
        budget = footprint_of(again)
        with dynoffload.offload(again, optimizer, budget=budget, **options) as session:
            session.load(directory / "saved")
            for number in range(4, 7):
                chosen_step(again, number).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_training(again, optimizer, twin.reference, twin.its)
