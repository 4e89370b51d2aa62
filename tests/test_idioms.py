"""The idiom table: nothing that training executes is unknown, and the published rows are kept."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.experiments import zoo
from dynoffload.profiler import Idioms, idioms_of, is_known, rule_of
from dynoffload.profiler.idiom_rows import (
    METADATA,
    REDUCTION,
    RESHAPING,
    ROWS,
    SHARING,
    STREAM,
    SYNONYMS,
)
from dynoffload.profiler.idioms import base_name

aten = torch.ops.aten

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


PUBLISHED = {
    "transpose": (1, 0, 0, 0, 0, 0),
    "maximum": (0, 0, 0, 0, 1, 0),
    "elu": (0, 0, 0, 0, 1, 0),
    "dropout": (0, 0, 0, 0, 1, 0),
    "relu_": (0, 1, 0, 0, 0, 0),
    "add_": (0, 1, 0, 0, 0, 0),
    "cat": (0, 0, 0, 0, 0, 0),
    "clone": (0, 0, 0, 0, 0, 0),
    "diag": (0, 0, 0, 0, 0, 0),
    "convolution": (0, 1, 0, 1, 1, 2),
    "conv_tbc": (1, 1, 0, 1, 1, 2),
    "conv_transpose1d": (1, 1, 0, 1, 1, 2),
    "conv_transpose2d": (1, 1, 0, 1, 2, 2),
    "conv_transpose3d": (1, 1, 0, 1, 2, 2),
    "cudnn_convolution": (0, 1, 0, 1, 2, 2),
    "cudnn_convolution_relu": (0, 1, 0, 1, 3, 2),
    "cudnn_convolution_add_relu": (0, 1, 0, 2, 3, 2),
    "cudnn_batch_norm": (0, 1, 1, 1, 1, 0),
    "avg_pool1d": (0, 0, 0, 1, 0, 1),
    "adaptive_max_pool1d": (0, 0, 0, 1, 0, 1),
    "max_pool1d": (0, 0, 0, 1, 0, 0),
    "max_pool2d": (0, 0, 0, 1, 0, 0),
    "max_pool3d": (0, 0, 0, 1, 0, 1),
    "gather_backward": (0, 1, 1, 1, 0, 0),
    "embedding_backward": (0, 1, 1, 1, 1, 0),
    "nll_loss_backward": (0, 1, 0, 0, 0, 0),
    "gelu_backward": (0, 0, 0, 1, 1, 0),
    "silu_backward": (0, 0, 0, 1, 1, 0),
    "sigmoid_backward": (0, 0, 0, 1, 1, 0),
    "tanh_backward": (0, 0, 0, 1, 1, 0),
    "mse_loss_backward": (0, 1, 1, 1, 1, 0),
    "fbgemm_linear_int8_weight": (0, 1, 1, 1, 1, 0),
}
"""Rows that Ren et al. (HPCA 2024) print, of operators that torch has."""


def _registered(namespace: str = "aten") -> list[Any]:
    """Return every overload that torch's dispatcher has in ``namespace``, by name.

    TorchScript's own builtins (``aten::len.str``) are not operators of the dispatcher. What Python
    code has added to ``aten`` after torch was built is left out; all of ``prims`` is such code, of
    which those are left out that torch's compiler adds for itself, once it is imported.
    """
    if namespace == "prims":
        importlib.import_module("torch._prims")  # registers them
    module = sys.modules.get("torch._inductor.inductor_prims")
    compiler = [] if module is None else list(vars(module).values())
    theirs = {one.name() for one in compiler if isinstance(one, torch._ops.OpOverload)}  # type: ignore[no-untyped-call]
    theirs |= {
        one._qualified_op_name for one in compiler if isinstance(one, torch._ops.OpOverloadPacket)
    }
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space != namespace or full in theirs:
            continue
        base, _, overload = name.partition(".")
        func = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        if namespace == "prims" or not func._defined_in_python:
            found[full] = func
    return [found[name] for name in sorted(found)]


class _Collect(TorchDispatchMode):
    """Keeps every overload that is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class _EagerAttention(nn.Module):
    """Attention written out, with a mask and dropout, and a tied, weight-normed head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        attended, _ = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        x = self.norm(x + nn.functional.dropout(attended, 0.1))
        x = x + nn.functional.gelu(self.rms(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _zoo(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = zoo.build(name, "tiny")
    samples = zoo.samples(name)
    return model, lambda: model(*next(samples).args).loss


def _eager() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = _EagerAttention()
    return model, lambda: model(torch.arange(24).reshape(2, 12))


def _transformers(kind: str, **options: Any) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    seq2seq = {
        "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "pad_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=64, output_router_logits=True,
            attention_dropout=0.1, **options,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
    elif kind == "switch":
        config = transformers.SwitchTransformersConfig(
            **seq2seq, num_sparse_encoder_layers=1, num_decoder_layers=2,
            num_sparse_decoder_layers=1, num_experts=4, expert_capacity=8, **options,
        )  # fmt: skip
        model = transformers.SwitchTransformersForConditionalGeneration(config)
    else:
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**seq2seq, tie_word_embeddings=True, **options)
        )
    model.train()
    tokens = torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    return model, lambda: model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]] = {
    "moe": lambda: _zoo("moe"),
    "tree": lambda: _zoo("tree"),
    "eager-attention": _eager,
    "mixtral-sdpa": lambda: _transformers("mixtral", attn_implementation="sdpa"),
    "mixtral-eager": lambda: _transformers("mixtral", attn_implementation="eager"),
    "mixtral-loop": lambda: _transformers("mixtral", experts_implementation="eager"),
    "mixtral-grouped": lambda: _transformers("mixtral", experts_implementation="grouped_mm"),
    "mixtral-batched": lambda: _transformers("mixtral", experts_implementation="batched_mm"),
    "switch": lambda: _transformers("switch"),
    "t5": lambda: _transformers("t5"),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_operator_that_training_executes_is_known(network: str) -> None:
    """Forward, backward, clipping and each optimizer, in float32 and under bfloat16 autocast."""
    torch.manual_seed(0)
    model, loss = NETWORKS[network]()
    collected = _Collect()
    for bf16 in (False, True):
        with collected, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss()
        with collected:
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for make in OPTIMIZERS.values():
        optimizer = make(model.parameters())
        with collected:
            optimizer.step()
            optimizer.step()  # The second step meets state that is there.
    assert len(collected.seen) > 40
    assert sorted(str(func) for func in collected.seen if not is_known(func)) == []
    for func in collected.seen:
        if func.is_view:
            assert idioms_of(func) == Idioms(), func


def _spaces() -> list[Any]:
    return [func for space in ("aten", "prims", "mkldnn") for func in _registered(space)]


def test_what_the_schema_calls_a_view_counts_nothing_and_nothing_else_is_a_view() -> None:
    """A view's schema aliases an argument without writing it, or torch tags it as one in place.

    But for a short list, whose results share memory although the schema does not say so.
    """
    silent = set()
    for func in _spaces():
        declared = func.is_view or torch.Tag.inplace_view in func.tags
        assert not declared or rule_of(func) == "view", func
        if rule_of(func) == "view":
            assert idioms_of(func) == Idioms(), func
            if not declared:
                silent.add(base_name(func))
    assert silent == SHARING


def test_what_shares_memory_by_the_list_does_so_when_it_is_run() -> None:
    """Those of the list that need no layer of functorch around them, and that are not of prims."""
    x = torch.arange(6.0)
    results = {
        "_unsafe_view": aten._unsafe_view(x, [2, 3]),
        "unsafe_split": aten.unsafe_split(x, 2)[0],
        "unsafe_split_with_sizes": aten.unsafe_split_with_sizes(x, [2, 4])[0],
        "unsafe_chunk": aten.unsafe_chunk(x, 2)[0],
        "lift": aten.lift(x),
        "broadcast_tensors": aten.broadcast_tensors([x, torch.ones(2, 1)])[0],
        "meshgrid": aten.meshgrid([x, torch.ones(2)])[0],
        "atleast_1d": aten.atleast_1d(x),
        "atleast_2d": aten.atleast_2d(x),
        "atleast_3d": aten.atleast_3d(x),
        "unflatten_dense_tensors": aten.unflatten_dense_tensors(x, [torch.ones(2, 3)])[0],
        "_reshape_from_tensor": aten._reshape_from_tensor(x, torch.tensor([2, 3])),
    }
    storage = x.untyped_storage().data_ptr()
    for name, result in results.items():
        assert result.untyped_storage().data_ptr() == storage, name
    assert SHARING - results.keys() == {"_add_batch_dim", "_remove_batch_dim", "as_strided"}


def test_metadata_counts_nothing_and_writes_no_data() -> None:
    """By its schema an operator of metadata writes nothing, but for what it is about: how a tensor
    is shaped, what it requires, which streams use it, or an ``out`` that is left uninitialised."""
    written = set()
    for func in _spaces():
        if rule_of(func) == "metadata":
            assert idioms_of(func) == Idioms(), func
            arguments = [a for a in func._schema.arguments if not a.is_out]
            if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
                written.add(base_name(func))
    assert written <= RESHAPING | {"requires_grad", "retain_grad", "set_data", "record_stream"}
    assert {"_coalesced", "sparse_resize", "requires_grad"} <= written


def test_the_rules_say_what_they_say() -> None:
    """One operator for each rule of the note, so that a rule cannot be lost unseen."""
    expected = {
        aten.transpose.int: "view",
        aten.empty_like.default: "metadata",
        aten.mm.default: "row:mm",
        aten._foreach_add_.List: "foreach:pointwise",
        aten._foreach_norm.Scalar: "foreach:row:norm",
        aten.silu.default: "pointwise",
        aten.silu.out: "pointwise",
        aten.permute_copy.default: "copy",
        aten.arange.default: "factory",
        aten.ones_like.default: "factory",
        aten.uniform_.default: "fill",
        aten.hardtanh_backward.default: "backward:pointwise",
        aten.huber_loss_backward.default: "row:huber_loss_backward",
        aten.absolute.default: "synonym:pointwise",
        aten.special_softmax.default: "synonym:row:softmax",
        aten.masked_select_backward.default: "row:masked_select_backward",
        aten.resize.default: "copy",
        aten._unsafe_view.default: "view",
        aten._unsafe_view.out: "copy",
        aten.linalg_solve_triangular.default: "row:linalg_solve_triangular",
        aten.cudnn_grid_sampler.default: "variant:grid_sampler",
        aten.avg_pool3d.default: "variant:avg_pool2d",
    }
    assert {func: rule_of(func) for func in expected} == expected
    assert idioms_of(aten.permute_copy.default) == Idioms(transpose=1)
    assert idioms_of(aten.mm.default) == Idioms(reduction=1, stream=1)


def test_variants_of_an_operator_count_alike() -> None:
    """In place, out= and foreach are the same accesses."""
    alike = [
        (aten.add.Tensor, aten.add_.Tensor, aten.add.out, aten._foreach_add.List),
        (aten.index_add.default, aten.index_add_.default, aten.index_add.out),
        (aten.addmm.default, aten.addmm_.default, aten.addmm.out),
        (aten.sqrt.default, aten.sqrt_.default, aten._foreach_sqrt_.default),
    ]
    for variants in alike:
        assert len({idioms_of(func) for func in variants}) == 1, variants


def test_an_operator_of_a_stranger_is_known_by_its_schema_and_tags_alone() -> None:
    """Its name says nothing, even where ATen has an operator that is called the same."""
    with torch.library._scoped_library("dynoffload_test", "DEF") as library:
        library.define("mystery(Tensor a, Tensor b) -> Tensor")
        library.define("add(Tensor a, Tensor b) -> Tensor")
        library.define("twice(Tensor a) -> Tensor", tags=(torch.Tag.pointwise,))
        library.define("total(Tensor a) -> Tensor", tags=(torch.Tag.reduction,))
        library.define("part(Tensor(a) a) -> Tensor(a)")
        space = torch.ops.dynoffload_test
        for func in (space.mystery.default, space.add.default):
            assert rule_of(func) == "unknown"
            assert not is_known(func)
            assert idioms_of(func) == Idioms()
        assert rule_of(space.twice.default) == "pointwise"
        assert idioms_of(space.twice.default) == STREAM
        assert rule_of(space.total.default) == "reduction"
        assert idioms_of(space.total.default) == REDUCTION
        assert rule_of(space.part.default) == "view"


def _first(packet: Any) -> Any:
    return getattr(packet, packet.overloads()[0])


def test_published_rows_are_kept_but_for_views_and_streams_in_place() -> None:
    ours = {name: idioms_of(_first(getattr(aten, name))) for name in PUBLISHED}
    differing = {name for name, row in PUBLISHED.items() if tuple(ours[name]) != row}
    assert differing == {"transpose", "relu_", "add_"}


def test_every_row_and_every_name_of_a_list_decides_for_an_operator() -> None:
    """A misspelt one, or one behind a rule that comes first, would silently cover nothing."""
    by_rule: dict[str, set[str]] = {}
    for func in [*_spaces(), *_registered("profiler")]:
        by_rule.setdefault(base_name(func), set()).update(rule_of(func).split(":"))
    assert {name for name in ROWS if "row" not in by_rule.get(name, ())} == set()
    assert {name for name in SYNONYMS if "synonym" not in by_rule.get(name, ())} == set()
    assert {name for name in METADATA if "metadata" not in by_rule.get(name, ())} == set()
    assert {name for name in RESHAPING if "copy" not in by_rule.get(name, ())} == set()


def test_what_the_compiler_adds_for_itself_is_left_out() -> None:
    before = [func.name() for func in _registered("prims")]
    importlib.import_module("torch._inductor.inductor_prims")
    assert [func.name() for func in _registered("prims")] == before
    assert "prims::inductor_random" not in before


def test_all_of_torch_is_covered() -> None:
    assert len(_registered()) > 3000
    for space in ("aten", "prims", "mkldnn", "profiler"):
        assert [str(func) for func in _registered(space) if not is_known(func)] == [], space
