"""Updates are put off, and nobody can tell: whatever is read in between has its new value.

On the pager an optimizer's step leaves the updates of paged parameters for later. Each test takes
one way in which a user reads or writes a parameter, its gradient or its state between a step and
the next use, does it on a paged model and on a plain copy, and compares bits. Where plain PyTorch
raises, so must the paged model.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import (
    Twin,
    assert_ordinary,
    assert_same,
    footprint_of,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from dynoffload.errors import DynOffloadError, StepLostError
from dynoffload.runtime.session import Session

pytestmark = [needs_pager, pytest.mark.timeout(25)]

SAMPLES = small_samples(40, seed=3)


def pending(session: Session) -> int:
    """Return how many updates wait."""
    assert session._paging is not None
    assert session._paging.updates is not None
    return len(session._paging.updates.waiting.pending)


def backward(model: nn.Module, step: int) -> Tensor:
    """Run forward and backward on one sample; return the loss."""
    loss = small_loss(model, SAMPLES[step])
    loss.backward()
    return loss.detach()


class Pair:
    """The twins in the middle of training: the first inside a session, updates pending."""

    def __init__(self, twin: Twin, session: Session) -> None:
        self.twin, self.session = twin, session
        self.step_number = 0

    def step(self, *, zero: bool = True, **how: Any) -> None:
        """Make one training step in both."""
        losses = []
        for model, optimizer in self.both():
            torch.manual_seed(self.step_number)
            losses.append(backward(model, self.step_number))
            optimizer.step(**how)
            if zero:
                optimizer.zero_grad()
        assert_same(losses[0], losses[1], f"loss {self.step_number}")
        self.step_number += 1

    def both(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Return (model, optimizer) of the paged and of the plain one."""
        return [(self.twin.model, self.twin.optimizer), (self.twin.reference, self.twin.its)]

    def same(
        self, do: Callable[[Any, Any], Any], what: str = "result", *, waiting: bool = True
    ) -> None:
        """Do something to both, while updates are ``waiting``, and compare what it returns."""
        assert pending(self.session) or not waiting, "nothing is pending: this would show nothing"
        actual, expected = (do(model, optimizer) for model, optimizer in self.both())
        assert_same(actual, expected, what)


@contextmanager
def training(
    make: Callable[..., torch.optim.Optimizer] = AdamW,
    model: nn.Module | None = None,
    steps: int = 3,
    zero: bool = True,
    lr: float = 1e-2,
    **options: Any,
) -> Iterator[Pair]:
    """Yield a pair after some steps; at the end go on training and compare everything."""
    twin = Twin(model or small(), lambda p: make(p, lr=lr, **options))
    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        for _ in range(steps):
            pair.step(zero=zero)
        yield pair
        for _ in range(3):
            pair.step()
    twin.assert_same()


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
)
def test_updates_wait_after_the_step(options: dict[str, Any]) -> None:
    """The step is over and most parameters have not been updated yet."""
    with training(**options) as pair:
        paged = [p for p in pair.twin.model.parameters() if p.numel() * 4 >= 1024]
        assert pending(pair.session) > len(paged) // 4
        pair.session.flush()
        assert not pending(pair.session)
        pair.twin.assert_same()


