"""The choice of parts and strategy while it trains, by real processes: alike, exact, and soon done.

The pure parts are tested in `test_moe_parallel_race`.
"""

from __future__ import annotations

import gc
from typing import Any

import parallel_races as cases
import pytest
import torch
from gloo_ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from dynoffload.moe.parallel import ExpertParallel

HALF = len(cases.KINDS) // 2


@pytest.mark.parametrize("names", [cases.KINDS[:HALF], cases.KINDS[HALF:]])
def test_ranks_choose_alike_and_only_between_steps(names: tuple[str, ...]) -> None:
    """That gradients have the bits of fixed parts is asserted in the ranks."""
    one, other = run_ranks(cases.kinds, 2, names)
    assert one == other
    for kind, steps in one:
        taken = [{(parts, strategy) for parts, strategy, _ in step} for step in steps]
        assert len(set().union(*taken)) > 4, "no race"
        for step, made in zip(taken, steps, strict=True):
            if kind in ("drops", "empty"):  # two steps, and an empty batch is never cut
                continue
            if kind.startswith("sizes"):
                assert len(step) <= 2, (kind, made)
                continue
            if kind == "several reentrant":  # each is run again for itself, right before backward
                assert all(again for *_, again in made)
                continue
            assert len(step) == 1, (kind, made)
        again = sum(again for step in steps for *_, again in step)
        assert (again > 0) == ("reentrant" in kind)


def test_a_result_that_is_held_on_one_rank_holds_the_choice_on_all() -> None:
    one, other = run_ranks(cases.held, 2)
    assert one == other
    while_held, later = one
    assert len(set(while_held)) == 1
    assert len(set(later)) > 1


def test_a_limit_holds_for_all_that_races() -> None:
    one, other = run_ranks(cases.limited, 2)
    assert one == other
    taken = {strategy for step in one for _, strategy, _ in step}
    assert taken == {"S1", "S2", "S3", "S4"}


def test_once_a_choice_stands_only_sizes_are_exchanged() -> None:
    for counts in run_ranks(cases.after, 2):
        assert counts["chosen"] == counts["fixed"] + 1


# One process


def alone(**options: Any) -> tuple[ExpertParallel, torch.Tensor]:
    torch.manual_seed(0)
    layer = ExpertParallel(8, 16, 4, 2, parts="auto", strategy="auto", **options)
    return layer, torch.randn(64, 8, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_first_step_may_be_under_activation_checkpointing(reentrant: bool) -> None:
    layer, given = alone()
    wanted = torch.autograd.grad(layer(given).hidden.sum(), [given, layer.router])
    layer.set_pipeline("auto", "auto")
    out = checkpoint(lambda one: layer(one).hidden, given, use_reentrant=reentrant)
    out.sum().backward()
    assert layer.adapting is not None
    assert layer.adapting.chooser is not None
    assert given.grad is not None
    assert torch.equal(given.grad, wanted[0])
    assert layer.router.grad is not None
    assert torch.equal(layer.router.grad, wanted[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_that_is_gone_through_twice_runs_forward_again_by_one_choice(
    reentrant: bool,
) -> None:
    layer, given = alone()
    for _ in range(12):
        out = checkpoint(lambda one: layer(one).hidden, given, use_reentrant=reentrant)
        loss = out.sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert layer.adapting is not None
    assert layer.adapting.chooser is not None
    assert layer.adapting.chooser.timed_steps >= 11


def test_where_nothing_goes_backward_nothing_is_timed() -> None:
    layer, given = alone()
    layer.requires_grad_(False)
    taken = set()
    for _ in range(10):
        layer(given.detach())
        taken.add(layer.choice)
    assert len(taken) == 1
    assert layer.adapting is not None
    assert layer.adapting.chooser is not None
    assert layer.adapting.chooser.timed_steps == 0


@pytest.mark.parametrize("kind", ["dropped", "reentrant", "not reentrant"])
def test_steps_end_without_the_garbage_collector(kind: str) -> None:
    layer, given = alone()

    def run(one: torch.Tensor) -> torch.Tensor:
        return layer(one).hidden  # type: ignore[no-any-return]

    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            if kind == "dropped":
                run(given)
                out = run(given)
            else:
                out = checkpoint(run, given, use_reentrant=kind == "reentrant")
            out.sum().backward()
    finally:
        gc.enable()
    assert layer.adapting is not None
    assert layer.adapting.chooser is not None
    assert layer.adapting.chooser.timed_steps == 7  # the last one is recorded with the next batch
