"""What the ranks of `test_moe_parallel` do; it imports no more than they need."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynoffload.errors import ExchangeError
from dynoffload.moe import MoE
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.memory import memory

STRATEGIES = ("none", "S1", "S2", "S3", "S4")
WIDTH, HIDDEN = 12, 20


def layers(
    world: int, dtype: torch.dtype = torch.float64, k: int = 2, **options: Any
) -> tuple[MoE, ExpertParallel]:
    """Return a layer with all experts, and this rank's part of the same one."""
    torch.manual_seed(7)
    whole = MoE(WIDTH, HIDDEN, 2 * world, k, dtype=dtype, **options)
    part = ExpertParallel(WIDTH, HIDDEN, 2 * world, k, dtype=dtype, timeout=30, **options)
    part.load_whole(whole.state_dict())
    return whole, part


def lengths(world: int, kind: str) -> list[int]:
    """Return how many tokens each rank has."""
    if kind == "even":
        return [24] * world
    if kind == "uneven":
        return [37 - 15 * rank if rank < 2 else 5 for rank in range(world)]
    return [19 if rank == 0 else 0 for rank in range(world)]  # "empty"


def backward(layer: nn.Module, tokens: Tensor, weights: Tensor) -> list[Tensor]:
    """Return result and gradients of tokens, router, and experts."""
    layer.zero_grad()
    given = tokens.clone().requires_grad_()
    out = layer(given)
    loss = (out.hidden * weights).sum() + 0.1 * out.z
    loss.backward()
    grads = [one.grad for one in layer.parameters()]
    assert given.grad is not None
    assert all(one is not None for one in grads)
    return [out.hidden.detach(), given.grad, *[one.clone() for one in grads if one is not None]]