def test_never_deferring_leaves_nothing_waiting() -> None:
    """``defer_updates="never"`` makes every update inside the step."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    config = {"defer_updates": "never"}
    with twin.paged(footprint_of(twin.model) // 3, config=config) as session:
        pair = Pair(twin, session)
        for _ in range(4):
            pair.step()
            assert not pending(session)
    twin.assert_same()


# Reading


READS: dict[str, Callable[[Any, Any], Any]] = {
    "norm of each parameter": lambda m, o: [p.norm() for p in m.parameters()],
    "clone": lambda m, o: [p.detach().clone() for p in m.parameters()],
    "data": lambda m, o: [p.data.sum(0) for p in m.parameters()],
    "an element": lambda m, o: m.embedding.weight[3, 4].item(),
    "a slice": lambda m, o: m.embedding.weight[3:9, ::2].clone(),
    "transposed": lambda m, o: m.head.weight.t() @ torch.ones(64),
    "model.state_dict": lambda m, o: {k: v.clone() for k, v in m.state_dict().items()},
    "optimizer.state_dict": lambda m, o: copy.deepcopy(o.state_dict()),
    "a state tensor": lambda m, o: {
        key: value.clone() for key, value in o.state[m.embedding.weight].items()
    },
    "vector of parameters": lambda m, o: nn.utils.parameters_to_vector(m.parameters()),
    "foreach norm": lambda m, o: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "linear of another module": lambda m, o: F.linear(torch.ones(2, 32), m.embedding.weight),
    "functional call": lambda m, o: torch.func.functional_call(
        m.head, dict(m.head.named_parameters()), torch.ones(2, 32)
    ).detach(),
}


@pytest.mark.parametrize("read", READS)
def test_what_is_read_has_its_new_value(read: str) -> None:
    """Accesses outside of modules wait for the update of what they touch."""
    with training() as pair:
        pair.same(READS[read], read)


def test_old_aliases_show_new_values() -> None:
    """A view made inside the block stays a view of the parameter."""
    with training() as pair:
        views = [m.embedding.weight.detach()[5:7] for m, _ in pair.both()]
        for _ in range(3):
            pair.step()
            assert pending(pair.session)
            assert_same(views[0].clone(), views[1].clone(), "view")
        views.clear()  # else the parameter stays where its view is


def test_an_eval_pass_sees_the_step() -> None:
    """Without gradients, and without teaching the plan anything."""

    def score(model: nn.Module, optimizer: Any) -> Tensor:
        model.eval()
        with torch.no_grad():
            loss = small_loss(model, SAMPLES[30])
        model.train()
        return loss

    with training() as pair:
        pair.same(score)
        pair.step()
        pair.same(score)


def test_inference_mode_sees_the_step() -> None:
    """The update is made on ordinary tensors, though the pass runs in inference mode."""

    def score(model: nn.Module, optimizer: Any) -> float:
        with torch.inference_mode():
            return small_loss(model.eval(), SAMPLES[30]).item()

    with training() as pair:
        pair.same(score)
        for model, _ in pair.both():
            model.train()
        pair.step()


def test_deepcopy_of_the_model_is_a_plain_model() -> None:
    """The copy has the new values, trains by itself, and knows nothing of the session."""
    with training() as pair:
        copies = [copy.deepcopy(model) for model, _ in pair.both()]
        assert_ordinary(copies[0], hooks=False)
        assert_same(dict(copies[0].state_dict()), dict(copies[1].state_dict()), "copy")
        before = pending(pair.session)
        for model in copies:
            torch.manual_seed(1)
            backward(model, 5)
        assert pending(pair.session) == before, "using the copy made the original's updates"
        assert_same(
            [p.grad for p in copies[0].parameters()],
            [p.grad for p in copies[1].parameters()],
            "gradients of the copy",
        )


def test_torch_save_of_the_state_dict(tmp_path: Path) -> None:
    """Saving holds the interpreter's lock while it reads; no update may wait behind it."""

    def save(model: nn.Module, optimizer: Any) -> Any:
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    with training() as pair:
        pair.same(save)


