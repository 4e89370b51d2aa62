"""The idiom table: nothing that torch registers is unknown, and the published rows are kept."""

from __future__ import annotations

from typing import Any

import torch

from dynoffload.profiler import Idioms, idioms_of, is_known, rule_of
from dynoffload.profiler.idiom_rows import METADATA, REDUCTION, RESHAPING, ROWS, SHARING, STREAM
from dynoffload.profiler.idioms import base_name

aten = torch.ops.aten

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


def _registered() -> list[Any]:
    """Return every overload that torch's dispatcher has of dense operators, but for those that
    torch's own tests use and those that Python code adds."""
    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if space in ("aten", "mkldnn", "profiler") and not base.startswith(("_test_", "_foobar")):
            func = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
            if not func._defined_in_python:
                found.append(func)
    return found


def test_what_the_schema_calls_a_view_counts_nothing_and_nothing_else_is_a_view() -> None:
    """A view's schema aliases an argument without writing it, or torch tags it as one in place.

    But for a short list, whose results share memory although the schema does not say so.
    """
    silent = set()
    for func in _registered():
        declared = func.is_view or torch.Tag.inplace_view in func.tags
        assert not declared or rule_of(func) == "view", func
        if rule_of(func) == "view":
            assert idioms_of(func) == Idioms(), func
            if not declared:
                silent.add(base_name(func))
    assert silent == SHARING


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
        aten.einsum.default: "composite",
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
    for func in _registered():
        by_rule.setdefault(base_name(func), set()).update(rule_of(func).split(":"))
    assert {name for name in ROWS if "row" not in by_rule.get(name, ())} == set()
    assert {name for name in METADATA if "metadata" not in by_rule.get(name, ())} == set()
    assert {name for name in RESHAPING if "copy" not in by_rule.get(name, ())} == set()


def test_all_of_torch_is_covered() -> None:
    registered = _registered()
    assert len(registered) > 3000
    assert [str(func) for func in registered if not is_known(func)] == []
