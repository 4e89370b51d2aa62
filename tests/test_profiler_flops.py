"""FLOPs of executed calls: against torch's own counter where it knows them, by hand elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.profiler import Operator, Recorder, Trace
from dynoffload.profiler.flops import counter_of


class _Calls(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, act: Callable[[], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self) -> Tensor:
        return self.act()


def _recorded(act: Callable[[], Tensor], *, backward: bool = False) -> list[Operator]:
    """Return the operators of ``act``, and of the backward of its sum."""
    traces: list[Trace] = []
    model = _Calls(act)
    with Recorder(model, on_step=traces.append):
        made = model()
        if backward:
            made.sum().backward()
    return traces[0].operators


def _flops(operators: list[Operator], name: str = "") -> int:
    return sum(op.flops or 0 for op in operators if name in op.name)


def test_products_have_two_operations_for_each_triple() -> None:
    m, k, n, b = 3, 5, 7, 2
    left, right = torch.rand(m, k), torch.rand(k, n)
    lefts, rights = torch.rand(b, m, k), torch.rand(b, k, n)
    counted: list[tuple[Callable[[], Tensor], int]] = [
        (lambda: left @ right, m * k * n),
        (lambda: torch.mm(left, right, out=torch.empty(m, n)), m * k * n),
        (lambda: torch.addmm(torch.rand(n), left, right), m * k * n),
        (lambda: torch.rand(m, n).addmm_(left, right), m * k * n),
        (lambda: lefts @ rights, b * m * k * n),
        (lambda: torch.baddbmm(torch.rand(b, m, n), lefts, rights), b * m * k * n),
        (lambda: torch.addbmm(torch.rand(m, n), lefts, rights), b * m * k * n),
        (lambda: torch.mv(left, right[:, 0]), m * k),
        (lambda: torch.addmv(torch.rand(m), left, right[:, 0]), m * k),
        (lambda: torch.dot(left[0], right[:, 0]), k),
    ]
    for act, triples in counted:
        assert _flops(_recorded(act)) == 2 * triples


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [((9, 4), (3, 4, 8), 9 * 4 * 8), ((4, 9), (9, 8), 4 * 9 * 8), ((3, 8, 4), (4, 9), 8 * 4 * 9)],
    ids=["rows", "inner", "columns"],
)
def test_a_grouped_product_is_the_sum_of_its_groups(
    left: tuple[int, ...], right: tuple[int, ...], wanted: int
) -> None:
    """Whichever dimension is jagged; offsets end where the dimension does."""
    count_flops = counter_of(torch.ops.aten._grouped_mm.default)
    assert count_flops is not None
    args = torch.empty(left), torch.empty(right), torch.empty(3, dtype=torch.int32)
    assert count_flops(args, {}, None) == 2 * wanted


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_agree_with_torch(transposed: bool, dimensions: int) -> None:
    """Forward, and both gradients."""
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dimensions}d")
    layer = kind(3, 5, 3, stride=2, padding=1)
    x = torch.rand(2, 3, *[8] * dimensions, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert _flops(_recorded(lambda: layer(x), backward=True)) == counter.get_total_flops() > 0


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_a_convolution_are_convolutions_of_their_own(transposed: bool) -> None:
    """Also in the gradient of the weight, where torch's counter multiplies by their number."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    whole, part = kind(8, 8, 3, groups=4), kind(2, 2, 3)
    x = torch.rand(2, 8, 10, requires_grad=True)
    one = torch.rand(2, 2, 10, requires_grad=True)
    found = _flops(_recorded(lambda: whole(x), backward=True))
    assert found == 4 * _flops(_recorded(lambda: part(one), backward=True)) > 0


