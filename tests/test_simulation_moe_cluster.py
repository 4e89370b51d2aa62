"""Counts of a divided transformer with experts, against closed formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynoffload.errors import ConfigError
from dynoffload.simulation.designs import AGGRESSIVE, CONSERVATIVE, local_areas, remote_areas
from dynoffload.simulation.moe_cluster import Batch, Division, MoeShard, MoeTransformer
from dynoffload.simulation.roofline import (
    Accelerator,
    Matmul,
    Operator,
    SharedLink,
    elementwise,
    work,
)

MODEL = MoeTransformer(layers=30, hidden=8192, heads=64, experts=128)
SHARD = MoeShard(MODEL, Division(16, 16, 128, 2), Batch(2, 2048))
H, T, TOKENS = 8192, 16, 4096
DIVISIONS = [
    Division(16, 16, 128, 2),
    Division(8, 32, 64, 4),
    Division(32, 8, 128, 1),
    Division(4, 2, 2, 2),
]


def products(operators: tuple[Operator, ...]) -> float:
    return sum(operator.flops for operator in operators)


def test_the_published_size() -> None:
    assert MODEL.base_parameters == pytest.approx(24e9, rel=0.01)
    assert MODEL.parameters == pytest.approx(1047e9, rel=0.001)


@pytest.mark.parametrize("division", DIVISIONS)
def test_devices_hold_the_network_once_for_each_copy(division: Division) -> None:
    shard = replace(SHARD, division=division)
    dense = sum(layer.dense for layer in shard.layers) * division.tensor
    expert = sum(layer.expert for layer in shard.layers) * division.devices / division.replicas
    assert dense + expert == MODEL.parameters


@pytest.mark.parametrize("division", DIVISIONS)
def test_devices_do_the_arithmetic_of_the_batch(division: Division) -> None:
    shard = replace(SHARD, division=division, model=replace(MODEL, vocabulary=51200))
    tokens = shard.batch.tokens * division.data
    scores = 4 * shard.batch.length * H * MODEL.layers  # two products of 2 s h for each token
    forward = tokens * (2 * MODEL.base_parameters + scores) / division.devices
    assert sum(products(layer.forward) for layer in shard.layers) == pytest.approx(forward)
    assert sum(products(layer.backward) for layer in shard.layers) == pytest.approx(2 * forward)
    logits = 2 * tokens * H * 51200 / division.devices
    assert products(shard.head.forward) == pytest.approx(logits)
    assert products(shard.head.backward) == pytest.approx(2 * logits)


def test_a_dense_layer_saves_what_korthikanti_et_al_count() -> None:
    dense, moe = SHARD.layers[:2]
    assert dense.expert == 0 < moe.expert
    assert dense.saved == (34 * H + 5 * 64 * 2048) * TOKENS / T
    # A routed row is cut in two inside, yet whole at its ends: 4h + 16h, and 2h + h of own tokens.
    assert moe.saved - dense.saved == (23 - 19) * H * TOKENS / T


def test_network_bytes_of_a_layer() -> None:
    dense, moe = SHARD.layers[:2]
    ring = 2 * TOKENS * H * 15 / 16
    exchange = 4 * (TOKENS / T) * H * 2 * 127 / 128
    assert dense.forward_network == 4 * ring
    assert dense.backward_network == 6 * ring
    assert moe.forward_network == pytest.approx(2 * ring + exchange)
    assert moe.backward_network == pytest.approx(3 * ring + exchange)
    assert dense.reduced == 2 * dense.dense * 15 / 16
    assert moe.reduced == 2 * moe.dense * 15 / 16  # no other device has this part of an expert
    both = replace(SHARD, division=Division(16, 16, 128, 1)).layers[1]
    assert both.reduced == 2 * moe.dense * 15 / 16 + 2 * both.expert / 2


def test_state_is_divided_over_copies() -> None:
    dense, moe = SHARD.layers[:2]
    assert SHARD.state_bytes(dense) == 16 * dense.dense / 16
    assert SHARD.state_bytes(moe) == 16 * (moe.dense / 16 + moe.expert)
    twice = replace(SHARD, division=Division(16, 16, 128, 1))
    assert twice.state_bytes(twice.layers[1]) == SHARD.state_bytes(moe)


def test_what_a_placement_keeps_near_is_not_far() -> None:
    near = {p.name: local_areas(SHARD, p) for p in (CONSERVATIVE, AGGRESSIVE)}
    far = {p.name: remote_areas(SHARD, p) for p in (CONSERVATIVE, AGGRESSIVE)}
    weights = 2 * sum(layer.parameters for layer in SHARD.layers)
    checkpoints = 30 * 2 * TOKENS * H / T
    assert near["conservative"]["weights"] == far["aggressive"]["weights"] == weights
    assert near["conservative"]["checkpoints"] == far["aggressive"]["checkpoints"] == checkpoints
    assert not {"weights", "checkpoints"} & (near["aggressive"].keys() | far["conservative"].keys())
    assert near["aggressive"]["a layer's weights"] == 2 * SHARD.layers[1].parameters
    more = sum(far["aggressive"].values()) - sum(far["conservative"].values())
    assert more == pytest.approx(weights + checkpoints)


def test_a_larger_batch_takes_more_for_activations_alone() -> None:
    twice = replace(SHARD, batch=Batch(4, 2048))
    for areas in (local_areas, remote_areas):
        before, after = areas(SHARD, AGGRESSIVE), areas(twice, AGGRESSIVE)
        for name, size in before.items():
            kept = any(word in name for word in ("weights", "optimizer", "layer's gradients"))
            if "embedding" not in name:
                assert after[name] == pytest.approx(size if kept else 2 * size), name


def test_an_operator_lasts_as_long_as_the_slower_of_its_two_sides() -> None:
    device = Accelerator("", 100.0, 10.0, SharedLink(1), SharedLink(1))
    product = Matmul("", 2, 3, 5, batch=7)
    assert product.forward(2) == Operator("", 2 * 7 * 30, 2 * 7 * (6 + 15 + 10))
    assert [o.flops for o in product.backward(2)] == [420, 420]
    done = work((Operator("", 200, 10), Operator("", 50, 30), elementwise("", 5)), device)
    assert done.compute_s == 2.5
    assert done.local_s == pytest.approx(0.0 + 2.5 + 0.5)
    fast = replace(device, local_bytes_per_s=math.inf)
    assert work((elementwise("", 5),), fast).local_s == 0


@pytest.mark.parametrize(
    ("division", "message"),
    [
        (Division(24, 16, 128, 1), "64 heads cannot be divided into 24"),
        (Division(16, 16, 96, 1), "128 experts cannot be divided into 96"),
        (Division(16, 16, 128, 4), "256 devices cannot be divided into 512"),
    ],
)
def test_what_cannot_be_divided_is_refused(division: Division, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHARD, division=division)


def test_rates_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="link must be above 0"):
        SharedLink(0)
    with pytest.raises(ConfigError, match="link must be above 0"):
        SharedLink(1, sharers=0)
    with pytest.raises(ConfigError, match="'slow' must be above 0"):
        Accelerator("slow", 0, 1, SharedLink(1), SharedLink(1))
