"""Experts over processes: the same results whatever the parts and the strategy, and no hanging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_cases as cases
import pytest
import torch
from gloo_ranks import run_ranks

from dynoffload.errors import ConfigError, SpillError
from dynoffload.moe.parallel import ExpertParallel
from dynoffload.moe.parallel.exchange import Exchange


@pytest.mark.parametrize(
    ("world", "cases_"),
    [
        (
            2,
            [
                (torch.float64, "uneven", {"shared": 8}),
                (torch.float64, "empty", {"activation": "silu", "k": 1}),
                (torch.float32, "even", {"skewed": True}),
                (torch.bfloat16, "uneven", {"normalize": False}),
            ],
        ),
        (3, [(torch.float64, "uneven", {"k": 5})]),
        pytest.param(4, [(torch.float32, "empty", {"k": 3})], marks=pytest.mark.slow),
    ],
)
def test_results_are_the_same_whatever_the_parts(
    world: int, cases_: list[tuple[torch.dtype, str, dict[str, Any]]]
) -> None:
    run_ranks(cases.several, world, [("same_whatever_the_parts", one) for one in cases_])


def test_layers_are_used_in_all_ways() -> None:
    names = ("ways_of_use", "autocast", "alike_from_the_start")
    (*_, one), (*_, other) = run_ranks(cases.several, 2, [(name, ()) for name in names])
    both = 4 * 4 + 2 * 4 * 4
    assert torch.equal(one[:both], other[:both])  # what is replicated begins alike
    assert not torch.equal(one[both:], other[both:])


def test_ranks_choose_alike_once_and_no_bit_depends_on_it() -> None:
    """Also under activation checkpointing, and within a limit."""
    one, other = run_ranks(cases.chooses, 2)
    assert one == other
    for kind, tried, _, counts in one:
        assert len(tried) >= 5, kind
        assert counts == ([2, 2] if kind.endswith("reentrant") else [1, 1]), "it is tried again"
        if kind == "limited":
            assert {each.split()[1] for each in tried} == {"S1", "S2", "S3", "S4"}


def test_a_rank_that_does_not_come_is_an_error_that_says_what_was_awaited() -> None:
    message, _ = run_ranks(cases.one_does_not_come, 2)
    assert "rank 0 of 2, layer 'blocks.3.moe': counts of rows from rank 1 did not" in message
    assert "not in 1 s" in message
    assert "raise timeout=" in message


def test_a_rank_that_dies_ends_the_others_wait() -> None:
    (message,) = run_ranks(cases.one_dies_in_backward, 2, only=(0,))
    assert "rank 0 of 2, layer 'blocks.3.moe': rows of part" in message
    assert "a connection is closed" in message
    assert ".cc" not in message  # gloo's own text is the cause


# One process


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_alone_it_is_the_layer_with_all_experts(strategy: str) -> None:
    whole, layer = cases.layers(1, shared=4)
    layer.set_pipeline(3, strategy)
    tokens = torch.randn(2, 30, cases.WIDTH, dtype=torch.float64)
    weights = torch.randn_like(tokens)
    found = cases.backward(layer, tokens, weights)
    wanted = cases.backward(whole, tokens, weights)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_options_that_cannot_be_are_refused() -> None:
    layer = ExpertParallel(4, 4, 2)
    with pytest.raises(ConfigError, match="parts=0 must be at least 1"):
        layer.set_pipeline(0, "none")
    with pytest.raises(ConfigError, match="strategy='S5' is not one of 'none', 'S1'"):
        layer.set_pipeline(2, "S5")
    with pytest.raises(ConfigError, match="timeout=0 must be more"):
        Exchange(timeout=0)
    exchange = Exchange()
    exchange.world = 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynoffload.moe.parallel.layer.Exchange", lambda *_, **__: exchange)
        with pytest.raises(ConfigError, match="experts=6 cannot be spread evenly over 4 ranks"):
            ExpertParallel(4, 4, 6)


def test_a_spill_directory_in_memory_is_refused() -> None:
    layer = ExpertParallel(4, 4, 2, strategy="S1", spill_dir=Path("/dev/shm"))
    with pytest.raises(SpillError, match="which is memory itself"):
        layer(torch.randn(3, 4))


def test_on_the_meta_device_nothing_is_drawn() -> None:
    layer = ExpertParallel(4, 4, 2, device="meta")
    assert layer.up.is_meta
    made = layer.to_empty(device="cpu")
    made.reset_parameters()
    assert float(made.router.detach().abs().max()) <= 0.5