@pytest.mark.parametrize(
    "name",
    "mkldnn_convolution cudnn_convolution miopen_convolution _slow_conv2d_forward "
    "slow_conv3d_forward _conv_depthwise2d conv_depthwise3d convolution_overrideable "
    "convolution_backward_overrideable mkldnn_linear mkldnn_linear_backward "
    "_weight_int8pack_mm".split(),
)
def test_kernels_called_directly_are_counted(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    operator = getattr(packet, packet.overloads()[0])
    x, weight, made = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3), torch.empty(2, 5, 6, 6)
    if name.endswith("_mm") or "linear" in name:
        x, weight, made = torch.empty(4, 6), torch.empty(7, 6), torch.empty(4, 7)
    named = {"self": x, "input": x, "weight": weight, "mat2": weight, "grad_output": made}
    known = {**named, "transposed": False, "output_mask": (True, True, False)}
    given = {a.name: known[a.name] for a in operator._schema.arguments if a.name in known}
    count_flops = counter_of(operator)
    assert count_flops is not None
    products = 2 if "backward" in name else 1
    assert count_flops((), given, made) == products * 2 * made.numel() * weight[0].numel()


@pytest.mark.parametrize(
    ("causal", "queries", "keys", "repeated"),
    [(False, 5, 7, 1), (True, 5, 7, 1), (True, 7, 5, 2), (False, 6, 6, 2)],
)
def test_attention_counts_the_pairs_that_it_scores(
    causal: bool, queries: int, keys: int, repeated: int
) -> None:
    """Two products in forward and five in backward, over the pairs that the mask leaves."""
    heads, width = 2, 8
    query = torch.rand(1, heads * repeated, queries, width, requires_grad=True)
    key, value = (torch.rand(1, heads, keys, width, requires_grad=True) for _ in range(2))

    def act() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=repeated > 1
        )

    operators = _recorded(act, backward=True)
    scored = torch.ones(queries, keys)
    pairs = heads * repeated * int((scored.tril() if causal else scored).sum())
    fused = [op for op in operators if "_for_cpu" in op.name]
    assert [op.flops for op in fused] == [2 * pairs * 2 * width, 2 * pairs * 5 * width]


def test_a_recurrent_layer_counts_its_gates() -> None:
    """oneDNN runs it as one call; the products of all steps are those of its weights."""
    layer = nn.LSTM(6, 5)
    x = torch.rand(7, 3, 6)
    operators = _recorded(lambda: layer(x)[0], backward=True)
    gates = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    if any("mkldnn_rnn_layer" in op.name for op in operators):
        assert _flops(operators, "mkldnn_rnn_layer.") == 2 * 7 * 3 * gates
        assert _flops(operators, "mkldnn_rnn_layer_backward") == 4 * 7 * 3 * gates
    else:
        assert _flops([op for op in operators if op.phase == "forward"]) == 2 * 7 * 3 * gates


def test_what_makes_no_products_has_none_and_views_have_nothing() -> None:
    x = torch.rand(4, 4)
    operators = _recorded(lambda: torch.softmax(x.t() + x.view(16).view(4, 4), 0))
    assert {op.flops for op in operators} == {0}
    views = [op for op in operators if op.name in ("aten.t.default", "aten.view.default")]
    assert len(views) == 3
    assert all(op.dtype == "" and not op.bytes_read for op in views)


@pytest.mark.parametrize("name", ["qwen3-moe", "mamba"])
def test_every_product_of_a_network_is_counted(name: str) -> None:
    """Whatever kernel runs it: no operator of this family has none, and none is unknown."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    traces: list[Trace] = []
    with Recorder(model, on_step=traces.append):
        architecture.loss(model(**architecture.sample(model, 0))).backward()
    family = ("mm", "conv", "attention", "linear", "mv", "dot")
    operators = [op for op in traces[0].operators if op.bytes_read or op.bytes_written]
    products = [op for op in operators if any(word in op.name for word in family)]
    assert products
    assert [op.name for op in products if not op.flops] == []
    assert all(op.flops is not None for op in operators)


def test_a_formula_that_fails_leaves_the_count_unknown() -> None:
    """And does not end the training that is recorded."""
    count: Any = counter_of(torch.ops.aten.mm.default)
    assert count((object(), object()), {}, None) is None
