"""Tiled modules in plain PyTorch: what they compute, take, give back and refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.experiments.allocations import Allocations
from dynoffload.tiling.modules import Tiled, TiledEmbedding, TiledLinear, TiledRows


class Net(nn.Module):
    """A table and a head that pass 32 KiB, between them a layer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 128, padding_idx=3)
        self.hidden = nn.Linear(128, 32)
        self.head = nn.Linear(32, 640)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def pair(max_bytes: str = "32KiB", **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a tiled `Net` and the same whole."""
    torch.manual_seed(0)
    tiled = Net()
    whole = copy.deepcopy(tiled)
    assert dynoffload.tile(tiled, max_bytes, **options)
    return tiled, whole


def tokens(count: int = 9) -> Tensor:
    return torch.randint(0, 96, (2, count), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, dim: int, key: str = "weight") -> Tensor:
    """Return the gradients of a module's tiles, joined."""
    assert isinstance(model, Tiled)
    return torch.cat([getattr(one, key).grad.to_dense() for one in model.tiles], dim)


def assert_same_pass(
    tiled: nn.Module, whole: nn.Module, inputs: tuple[Tensor, Tensor], dim: int
) -> Tensor:
    """Assert that outputs and gradients of weights are the same, and return the output's gradient,
    of which many elements are -0."""
    y, expected = tiled(inputs[0]), whole(inputs[1])
    assert_same(y, expected, "output")
    grad = torch.randn_like(y).masked_fill(torch.rand(y.shape) < 0.2, -0.0)
    y.backward(grad)
    expected.backward(grad)
    assert_same(gradients(tiled, dim), whole.weight.grad.to_dense(), "weight.grad")
    return grad


# What is split, and how


def test_large_weights_are_split_in_place() -> None:
    model = Net().eval()
    model.head.weight.decays = False  # type: ignore[attr-defined]
    model.head.bias.requires_grad_(False)
    head, seen = model.head, []
    head.register_forward_hook(lambda *args: seen.append(args))
    assert dynoffload.tile(model, "32KiB") == ["embedding", "head"]
    assert model.head is head
    assert type(model.hidden) is nn.Linear
    assert isinstance(model.head, TiledLinear)
    assert isinstance(model.embedding, TiledEmbedding)
    assert [one.out_features for one in model.head.tiles] == [256, 256, 128]
    assert [one.embedding_dim for one in model.embedding.tiles] == [64, 64]
    for one in model.head.tiles:
        assert one.weight.decays is False
        assert one.weight.requires_grad
        assert not one.bias.requires_grad
        assert not one.training
        assert one.weight.untyped_storage().nbytes() == one.weight.nbytes <= 32 << 10
    model(tokens())
    assert len(seen) == 1
    assert dynoffload.tile(model, "64KiB", skip=["hidden"]) == []  # what is tiled stays
    tiled = r"is tiled already, by tiles of .* KiB, and max_bytes is 1\.00 KiB: call .*untile"
    with pytest.raises(ConfigError, match=tiled):
        dynoffload.tile(model, 1 << 10, skip=["hidden"])
    assert dynoffload.tile(model, 1 << 10, skip=["embedding", "head", "hidden"]) == []


@pytest.mark.parametrize(
    ("features", "most", "lengths"),
    [
        (640, 100, [64] * 10),  # multiples of 64 where that many are allowed
        (500, 300, [256, 244]),
        (257, 256, [192, 65]),  # and no fewer than 64 where the one before can spare them
        (129, 128, [64, 65]),
        (65, 64, [64, 1]),
        (25, 10, [9, 9, 7]),
    ],
)
def test_tiles_of_so_many_bytes(features: int, most: int, lengths: list[int]) -> None:
    layer = nn.Linear(1, features)
    dynoffload.tile(layer, 4 * most)
    assert [one.out_features for one in layer.tiles] == lengths


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        model = Net().bfloat16()
    assert dynoffload.tile(model, "16KiB") == ["embedding", "head"]
    assert all(one.is_meta and one.dtype == torch.bfloat16 for one in model.parameters())
    assert dynoffload.untile(model).head.weight.is_meta


@pytest.mark.parametrize("twice", [False, True])
def test_a_model_may_be_the_layer_and_a_module_at_two_places_is_one(twice: bool) -> None:
    layer = nn.Linear(64, 64, bias=False)
    model: nn.Module = nn.Sequential(layer, nn.Tanh(), layer) if twice else layer
    whole = copy.deepcopy(model)
    assert dynoffload.tile(model, "4KiB") == ["0" if twice else ""]
    assert len(list(model.parameters())) == 4
    assert_same(dynoffload.whole_state_dict(model), dict(whole.state_dict()), "state")
    dynoffload.untile(model)
    assert type(layer) is nn.Linear
    assert_same(dict(model.state_dict()), dict(whole.state_dict()), "state")


# What is computed


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_bits_of_the_whole(
    dtype: torch.dtype, bias: bool, rows: int
) -> None:
    """All but the input's gradient, which is the whole's within rounding."""
    torch.manual_seed(rows)
    tiled = nn.Linear(96, 448, bias, dtype=dtype)
    whole = copy.deepcopy(tiled)
    dynoffload.tile(tiled, 192 * 96 * dtype.itemsize)
    assert [one.out_features for one in tiled.tiles] == [192, 192, 64]
    x = torch.randn(3, rows, 96, dtype=dtype)
    own, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = assert_same_pass(tiled, whole, (own, its), 0)
    if bias:
        assert_same(gradients(tiled, 0, "bias"), whole.bias.grad, "bias.grad")
    assert own.grad is not None
    exact = grad.double() @ whole.weight.detach().double()
    scale = grad.double().abs() @ whole.weight.detach().double().abs()
    # Each tile's product is rounded, and then each of the sums; within a tile of float32 every
    # one of its products may be.
    roundings = 448 if dtype == torch.float32 else 2 * len(tiled.tiles)
    bound = roundings * torch.finfo(dtype).eps * scale
    assert bool(((own.grad.double() - exact).abs() <= bound).all())


def test_the_gradients_are_those_of_numbers() -> None:
    layer = TiledLinear(5, 7, dtype=torch.float64, tiles=3)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_has_the_bits_of_the_whole(options: dict[str, Any]) -> None:
    tiled = nn.Embedding(40, 30, padding_idx=2, **options)
    whole = copy.deepcopy(tiled)
    dynoffload.tile(tiled, 13 * 40 * 4)
    assert [one.embedding_dim for one in tiled.tiles] == [10, 10, 10]
    ids = torch.randint(0, 40, (6, 11))
    assert_same_pass(tiled, whole, (ids, ids), 1)
    assert not gradients(tiled, 1)[2].any()


class Tied(nn.Module):
    """A table and the head that has its weight."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 96, padding_idx=padding, scale_grad_by_freq=True)
        self.head = nn.Linear(96, 200)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


@pytest.mark.parametrize("padding", [None, 150])
def test_tied_layers_have_their_tiles_together(padding: int | None) -> None:
    """The gradients of both meet in each tile as in the whole."""
    torch.manual_seed(0)
    tiled = Tied(padding)
    whole = copy.deepcopy(tiled)
    assert dynoffload.tile(tiled, 128 * 96 * 4) == ["table", "head"]
    assert isinstance(tiled.table, TiledRows)
    assert [one.num_embeddings for one in tiled.table.tiles] == [128, 72]
    for one, other in zip(tiled.table.tiles, tiled.head.tiles, strict=True):
        assert one.weight is other.weight
    assert len(list(tiled.parameters())) == 4
    ids = torch.randint(0, 64, (2, 9))  # of the first tile only, and then of the others
    for offset in (0, 64, 130):
        y, expected = tiled(ids + offset), whole(ids + offset)
        assert_same(y, expected, "output")
        for one in (y, expected):
            F.cross_entropy(one.flatten(0, 1), ids.flatten()).backward()
    hidden = torch.cat([one.weight.grad for one in tiled.table.tiles])
    assert whole.table.weight.grad is not None
    # The head's input gradient is a sum over tiles, which the table's gradient is made of.
    torch.testing.assert_close(hidden, whole.table.weight.grad, rtol=0, atol=1e-6)
    with pytest.raises(IndexError, match="from 3 to 200 are out of range of a table of 200"):
        tiled(torch.tensor([3, 200]))
    tiled.zero_grad()
    state = dynoffload.whole_state_dict(tiled)
    assert state["table.weight"] is state["head.weight"]
    assert_same(state, dict(whole.state_dict()), "state")
    tiled.load_state_dict(whole.state_dict())
    dynoffload.untile(tiled)
    assert tiled.head.weight is tiled.table.weight
    assert tiled.table.padding_idx == padding
    assert_same(dict(tiled.state_dict()), dict(whole.state_dict()), "state")


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"padding_idx": 25}])
def test_a_table_of_rows_has_the_bits_of_the_whole(options: dict[str, Any]) -> None:
    """Also in rows whose gradients are -0, and in tiles that nothing looks up."""
    tables = nn.Sequential(nn.Embedding(60, 8, **options), nn.Embedding(60, 8, **options))
    tables[1].weight = tables[0].weight
    whole = copy.deepcopy(tables[0])
    dynoffload.tile(tables, 20 * 8 * 4)
    ids = torch.randint(0, 40, (6, 11))
    assert_same_pass(tables[0], whole, (ids, ids), 0)


def _autocast(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(ids)


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autocast": _autocast,
    "checkpointed": lambda model, ids: checkpoint(model, ids, use_reentrant=False),
    "copied": lambda model, ids: copy.deepcopy(model)(ids),
    "pickled": lambda model, ids: pickle.loads(pickle.dumps(model))(ids),
    "compiled": lambda model, ids: torch.compile(model, backend="aot_eager", fullgraph=True)(ids),
    "functional": lambda model, ids: functional_call(model, dict(model.named_parameters()), ids),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "compiled")) for how in RUNS]
)
def test_it_runs_as_modules_do(how: str) -> None:
    """Twice, so that gradients are accumulated; against whole modules run alike."""
    tiled, whole = pair()
    for count in (4, 9):
        y, expected = RUNS[how](tiled, tokens(count)), RUNS[how](whole, tokens(count))
        assert_same(y, expected, "output")
        F.cross_entropy(y.float().flatten(0, 1), tokens(count).flatten()).backward()
        F.cross_entropy(expected.float().flatten(0, 1), tokens(count).flatten()).backward()
    if how not in ("copied", "pickled"):
        assert_same(gradients(tiled.head, 0), whole.head.weight.grad, "head.weight.grad")


class Largest(Allocations):
    """Knows the most bytes of one storage too."""

    largest = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__torch_dispatch__(*args, **kwargs)
        self.largest = max((self.largest, *self._known.values()))
        return out


@pytest.mark.parametrize("is_tiled", [True, False])
def test_no_more_than_a_tile_is_made_at_a_time(is_tiled: bool) -> None:
    """Nothing as large as the weight is made; a tile's gradient is handed over, and may go, before
    the next is made. A whole layer does make as much, so that the watch is known to see it."""
    layer = nn.Linear(64, 1024)
    if is_tiled:
        dynoffload.tile(layer, "32KiB")
        assert len(layer.tiles) == 8
    for name, parameter in layer.named_parameters():
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Largest() as watch:
        layer(torch.randn(1, 64, requires_grad=True)).square().sum().backward()
    assert watch.largest == (32 << 10 if is_tiled else 256 << 10)
    assert watch.peak < 64 << 10 if is_tiled else watch.peak > 256 << 10


def test_a_new_layer_has_the_numbers_of_a_whole_one() -> None:
    """Drawn in the same order, and as many."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        whole = nn.Linear(24, 200, dtype=dtype)
        drawn = torch.get_rng_state()
        torch.manual_seed(5)
        tiled = TiledLinear(24, 200, dtype=dtype, tiles=3)
        assert_same(torch.get_rng_state(), drawn, "state of the random numbers")
        state = dict(whole.state_dict())
        assert_same(dynoffload.whole_state_dict(tiled), state, "state")


# State


def test_whole_and_tiled_models_read_each_other() -> None:
    tiled, whole = pair()
    other, another = pair()[0], pair("16KiB")[0]
    for one in (other, another, whole):
        for parameter in one.parameters():
            nn.init.zeros_(parameter)
    state = dynoffload.whole_state_dict(tiled)
    whole.load_state_dict(state)
    other.load_state_dict(tiled.state_dict())
    another.load_state_dict(state)
    dynoffload.untile(another)
    assert list(state) == list(whole.state_dict())
    for one in (whole, another):
        assert_same(dict(one.state_dict()), state, "state")
    assert_same(dict(other.state_dict()), dict(tiled.state_dict()), "state")


def test_what_is_loaded_is_split_without_a_copy_of_the_whole() -> None:
    tiled, whole = pair()
    state = whole.state_dict()
    with Allocations() as watch:
        tiled.load_state_dict(state)
    assert watch.peak == 0
    tiled.load_state_dict(state, assign=True)
    for one in tiled.head.tiles:
        assert one.weight.untyped_storage().nbytes() == one.weight.nbytes


def test_what_does_not_fit_is_not_loaded() -> None:
    tiled, whole = pair()
    state = dict(whole.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"head\.weight\""):
        tiled.load_state_dict({**tiled.state_dict(), "head.weight": state["head.weight"]})
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.tiles\.0\.bias"):
        tiled.load_state_dict({key: one for key, one in state.items() if key != "head.bias"})
    state["head.weight"] = state["head.weight"][:-1]
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        tiled.load_state_dict(state)


# What is refused


def refused(model: nn.Module, match: str, **options: Any) -> None:
    before = list(model.named_parameters())
    with pytest.raises(ConfigError, match=match):
        dynoffload.tile(model, options.pop("max_bytes", "32KiB"), **options)
    after = list(model.named_parameters())
    assert [(name, id(one)) for name, one in after] == [(name, id(one)) for name, one in before]


def test_a_weight_that_is_something_elses_is_refused_and_may_be_left_whole() -> None:
    model = nn.Sequential(nn.Linear(128, 640), nn.Embedding(96, 128), nn.Linear(128, 96))
    model[2].weight = model[1].weight
    refused(model, r"'1\.weight' shares its memory with '2\.weight'.*skip=\['1'\]", skip=["2"])
    assert dynoffload.tile(model, "32KiB", skip=["1", "2"]) == ["0"]
    model = nn.Sequential(nn.Linear(128, 96))
    model.register_buffer("view", model[0].weight.detach()[:2])
    refused(model, r"'0\.weight' shares its memory with 'view'")
    model = nn.Sequential(nn.Linear(128, 96), nn.Linear(128, 96))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    refused(model, r"'0\.weight' shares its memory with '1\.weight'")


def test_what_cannot_be_split_is_named() -> None:
    refused(nn.Sequential(nn.Embedding(96, 128, max_norm=1.0)), "max_norm")
    refused(nn.Sequential(nn.Linear(128, 96)), "'0': one feature takes 512 B", max_bytes=100)
    refused(Net(), "skip names 'tail'", skip=["tail"])
    model = Net()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    refused(model, r"'head\.weight' has a gradient")

    class Own(nn.Parameter):
        pass

    model = Net()
    model.head.weight = Own(model.head.weight.detach())
    refused(model, r"'head\.weight' is a Own")


@pytest.mark.parametrize("options", [{}, {"tiles": 2, "tile_bytes": 64}, {"tiles": 0}])
def test_a_layer_says_how_it_is_split(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tiles"):
        TiledLinear(8, 8, **options)


def test_tiles_that_differ_are_not_joined() -> None:
    tiled, _ = pair()
    tiled.head.tiles[1].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="'head' cannot be joined"):
        dynoffload.untile(tiled)
    tiled, _ = pair()
    tiled(tokens()).sum().backward()
    with pytest.raises(ConfigError, match="'embedding' have gradients"):
        dynoffload.untile(tiled)
    assert isinstance(tiled.head, TiledLinear)


def test_the_whole_weight_is_nowhere() -> None:
    tiled, _ = pair()
    assert not hasattr(tiled.head, "weight")
    with pytest.raises(AttributeError, match="'TiledLinear' object has no attribute 'weight'"):
        F.linear(torch.randn(2, 32), tiled.head.weight)
    encoder = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    assert dynoffload.tile(encoder, "32KiB") == ["linear1", "linear2"]
    x = torch.randn(2, 3, 64)
    encoder(x).sum().backward()
    with pytest.raises(AttributeError, match="no attribute 'weight'"):  # it asks in evaluation
        encoder.eval()(x)