def same_whatever_the_parts(
    rank: int, world: int, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    """Compare every n and strategy with n = 1, and that with one process."""
    skewed = options.pop("skewed", False)
    whole, layer = layers(world, dtype, **options)
    if skewed:  # all tokens go to experts 0 and 1, which are on rank 0
        for one in (whole, layer):
            one.choice_bias[:2] += 10
    sizes = lengths(world, kind)
    torch.manual_seed(1)
    tokens = [torch.randn(size, WIDTH, dtype=dtype) for size in sizes]
    weights = [torch.randn(size, WIDTH, dtype=dtype) for size in sizes]
    names = ["hidden", "tokens", *[name for name, _ in layer.named_parameters()]]
    first = dict(zip(names, backward(layer, tokens[rank], weights[rank]), strict=True))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}[dtype]
    for parts in (1, 5, 30):
        for strategy in STRATEGIES if parts < 30 else ("none", "S2"):
            layer.set_pipeline(parts, strategy)
            found = dict(zip(names, backward(layer, tokens[rank], weights[rank]), strict=True))
            for name in names:
                if name in ("up", "down"):
                    close = torch.allclose(found[name], first[name], rtol=tolerance, atol=tolerance)
                    assert close, (parts, strategy, name)
                else:
                    assert torch.equal(found[name], first[name]), (parts, strategy, name)
    at = sum(sizes[:rank])
    own = slice(at, at + sizes[rank])
    everyone = torch.cat(tokens).requires_grad_()
    out = whole(everyone)
    losses = [(out.hidden * torch.cat(weights)).sum()]
    logits = nn.functional.linear(everyone, whole.router)
    start = 0
    for size in sizes:  # the losses of the ranks' routers are of their own tokens
        if size:
            losses.append(0.1 * logits[start : start + size].logsumexp(-1).square().mean())
        start += size
    torch.stack(losses).sum().backward()
    assert everyone.grad is not None
    assert whole.up.grad is not None
    assert whole.down.grad is not None
    pairs = [
        (first["hidden"], out.hidden.detach()[own]),
        (first["tokens"], everyone.grad[own]),
        (first["up"], layer.own(whole.up.grad)),
        (first["down"], layer.own(whole.down.grad)),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


def ways_of_use(rank: int, world: int) -> None:
    """Layers in a row, two calls before backward, backward twice, checkpoints, no gradients."""
    _, layer = layers(world)
    other = ExpertParallel(WIDTH, HIDDEN, 2 * world, dtype=torch.float64, timeout=30, name="other")
    torch.manual_seed(5)
    first, second = torch.randn(2, world, 2, 9, WIDTH, dtype=torch.float64)[:, rank]

    def stack(tokens: Tensor) -> Tensor:
        return other(layer(tokens).hidden).hidden

    def gradients(kind: str) -> list[Tensor]:
        layer.zero_grad()
        other.zero_grad()
        given = first.clone().requires_grad_()
        if kind == "checkpoint":
            out = checkpoint(stack, given, use_reentrant=False)
        else:
            out = stack(given)
        loss = (out + stack(second)).square().sum() if kind == "two calls" else out.square().sum()
        if kind == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        made = [given, *layer.parameters(), *other.parameters()]
        return [one.grad.clone() for one in made if one.grad is not None]

    assert {len(one) for one in (gradients("plain"),)} == {7}
    for kind in ("plain", "two calls", "twice", "checkpoint"):
        wanted: list[Tensor] = []
        for parts, strategy in ((1, "none"), (2, "none"), (3, "S1"), (3, "S2"), (4, "S3")):
            for one in (layer, other):
                one.set_pipeline(parts, strategy)
            found = gradients(kind)
            wanted = wanted or found
            assert torch.equal(found[0], wanted[0]), (kind, parts, strategy)
            for one, known in zip(found, wanted, strict=True):
                assert torch.allclose(one, known, rtol=1e-11, atol=1e-11), (kind, strategy)
    with torch.no_grad():
        assert not stack(first).requires_grad
    # Rank 0's tokens need no gradient, those of others do, and all take part alike.
    mine = first.clone().requires_grad_(rank > 0)
    layer(mine).hidden.sum().backward()
    assert (mine.grad is None) == (rank == 0)
    # Experts that do not learn.
    for one in (layer.up, layer.down):
        one.requires_grad_(False)
        one.grad = None
    mine = first.clone().requires_grad_()
    layer(mine).hidden.sum().backward()
    assert mine.grad is not None
    assert layer.up.grad is None


def chooses(rank: int, world: int) -> list[Any]:
    """Return what was tried and chosen in several ways of use, whose gradients of tokens and router
    are those of fixed parts, and how often the layer ran in each of two steps more."""
    found: list[Any] = []
    for kind in ("plain", "reentrant", "not reentrant", "limited"):
        _, fixed = layers(world, torch.float32)
        _, layer = layers(world, torch.float32)
        size = 400 if kind == "limited" else 48
        limit = memory(Strategy.NONE, 16, layer._shape(size, 4)) * 95 // 100
        layer.set_pipeline("auto", "auto", limit if kind == "limited" else None)
        given = torch.randn(size // (rank + 1), WIDTH, requires_grad=True)
        tried: list[str] = []
        make = layer._call

        def call(taken: Any, *args: Any, tried: list[str] = tried, make: Any = make) -> Any:
            tried.append(f"{taken.parts} {taken.strategy.value}")
            return make(taken, *args)

        layer._call = call  # type: ignore[method-assign]

        def step(one: ExpertParallel, kind: str = kind, given: Tensor = given) -> list[Tensor]:
            if kind.endswith("reentrant"):
                keep = kind == "reentrant"
                out = checkpoint(lambda own: one(own).hidden, given, use_reentrant=keep)
            else:
                out = one(given).hidden
            out.square().sum().backward()
            made = [given.grad, one.router.grad]
            given.grad = None
            one.zero_grad()
            return made  # type: ignore[return-value]

        wanted, counts = step(fixed), []
        for _ in range(3):
            before = len(tried)
            assert all(torch.equal(x, y) for x, y in zip(step(layer), wanted, strict=True)), kind
            counts.append(len(tried) - before)
        found.append((kind, sorted(set(tried)), tuple(map(str, layer.choice)), counts[1:]))
    return found


def autocast(rank: int, world: int) -> None:
    """In autocast rows travel in its dtype, and the result is of the tokens' own."""
    whole, layer = layers(world, torch.float32)
    torch.manual_seed(5)
    tokens = torch.randn(world, 9, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = whole(tokens).hidden[rank], layer(tokens[rank]).hidden
    assert found.dtype == wanted.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=0.02)
    assert not torch.equal(found, layer(tokens[rank]).hidden)


def alike_from_the_start(rank: int, world: int) -> Tensor:
    """Return router and experts that were drawn with random numbers of each rank's own."""
    torch.manual_seed(rank)
    layer = ExpertParallel(4, 4, 2 * world, shared=4)
    shared = layer.shared_up
    assert shared is not None
    return torch.cat([layer.router.flatten(), shared.flatten(), layer.up.flatten()]).detach()


def one_does_not_come(rank: int, world: int) -> str:
    """Return the error of rank 0, whose peer is elsewhere."""
    layer = ExpertParallel(4, 4, world, 1, timeout=1, name="blocks.3.moe")
    layer(torch.randn(3, 4))  # once, they are there
    if rank == 1:
        time.sleep(3)
        return ""
    start = time.monotonic()
    try:
        layer(torch.randn(3, 4))
    except ExchangeError as error:
        assert 0.9 < time.monotonic() - start < 2.9
        return str(error)
    return "no error"


def one_dies_in_backward(rank: int, world: int) -> str:
    """Return the error of rank 0, whose peer dies before its backward."""
    layer = ExpertParallel(4, 4, world, 1, timeout=30, name="blocks.3.moe", parts=2)
    out = layer(torch.randn(3, 4)).hidden
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        out.sum().backward()
    except ExchangeError as error:
        assert time.monotonic() - start < 20
        return str(error)
    return "no error"


def several(rank: int, world: int, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Return the results of other functions of this file, in one set of processes."""
    results = []
    for name, given in calls:
        try:
            results.append(globals()[name](rank, world, *given))
        except BaseException as error:
            error.add_note(f"in {name}{given}")
            raise
    return results
