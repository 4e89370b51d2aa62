"""What the ranks of `test_moe_parallel_adapting` do: steps of all kinds while choices race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from parallel_cases import HIDDEN, WIDTH, backward, layers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dynoffload.moe.parallel import ExpertParallel, Strategy, choice
from dynoffload.moe.parallel.memory import memory as memory_of
from dynoffload.moe.parallel.memory import shape_of
from dynoffload.moe.parallel.step_timer import in_backward

STEPS = 400  # within which a race of one size has to end
Made = tuple[int, str, bool]  # parts, strategy, in a backward pass


class Watched:
    """A layer that chooses, and what it chose for each batch."""

    def __init__(self, world: int, memory: int | None = None) -> None:
        _, self.layer = layers(world, torch.float32)
        self.layer.set_pipeline("auto", "auto", memory)
        self.made: list[Made] = []
        assert self.layer.adapting is not None
        self.adapting, choose = self.layer.adapting, self.layer.adapting.choose

        def watched(tokens: Tensor) -> Any:
            taken, step = choose(tokens)
            self.made.append((taken.parts, taken.strategy.value, in_backward()))
            return taken, step

        self.adapting.choose = watched  # type: ignore[method-assign]

    def steps(self, step: Callable[[int], None], most: int | None = None) -> list[list[Made]]:
        """Make steps until the choice stands, and one more; return what was chosen in each.

        It has to stand in time, or else there are ``most`` at most. Numbers of parts race one
        round, so that strategies soon do.
        """
        found = []
        with mock.patch.object(choice, "_FIRST_ROUNDS", 1):
            for number in range(most or STEPS):
                settled = self.adapting.settled
                self.made.clear()
                step(number)
                found.append(list(self.made))
                if settled:
                    return found
        assert most, f"no choice stands after {STEPS} steps"
        return found


def batch(rank: int, size: int, seed: int = 0) -> Tensor:
    """Return tokens, of which rank 1 has half as many."""
    return torch.randn(size // (rank + 1), WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(layer: ExpertParallel, given: Tensor) -> list[Tensor]:
    """Return what does not depend on the choice, and empty it."""
    assert given.grad is not None
    assert layer.router.grad is not None
    found = [given.grad, layer.router.grad]
    given.grad = None
    layer.zero_grad()
    return found


def step_of(kind: str, layer: ExpertParallel, given: Tensor) -> list[Tensor]:
    """Make a step of a kind, and return gradients of tokens and router."""

    def hidden() -> Tensor:
        if kind.endswith("reentrant"):
            keep = "not" not in kind
            return checkpoint(lambda one: layer(one).hidden, given, use_reentrant=keep)  # type: ignore[no-any-return]
        return layer(given).hidden  # type: ignore[no-any-return]

    if kind.startswith("several"):  # of one backward
        torch.stack([hidden().square().sum() for _ in range(3)]).sum().backward()
    elif kind == "each":  # forwards first, then their backwards, the first one first
        for loss in [hidden().square().sum() for _ in range(3)]:
            loss.backward()
    elif kind == "twice":
        loss = hidden().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind.startswith("sizes"):  # two in one step, each run again by its own choice
        run = (
            (lambda one: layer(one).hidden)
            if kind == "sizes"
            else (lambda one: checkpoint(lambda x: layer(x).hidden, one, use_reentrant=False))
        )
        (run(given).square().sum() + run(given[: len(given) // 2]).square().sum()).backward()
    elif kind == "evaluates":
        with torch.no_grad():
            before = layer(given).hidden
        out = hidden()
        with torch.no_grad():
            assert torch.equal(layer(given).hidden, out)
            assert torch.equal(before, out)
        out.square().sum().backward()
    elif kind == "drops":  # a forward whose backward never comes, before and after
        hidden()
        hidden().square().sum().backward()
        hidden()
    elif kind == "empty":  # on all ranks, amid a step
        nothing = given.detach()[:0].requires_grad_()
        loss = hidden().square().sum()
        (loss + layer(nothing).hidden.sum()).backward()
        layer(nothing).hidden.sum().backward()
    else:
        hidden().square().sum().backward()
    return gradients(layer, given)


KINDS = (
    "plain", "reentrant", "not reentrant", "several", "several not reentrant", "several reentrant",
    "each", "each not reentrant", "twice", "evaluates", "drops", "empty", "sizes",
    "sizes not reentrant",
)  # fmt: skip


def kinds(rank: int, world: int, names: tuple[str, ...]) -> list[Any]:
    """Return the choices of steps of several kinds, whose gradients are those of fixed parts."""
    results = []
    for kind in names:
        watched = Watched(world)
        given = batch(rank, 48).requires_grad_()
        _, fixed = layers(world, torch.float32)
        wanted = step_of(kind, fixed, given)

        def step(
            _: int,
            kind: str = kind,
            watched: Watched = watched,
            given: Tensor = given,
            wanted: list[Tensor] = wanted,
        ) -> None:
            found = step_of(kind, watched.layer, given)
            for one, known in zip(found, wanted, strict=True):
                assert torch.equal(one, known), kind

        results.append((kind, watched.steps(step, None if kind == "plain" else 40)))
    return results


def held(rank: int, world: int) -> list[list[Made]]:
    """Return the choices while a result is held whose backward never comes, and once it is not."""
    watched = Watched(world)
    given = batch(rank, 48).requires_grad_()
    # Only rank 1 holds it: the others know of it by the exchange.
    out = [watched.layer(given).hidden] if rank == 1 else [watched.layer(given).hidden.detach()]
    found = []
    for _ in range(2):
        watched.made.clear()
        for _ in range(12):
            watched.layer(given).hidden.sum().backward()
        found.append(list(watched.made))
        out.clear()
    return found


def limited(rank: int, world: int) -> list[list[Made]]:
    """Return what was chosen within a limit; results and all gradients are those of the first."""
    shape = shape_of(200, 2, 2 * world, world, WIDTH, HIDDEN, 2, 4)
    watched = Watched(world, memory_of(Strategy.NONE, 16, shape) * 95 // 100)
    tokens = batch(rank, 200, 200)
    weights = torch.randn_like(tokens)
    first = backward(watched.layer, tokens, weights)

    def step(_: int) -> None:
        found = backward(watched.layer, tokens, weights)
        assert torch.equal(found[0], first[0])
        for one, known in zip(found, first, strict=True):
            assert torch.allclose(one, known, rtol=1e-5, atol=1e-5)

    return watched.steps(step)


def after(rank: int, world: int) -> dict[str, int]:
    """Return how many exchanges a step makes with fixed parts, and when a choice stands."""
    watched = Watched(world)
    given = batch(rank, 48).requires_grad_()
    watched.steps(lambda _: step_of("plain", watched.layer, given) and None)
    _, fixed = layers(world, torch.float32)
    taken = watched.layer.choice
    fixed.set_pipeline(taken.parts, taken.strategy.value)
    step_of("plain", fixed, given)
    counts = {}
    for name, layer in (("fixed", fixed), ("chosen", watched.layer)):
        start, asked = layer.exchange.start, []

        def counted(*given: Any, start: Any = start, asked: list[Any] = asked) -> Any:
            asked.append(given[-1])
            return start(*given)

        layer.exchange.start = counted  # type: ignore[method-assign]
        step_of("plain", layer, given)
        counts[name] = len(asked)
    return counts