def test_torch_save_of_the_whole_model() -> None:
    """Pickled whole, as plain modules can be; what is loaded knows nothing of the session."""

    def save(model: nn.Module, optimizer: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert_ordinary(loaded, hooks=False)
        return dict(loaded.state_dict())

    with training() as pair:
        pair.same(save)


UNDER_THE_LOCK: dict[str, Callable[[Any, Any], Any]] = {
    "numpy sum": lambda m, o: [p.detach().numpy().sum().item() for p in m.parameters()],
    "bytes": lambda m, o: [p.detach().numpy().tobytes() for p in m.parameters()],
    "histogram": lambda m, o: [
        np.histogram(p.detach().numpy())[0].tolist() for p in m.parameters()
    ],
    "tolist": lambda m, o: m.head.weight.tolist(),
    "pickle": lambda m, o: pickle.loads(pickle.dumps([p.detach() for p in m.parameters()])),
    "pickle of the model": lambda m, o: dict(pickle.loads(pickle.dumps(m)).state_dict()),
    "repr": lambda m, o: repr(m.embedding.weight),
    "state": lambda m, o: o.state[m.head.weight]["exp_avg"].tolist(),
}


@pytest.mark.parametrize("read", UNDER_THE_LOCK)
def test_what_is_read_under_the_interpreters_lock(read: str) -> None:
    """numpy, pickle and their like hold the lock that the update needs: they must let go of it."""
    with training() as pair:
        for _ in range(3):
            pair.same(UNDER_THE_LOCK[read], read)
            pair.step()


def test_gradients_read_under_the_lock() -> None:
    """Before they are dropped, and after they were kept."""
    with training() as pair:
        pair.step(zero=False)
        kept = [[p.grad for p in m.parameters() if p.grad is not None] for m, _ in pair.both()]
        for _, optimizer in pair.both():
            optimizer.zero_grad()
        assert pending(pair.session)
        numbers = [[g.numpy().tobytes() for g in gradients] for gradients in kept]
        assert_same(numbers[0], numbers[1], "gradients")


def test_a_thread_that_reads_under_the_lock() -> None:
    """While another trains."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    stop = threading.Event()
    reads: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            for parameter in twin.model.parameters():
                reads.append(len(parameter.detach().numpy().tobytes()))

    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(10):
                pair.step()
        finally:
            stop.set()
            watcher.join(100)
        assert not watcher.is_alive()
    twin.assert_same()
    assert reads


# Gradients


def test_gradients_can_be_read_between_step_and_zero_grad() -> None:
    """The update that is pending consumes the gradient only when nobody can see it any more."""
    with training() as pair:
        pair.step(zero=False)
        pair.same(lambda m, o: [None if p.grad is None else p.grad.clone() for p in m.parameters()])
        for _, optimizer in pair.both():
            optimizer.zero_grad()


def test_an_old_gradient_that_is_kept_keeps_its_values() -> None:
    """``old = p.grad`` is the user's, whatever later steps do with the memory."""
    with training() as pair:
        kept: list[list[Any]] = [[], []]
        for _ in range(3):
            pair.step(zero=False)
            for (model, optimizer), mine in zip(pair.both(), kept, strict=True):
                mine.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
        pair.step()
        assert_same(kept[0], kept[1], "kept gradients")
    assert_same(kept[0], kept[1], "kept gradients after the block")


def test_zeroing_in_place_after_the_step_does_not_zero_the_update() -> None:
    """``zero_grad(set_to_none=False)`` writes to gradients that pending updates have to read."""
    with training() as pair:
        for _ in range(3):
            pair.step(zero=False)
            assert pending(pair.session)
            for _, optimizer in pair.both():
                optimizer.zero_grad(set_to_none=False)


def test_writing_a_gradient_after_the_step_does_not_change_the_update() -> None:
    """Nor does any other write to ``p.grad``."""
    with training() as pair:
        pair.step(zero=False)
        assert pending(pair.session)
        for model, _ in pair.both():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(3.0)
        pair.step()


def test_accumulating_over_a_pending_update() -> None:
    """No zero_grad between two steps: the second backward adds to what the first update reads."""
    with training() as pair:
        pair.step(zero=False)
        pair.step(zero=False)
        pair.step()


@pytest.mark.parametrize("zeroed", ["in place", "reused", "dropped"])
def test_gradients_assigned_by_hand(zeroed: str) -> None:
    """``p.grad = g`` of the user's own making, whose memory is used again after the step."""
    with training() as pair:
        buffers = [[torch.empty_like(p) for p in m.parameters()] for m, _ in pair.both()]
        for step in range(3):
            for (model, optimizer), mine in zip(pair.both(), buffers, strict=True):
                generator = torch.Generator().manual_seed(step)
                for parameter, buffer in zip(model.parameters(), mine, strict=True):
                    buffer.normal_(generator=generator)
                    parameter.grad = buffer
                optimizer.step()
                if zeroed == "in place":
                    optimizer.zero_grad(set_to_none=False)
                elif zeroed == "reused":
                    for buffer in mine:
                        buffer.fill_(7.0)
                else:
                    optimizer.zero_grad()
            norms = [[p.norm() for p in model.parameters()] for model, _ in pair.both()]
            assert_same(norms[0], norms[1], f"norms after step {step}")
        for _, optimizer in pair.both():
            optimizer.zero_grad()


def test_gradients_from_autograd_grad() -> None:
    """``torch.autograd.grad`` and an assignment, as in gradient surgery."""
    with training() as pair:
        for step in range(3):
            for model, optimizer in pair.both():
                torch.manual_seed(step)
                parameters = list(model.parameters())
                loss = small_loss(model, SAMPLES[step])
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, grads, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                del grads
                optimizer.zero_grad()
            pair.session.flush()
            pair.twin.assert_same()
            pair.step()


# Writing


def test_writes_in_place_come_after_the_update() -> None:
    """Clamping, as for a Wasserstein critic, and an average written into the parameter."""

    def clamp(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
                parameter.data.lerp_(torch.ones_like(parameter), 0.001)

    with training() as pair:
        for _ in range(3):
            pair.same(clamp)
            pair.step()


def test_data_replaced_by_the_user() -> None:
    """``p.data = p.data.clamp(...)`` gives the parameter memory of the user's own."""

    def replace(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clamp(-0.05, 0.05)

    with training() as pair:
        for _ in range(3):
            pair.same(replace)
            pair.step()
            pair.same(lambda m, o: [p.norm() for p in m.parameters()], waiting=False)
            pair.step()
        pair.same(replace)


def test_data_replaced_without_a_look_at_it() -> None:
    """The update that was pending is of the old tensor: it must not reach the new one."""

    def replace(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.01)

    with training() as pair:
        for _ in range(2):
            pair.same(replace)
            pair.step()
            pair.step()


def test_data_replaced_by_what_the_user_keeps() -> None:
    """Two names for one memory: what is written through one is read through the other."""

    def replace(model: nn.Module, optimizer: Any) -> Tensor:
        mine = torch.full_like(model.head.weight, 0.01)
        model.head.weight.data = mine
        return mine

    with training() as pair:
        mine = [replace(model, optimizer) for model, optimizer in pair.both()]
        for step in range(3):
            pair.step()
            assert_same(mine[0].clone(), mine[1].clone(), "the user's tensor")
            for tensor in mine:
                tensor.mul_(1.0 + step)
            pair.same(lambda m, o: m.head.weight.norm(), waiting=False)


def test_state_replaced_by_the_user() -> None:
    """A state tensor that the user swaps for another is the one that later steps use."""

    def reset(model: nn.Module, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    with training() as pair:
        pair.same(reset)
        pair.step()
        pair.same(lambda m, o: [p.norm() for p in m.parameters()], waiting=False)
        pair.step()
        pair.same(reset)


def test_state_reset_in_place() -> None:
    """So is one that is changed in place."""

    def reset(model: nn.Module, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(0.5)

    with training() as pair:
        pair.same(reset)


def test_state_cleared() -> None:
    """``optimizer.state.clear()`` starts the optimizer anew."""

    def clear(model: nn.Module, optimizer: Any) -> None:
        optimizer.state.clear()

    with training() as pair:
        pair.same(clear)
        pair.step()
        pair.same(lambda m, o: [p.norm() for p in m.parameters()], waiting=False)
        pair.step()


def test_loading_in_the_middle() -> None:
    """Model and optimizer go back to a checkpoint while updates of a later step are pending."""
    with training() as pair:
        saved = []
        for model, optimizer in pair.both():
            saved.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        for _ in range(2):
            pair.step()
        assert pending(pair.session)
        for (model, optimizer), (weights, state) in zip(pair.both(), saved, strict=True):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        pair.session.flush()
        pair.twin.assert_same()


def test_loading_by_assignment() -> None:
    """``assign=True`` puts the file's tensors in the parameters' place."""
    with training() as pair:
        saved = [copy.deepcopy(model.state_dict()) for model, _ in pair.both()]
        pair.step()
        for (model, _), weights in zip(pair.both(), saved, strict=True):
            result = model.load_state_dict(weights)
            assert not result.missing_keys
        pair.step()


# Steps


def test_a_parameter_that_is_not_used_waits_for_many_steps() -> None:
    """Its update is made with the learning rate of its own step, however late."""
    model = small()
    with training(model=model) as pair:
        pair.step()
        for m, _ in pair.both():  # whoever calls these experts by turns leaves the others waiting
            for layer in m.layers:
                for expert in layer.experts:
                    expert.requires_grad_(False)
        for _ in range(3):
            for _, optimizer in pair.both():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            pair.step()
        for m, _ in pair.both():
            m.requires_grad_(True)


def test_hyperparameters_are_those_of_the_step() -> None:
    """A schedule, or the user, changes groups right after the step."""
    with training() as pair:
        for step in range(4):
            pair.step()
            assert pending(pair.session)
            for _, optimizer in pair.both():
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.param_groups[0]["weight_decay"] = 0.3 * step
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def test_a_tensor_learning_rate_changed_in_place() -> None:
    """The tensor that later updates read has the value it had at the step."""
    with training(lr=torch.tensor(1e-2), foreach=False) as pair:  # type: ignore[arg-type]
        for _ in range(3):
            pair.step()
            for _, optimizer in pair.both():
                optimizer.param_groups[0]["lr"].mul_(0.5)


def test_groups_with_their_own_rates() -> None:
    """Two groups, each with a schedule of its own."""
    twin = Twin(small(), lambda p: AdamW(_two_groups(list(p)), lr=1e-2))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, [lambda e: 0.5**e, lambda e: 1.0 / (1 + e)])
        for o in (twin.optimizer, twin.its)
    ]
    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        for _ in range(6):
            pair.step()
            for schedule in schedules:
                schedule.step()
    twin.assert_same()


def _two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "weight_decay": 0.2, "betas": (0.8, 0.99)},
    ]


def test_a_step_with_a_closure() -> None:
    """The closure runs once, with gradients on; the step returns its loss."""
    with training() as pair:
        for step in range(3):
            results = []
            for model, optimizer in pair.both():
                calls = []

                def closure(model: Any = model, calls: list[int] = calls, step: int = step) -> Any:
                    torch.manual_seed(step)
                    calls.append(1)
                    model.zero_grad()
                    loss = small_loss(model, SAMPLES[step])
                    loss.backward()
                    return loss

                results.append(optimizer.step(closure).detach())
                assert calls == [1]
            assert_same(results[0], results[1], "loss of the closure")
            assert pending(pair.session)


def test_a_closure_that_raises_leaves_the_optimizer_whole() -> None:
    """Its groups keep their parameters, and training goes on."""
    with training() as pair:
        for _, optimizer in pair.both():

            def closure() -> Any:
                raise KeyError("no batch")

            with pytest.raises(KeyError):
                optimizer.step(closure)
            assert all(group["params"] for group in optimizer.param_groups)
        pair.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_gradient_scaling(options: dict[str, Any]) -> None:
    """A scaler unscales before the step and skips it when there is an infinity."""
    with training(**options) as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            for (model, optimizer), scaler in zip(pair.both(), scalers, strict=True):
                torch.manual_seed(step)
                loss = small_loss(model, SAMPLES[step])
                if step == 2:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()


def test_frozen_parameters_stay_as_they_are() -> None:
    """They have no gradient, and no update is put off for them."""
    model = small()
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    frozen = model.embedding.weight.detach().clone()
    with training(model=model) as pair:
        assert_same(pair.twin.model.embedding.weight.detach().clone(), frozen, "frozen weight")


def test_a_parameter_frozen_in_the_middle() -> None:
    """From then on it keeps its value; what was pending is made."""
    with training() as pair:
        for model, _ in pair.both():
            model.layers[1].requires_grad_(False)
        pair.step()
        pair.step()
        pair.same(lambda m, o: [p.norm() for p in m.parameters()])


# Errors


def test_a_backward_that_the_step_has_overtaken_raises() -> None:
    """Weights that backward needs were changed since: plain PyTorch raises, and so must we.

    Putting the change off must not make a wrong gradient out of an error.
    """
    with training() as pair:
        for model, optimizer in pair.both():
            torch.manual_seed(0)
            first = small_loss(model, SAMPLES[0])
            second = small_loss(model, SAMPLES[1])
            first.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.backward()
            optimizer.zero_grad()
            del first, second


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda e: e.__name__)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_an_exception_and_then_going_on(stage: str, error: type[BaseException]) -> None:
    """A sample that fails half way leaves the state of the last step, and the next one trains."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if stage == "forward":
                raise error("a bad sample")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise error("a bad sample")

    with training() as pair:
        for _ in range(2):
            for model, optimizer in pair.both():
                handle = model.layers[1].register_forward_hook(
                    lambda module, args, output: Fails.apply(output)
                )
                torch.manual_seed(9)
                with pytest.raises(error):
                    backward(model, 9)
                handle.remove()
                optimizer.zero_grad()
            pair.step()


@pytest.mark.parametrize("stage", ["after forward", "after backward", "after the step"])
def test_leaving_the_block_by_an_exception_leaves_ordinary_tensors(stage: str) -> None:
    """The state is that of the last finished step; a loss that outlives the block does no harm."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    kept: list[Tensor] = []

    def last(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)
        loss = small_loss(model, SAMPLES[7])
        kept.append(loss)
        if stage != "after forward":
            loss.backward()
        if stage == "after the step":
            optimizer.step()

    def block() -> Pair:
        with twin.paged(footprint_of(twin.model) // 3) as session:
            pair = Pair(twin, session)
            for _ in range(3):
                pair.step()
            last(twin.model, twin.optimizer)
            raise KeyError("the user's")

    with pytest.raises(KeyError):
        block()
    last(twin.reference, twin.its)
    twin.assert_same()
    assert_ordinary(twin.model, twin.optimizer)
    if stage == "after forward":
        with pytest.raises(RuntimeError, match="offload"):
            kept[0].backward()
    kept.clear()
    trained_on = ((twin.model, twin.optimizer), (twin.reference, twin.its))
    for model, optimizer in trained_on:  # plainly
        torch.manual_seed(1)
        optimizer.zero_grad()
        backward(model, 11)
        optimizer.step()
    twin.assert_same()


def test_a_failing_update_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that cannot be made is an error at the next step; nobody waits for ever."""

    def broken(optimizer: Any) -> None:
        raise ArithmeticError("a broken optimizer")

    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))

    def block() -> None:
        with twin.paged(footprint_of(twin.model) // 3) as session:
            pair = Pair(twin, session)
            pair.step()
            pair.step()
            with monkeypatch.context() as patch:
                assert session._paging is not None
                patch.setattr(session._paging.updates.maker, "step", broken)
                twin.model.embedding.weight.norm()
            pair.step()

    with pytest.raises(StepLostError, match="the step is lost") as caught:
        block()
    assert isinstance(caught.value, DynOffloadError)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert_ordinary(twin.model, twin.optimizer, hooks=False)  # those left refuse: test_recovery.py


def test_reads_from_other_threads() -> None:
    """A thread that watches the weights while training goes on sees no torn region."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    stop = threading.Event()
    seen: list[float] = []

    def watch(model: nn.Module) -> None:
        while not stop.is_set():
            seen.append(sum(float(p.detach().sum()) for p in model.parameters()))

    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        watcher = threading.Thread(target=watch, args=(twin.model,))
        watcher.start()
        try:
            for _ in range(10):
                pair.step()
        finally:
            stop.set()
            watcher.join(100)
        assert not watcher.is_alive()
    twin.assert_same()
    assert all(value == value for value in seen)


def test_an_update_behind_the_back_leaves_the_optimizer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While another thread's read has an update made, the loop sees its own groups and state."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    groups = [list(group["params"]) for group in twin.optimizer.param_groups]
    begun, go_on = threading.Event(), threading.Event()
    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        pair.step()
        pair.step(zero=False)
        assert session._paging is not None
        assert session._paging.updates is not None
        updates = session._paging.updates
        step = updates.maker.step

        def slow(optimizer: Any) -> None:
            if threading.current_thread().name == "dynoffload-guard":
                begun.set()
                assert go_on.wait(100)
            step(optimizer)

        with monkeypatch.context() as patch:
            patch.setattr(updates.maker, "step", slow)
            watcher = threading.Thread(target=lambda: twin.model.embedding.weight.norm())
            watcher.start()
            assert begun.wait(100)
            assert [group["params"] for group in twin.optimizer.param_groups] == groups
            for _, optimizer in pair.both():
                optimizer.zero_grad()  # must reach the model's gradients, not the update's
            assert all(parameter.grad is None for parameter in twin.model.parameters())
            waiting = threading.Thread(target=lambda: twin.optimizer.state_dict())
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive(), "the state was given out before its update was made"
            go_on.set()
            watcher.join(100)
            waiting.join(100)
            assert not watcher.is_alive()
            assert not waiting.is_alive()
        for _ in range(5):
            pair.step()
    twin.assert_same()


# Unusual shapes of a step


def test_a_gradient_without_a_forward_of_its_module() -> None:
    """A prompt that is only added: the second backward comes while its first update is pending."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.linspace(0, 1, 2048).view(64, 32))
            self.frozen = nn.Linear(32, 32).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x + self.prompt).square().mean()

    torch.manual_seed(0)
    twin = Twin(Prompt(), lambda p: SGD([q for q in p if q.requires_grad], lr=0.5, momentum=0.9))
    with twin.paged(128 * 1024):
        for step in range(4):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                losses = [model(torch.full((64, 32), float(i + step))) for i in range(3)]
                for loss in losses:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    twin.assert_same()


@pytest.mark.parametrize("make", [AdamW, SGD], ids=lambda o: o.__name__)
def test_two_parameters_over_one_memory(make: type[torch.optim.Optimizer]) -> None:
    """Tied by ``.data``: both updates change the same bytes, in the optimizer's own order."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32)
            self.b.weight = nn.Parameter(self.a.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()).square().mean()

    torch.manual_seed(0)
    model = Tied()
    reference = Tied()
    reference.load_state_dict(model.state_dict())
    reference.b.weight.data = reference.a.weight.data
    twin = Twin(model, lambda p: make(p, lr=0.1, weight_decay=0.1))  # type: ignore[call-arg]
    twin.reference = reference
    twin.its = make(reference.parameters(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
    with twin.paged(128 * 1024):
        for step in range(5):
            for m, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                m(torch.full((3, 32), 0.1 * step + 0.1)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(
                twin.model.a.weight.norm(), reference.a.weight.norm(), f"norm after step {step}"
            )
    twin.assert_same()


def test_parameters_that_are_views_of_one_buffer() -> None:
    """Flattened parameters: each view is updated, whichever is read first."""

    def flat(model: nn.Module) -> nn.Module:
        total = sum(p.numel() for p in model.parameters())
        buffer, at = torch.empty(total), 0
        for parameter in model.parameters():
            part = buffer[at : at + parameter.numel()].view_as(parameter)
            part.copy_(parameter.detach())
            parameter.data = part
            at += parameter.numel()
        return model

    twin = Twin(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), lambda p: AdamW(p, lr=0.1))
    flat(twin.model)
    with twin.paged(400 * 1024):
        for step in range(5):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                model(torch.full((3, 32), 0.1 * step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for part in range(4):
                assert_same(
                    twin.model[part].weight.norm(), twin.reference[part].weight.norm(), "norm"
                )
    twin.assert_same()
