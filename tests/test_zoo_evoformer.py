"""The Evoformer trunk: the supplement's algorithms, recycling, dynamism; it learns, also paged."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from exactness import Loop, Twin, compare_runs, footprint_of
from torch import Tensor, nn

from dynoffload.datasets.proteins import BINS, TOKENS, Alignments, alignments
from dynoffload.experiments import zoo
from dynoffload.experiments.zoo import evoformer
from dynoffload.experiments.zoo.evoformer import (
    Block,
    Evoformer,
    GatedAttention,
    OuterProductMean,
    TriangleProduct,
)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def _outputs(model: Evoformer, sample: Alignments) -> list[Tensor]:
    out = model.eval()(sample)
    return [out.hidden, out.distances]


def test_triangle_products_go_by_both_other_sides() -> None:
    """Algorithms 11 and 12, pair by pair."""
    torch.manual_seed(0)
    pairs = torch.randn(1, 5, 5, 6)
    for outgoing in (True, False):
        layer = TriangleProduct(6, outgoing=outgoing)
        x = layer.norm(pairs)[0]
        a, b = (torch.sigmoid(_linear(layer.gates, x)) * _linear(layer.factors, x)).split(6, dim=-1)
        for i, j in ((0, 0), (1, 3), (4, 2)):
            sides = [(a[i, k], b[j, k]) if outgoing else (a[k, i], b[k, j]) for k in range(5)]
            summed = torch.stack([left * right for left, right in sides]).sum(dim=0)
            expected = torch.sigmoid(_linear(layer.out_gate, x[i, j])) * _linear(
                layer.out, layer.out_norm(summed)
            )
            torch.testing.assert_close(layer(pairs)[0, i, j], expected)


def test_the_outer_product_is_a_mean_over_sequences() -> None:
    """Algorithm 10: the same alignment twice over says the same."""
    torch.manual_seed(0)
    layer, alignment = OuterProductMean(8, 3, 5), torch.randn(2, 4, 6, 8)
    torch.testing.assert_close(layer(alignment), layer(torch.cat((alignment, alignment), dim=1)))
    x = layer.norm(alignment)[1]
    left, right = _linear(layer.left, x), _linear(layer.right, x)
    outer = torch.stack([torch.outer(left[s, 2], right[s, 5]) for s in range(4)]).mean(dim=0)
    torch.testing.assert_close(layer(alignment)[1, 2, 5], _linear(layer.out, outer.flatten()))


def test_attention_is_biased_by_pairs_and_gated() -> None:
    """Algorithm 7, for one head, sequence and residue."""
    torch.manual_seed(0)
    layer, x, pairs = GatedAttention(8, 2, 6), torch.randn(1, 3, 5, 8), torch.randn(1, 5, 5, 6)
    given = layer.norm(x)[0, 1]
    q, k, v = (part.view(5, 2, 4) for part in _linear(layer.qkv, given).view(5, 2, 12).split(4, -1))
    assert layer.bias is not None
    assert layer.pair_norm is not None
    bias = _linear(layer.bias, layer.pair_norm(pairs)[0])
    heads = []
    for head in range(2):
        scores = torch.stack([q[2, head] @ k[j, head] for j in range(5)]) / 2 + bias[2, :, head]
        heads.append(scores.softmax(dim=0) @ v[:, head])
    mixed = torch.sigmoid(_linear(layer.gate, given[2])) * torch.cat(heads)
    torch.testing.assert_close(layer(x, pairs)[0, 1, 2], _linear(layer.out, mixed))


def test_sequences_other_than_the_query_have_no_order() -> None:
    model = evoformer.build("tiny")
    sample = next(alignments(min_depth=5))
    order = torch.tensor([0, *reversed(range(1, sample.tokens.shape[1]))])
    turned = replace(sample, tokens=sample.tokens[:, order], hidden=sample.hidden[:, order])
    (hidden, apart), (hidden_turned, apart_turned) = (_outputs(model, s) for s in (sample, turned))
    torch.testing.assert_close(hidden[:, order], hidden_turned, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(apart, apart_turned, atol=1e-4, rtol=1e-4)


def test_dropout_takes_whole_rows_and_columns() -> None:
    """Algorithm 6: what is dropped is the same along the dimension that is shared."""
    block = Block(evoformer.PRESETS["tiny"])
    ones = torch.ones(1, 40, 30, 4)
    for along in (1, 2):
        dropped = block._drop(ones, 0.25, along)
        assert torch.equal(dropped, dropped.narrow(along, 0, 1).expand_as(dropped))
        assert 0.1 < (dropped == 0).float().mean() < 0.45
    assert block.eval()._drop(ones, 0.25, 1) is ones


def test_recycling_runs_the_blocks_again_and_learns_in_the_last_run_alone() -> None:
    model = evoformer.build("tiny").eval()
    calls: list[bool] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    sample = next(alignments(seed=3))
    outputs = []
    for cycles in (1, 2, 4):
        calls.clear()
        outputs.append(model(replace(sample, cycles=cycles)))
        assert calls == [False] * (cycles - 1) + [True]
    assert not torch.equal(outputs[0].hidden, outputs[1].hidden)
    assert not torch.equal(outputs[1].hidden, outputs[2].hidden)
    rows, depth, length = sample.tokens.shape
    assert outputs[0].hidden.shape == (rows, depth, length, TOKENS)
    assert outputs[0].distances.shape == (rows, length, length, BINS)
    assert torch.equal(outputs[0].distances, outputs[0].distances.transpose(1, 2))
    outputs[0].loss.backward()
    assert model.recycling.pair_norm.weight.grad is None  # nothing was carried
    outputs[2].loss.backward()
    assert model.recycling.pair_norm.weight.grad is not None


def test_it_learns() -> None:
    """It comes to say what columns prefer, and how far residues are apart."""
    model = evoformer.build("tiny", pair_dropout=0.0, alignment_dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for sample in islice(alignments(max_depth=8, max_length=24, max_cycles=2, seed=0), 100):
        loss = model(sample).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[:5]) / 5 > 3.6
    assert sum(losses[-30:]) / 30 < 3.2


def test_samples_take_different_paths() -> None:
    model = evoformer.build("tiny")
    stream = zoo.samples("evoformer", max_cycles=4)
    described = [model.sample_features(*s.args).values for s in islice(stream, 40)]
    assert {values["cycles"] for values in described} == {1.0, 2.0, 3.0, 4.0}
    assert len({tuple(values.items()) for values in described}) >= 35


def test_a_quarter_of_its_memory_is_enough_and_changes_no_bit() -> None:
    """Dropout, runs without gradients before one with, and another shape at every step."""
    model = zoo.build("evoformer", "tiny", alignment=64, pair=48)
    twin = Twin(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    shape = {"max_depth": 6, "max_length": 20, "max_cycles": 3}
    batches = [s.args[0] for s in islice(zoo.samples("evoformer", seed=5, **shape), 4)]
    budget = footprint_of(model) // 4
    session = compare_runs(twin, Loop(steps=4), batches, lambda net, s: net(s).loss, budget)
    assert all(step.bytes_in > 0 for step in session.log.steps[1:])


def test_presets_and_bad_sizes() -> None:
    published = sum(p.numel() for p in evoformer.build("base", device="meta").blocks.parameters())
    assert 80e6 < published < 95e6  # 48 blocks of AlphaFold
    with pytest.raises(ValueError, match="'huge'"):
        zoo.build("evoformer", "huge")
    with pytest.raises(ValueError, match="pair=10 must be a multiple of pair_heads=4"):
        zoo.build("evoformer", "tiny", pair=10, pair_heads=4)
