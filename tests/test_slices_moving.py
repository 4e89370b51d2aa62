"""What is paged by slices moves slice by slice, and leaves all else as it was."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import Twin, assert_same, assert_same_training, footprint_of, needs_pager
from fused_networks import PAGES, Chosen, chosen_loss, fused_of, mixtral_loss, paging_of
from hazards import each_paged, guarded
from slice_cases import (
    NETWORKS,
    Case,
    Loss,
    adamw,
    chosen_step,
    clipped,
    clipped_by_value,
    fused,
    matched,
    plain,
    transformers_mixtral,
)
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import dynoffload
import dynoffload.moe
from dynoffload.errors import BudgetError
from dynoffload.runtime.updates import slices
from dynoffload.runtime.updates.slices import SliceUpdate

pytestmark = pytest.mark.timeout(120)


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
