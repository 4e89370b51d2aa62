"""The MoE language model: routing is dynamic and ascending, it learns, it builds on meta."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from dynoffload.datasets.text import TextBatch, batches
from dynoffload.experiments import zoo
from dynoffload.experiments.zoo import moe_lm
from dynoffload.experiments.zoo.moe_lm import MoE, MoEConfig, MoELM


def _path(model: nn.Module, batch: TextBatch) -> list[str]:
    """Return the experts that one forward pass ran, in order."""
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_modules()
        if isinstance(module, moe_lm.Expert)
    ]
    with torch.no_grad():
        model(batch.tokens, batch.targets)
    for handle in handles:
        handle.remove()
    return ran


def test_it_learns() -> None:
    model = moe_lm.build("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in islice(batches(rows=4, length=64, seed=0, mixed=True), 80):
        loss = model(batch.tokens, batch.targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[:5]) / 5 > 4.5
    assert sum(losses[-10:]) / 10 < 3.0


@pytest.mark.parametrize("preset", ["tiny", "tiny-wide"])
def test_samples_take_different_paths_in_ascending_order(preset: str) -> None:
    model = moe_lm.build(preset)
    paths = [_path(model, batch) for batch in islice(batches(length=4, seed=0), 8)]
    assert len({tuple(path) for path in paths}) >= 6
    for path in paths:
        calls = [(int(name.split(".")[1]), int(name.split(".")[4])) for name in path]
        assert calls == sorted(set(calls))
        assert {layer for layer, _ in calls} == {0, 1}


def test_an_expert_that_no_token_chose_has_no_gradient() -> None:
    model = moe_lm.build("tiny-wide")
    batch = next(batches(length=4, seed=0))
    ran = set(_path(model, batch))
    model(batch.tokens, batch.targets).loss.backward()
    for name, module in model.named_modules():
        if isinstance(module, moe_lm.Expert):
            assert (module.up.weight.grad is not None) == (name in ran)


def test_the_loop_equals_a_dense_mixture() -> None:
    config = MoEConfig(hidden=16, layers=1, heads=2, experts=5, width=8, top_k=2)
    torch.manual_seed(0)
    layer = MoE(config)
    x = torch.randn(11, 16)
    mixed, balance = layer(x)
    chances = layer.router(x).softmax(dim=-1)
    kept, chosen = chances.topk(2, dim=-1)
    weights = torch.zeros_like(chances).scatter(1, chosen, kept / kept.sum(dim=1, keepdim=True))
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=1)
    torch.testing.assert_close(mixed, (weights[..., None] * outputs).sum(dim=1))
    # 1 is the loss of an even load; top-k of a router's own chances can only lean further.
    assert balance.item() >= 1.0


def test_no_token_sees_what_comes_after_it() -> None:
    model = moe_lm.build("tiny")
    tokens = torch.arange(24).view(1, 24)
    changed = tokens.clone()
    changed[0, 16:] = 99
    before = model(tokens).logits[:, :16]
    assert torch.allclose(before, model(changed).logits[:, :16], atol=1e-5)
    assert not torch.allclose(before[:, 8], model(tokens.roll(1, 1)).logits[:, 8], atol=1e-3)


def test_positions_matter() -> None:
    model = moe_lm.build("tiny")
    swapped = torch.tensor([[7, 3, 5, 9]])
    assert not torch.allclose(
        model(torch.tensor([[3, 7, 5, 9]])).logits[0, -1], model(swapped).logits[0, -1], atol=1e-5
    )


def test_without_targets_there_is_no_loss() -> None:
    output = moe_lm.build("tiny")(torch.zeros(2, 8, dtype=torch.int64))
    assert output.loss is None
    assert output.logits.shape == (2, 8, 256)


def test_weights_follow_from_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = moe_lm.build("tiny")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = moe_lm.build("tiny")
    other = moe_lm.build("tiny", seed=1)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_meta_networks_can_be_given_their_weights_module_by_module() -> None:
    meta = moe_lm.build("tiny", device="meta")
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *meta.buffers()])
    real = meta.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in real.modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            module.reset_parameters()
    plain = moe_lm.build("tiny")
    for (name, one), two in zip(real.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert torch.equal(real.rotary.frequencies, plain.rotary.frequencies)


def test_autocast_runs_and_trains() -> None:
    model = moe_lm.build("tiny")
    batch = next(batches(rows=2, length=32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch.tokens, batch.targets).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.head.weight.grad.abs().sum() > 0


def test_tying_shares_one_weight() -> None:
    model = moe_lm.build("tiny", tied=True)
    assert model.head.weight is model.embedding.weight
    assert moe_lm.build("tiny").head.weight is not moe_lm.build("tiny").embedding.weight


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("tiny", (0.2, 0.4)), ("small", (38, 44)), ("base", (320, 340))],
)
def test_presets_have_the_sizes_they_promise(preset: str, millions: tuple[float, float]) -> None:
    def count(name: str) -> float:
        return sum(p.numel() for p in moe_lm.build(name, device="meta").parameters()) / 1e6

    assert millions[0] < count(preset) < millions[1]
    assert abs(count(f"{preset}-wide") / count(preset) - 1) < 0.06


def test_a_sample_shows_each_token_with_the_two_before_it() -> None:
    model = moe_lm.build("tiny")
    sample = model.sample_features(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    expected = [[1, 256, 256], [2, 1, 256], [3, 2, 1], [4, 256, 256], [5, 4, 256], [6, 5, 4]]
    assert sample.elements.dtype == np.int64
    assert sample.elements.tolist() == expected
    assert sample.values == {"rows": 2.0, "length": 3.0, "tokens": 6.0}
    assert model.sample_features(torch.tensor([[8]])).elements.tolist() == [[8, 256, 256]]


@pytest.mark.parametrize(("sizes", "named"), [({"heads": 5}, "heads=5"), ({"top_k": 9}, "top_k=9")])
def test_sizes_that_make_no_network_are_refused(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        moe_lm.build("tiny", **sizes)


def test_the_zoo_finds_networks_and_their_samples_by_name() -> None:
    model = zoo.build("moe", "tiny", layers=1)
    assert isinstance(model, MoELM)
    sample = next(zoo.samples("moe", "held-out", length=16))
    assert sample.source.endswith(".py")
    assert model(*sample.args).loss.ndim == 0
    with pytest.raises(ValueError, match="no network 'mow'"):
        zoo.build("mow")
    with pytest.raises(ValueError, match="no network 'mow'"):
        zoo.samples("mow")
    with pytest.raises(ValueError, match="no preset 'huge'"):
        zoo.build("moe", "huge")
