"""The idiom table: nothing that torch registers is unknown, and the published rows are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynoffload.experiments import idioms as experiment
from dynoffload.experiments.architectures import ARCHITECTURES, Architecture
from dynoffload.experiments.harness import carry_out
from dynoffload.profiler import Idioms, idioms_of, is_known, rule_of
from dynoffload.profiler.idiom_rows import METADATA, REDUCTION, RESHAPING, ROWS, SHARING, STREAM
from dynoffload.profiler.idioms import base_name

aten = torch.ops.aten

PUBLISHED = {
    (1, 0, 0, 0, 0, 0): "transpose",
    (0, 0, 0, 0, 1, 0): "maximum elu dropout",
    (0, 1, 0, 0, 0, 0): "relu_ add_ nll_loss_backward",
    (0, 0, 0, 0, 0, 0): "cat clone diag",
    (0, 1, 0, 1, 1, 2): "convolution",
    (1, 1, 0, 1, 1, 2): "conv_tbc conv_transpose1d",
    (1, 1, 0, 1, 2, 2): "conv_transpose2d conv_transpose3d",
    (0, 1, 0, 1, 2, 2): "cudnn_convolution",
    (0, 1, 0, 1, 3, 2): "cudnn_convolution_relu",
    (0, 1, 0, 2, 3, 2): "cudnn_convolution_add_relu",
    (0, 1, 1, 1, 1, 0): (
        "cudnn_batch_norm embedding_backward mse_loss_backward fbgemm_linear_int8_weight"
    ),
    (0, 0, 0, 1, 0, 1): "avg_pool1d adaptive_max_pool1d max_pool3d",
    (0, 0, 0, 1, 0, 0): "max_pool1d max_pool2d",
    (0, 1, 1, 1, 0, 0): "gather_backward",
    (0, 0, 0, 1, 1, 0): "gelu_backward silu_backward sigmoid_backward tanh_backward",
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
        aten._to_sparse.default: "layout",
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


def test_published_rows_are_kept_but_for_views_and_streams_in_place() -> None:
    printed = {name: row for row, names in PUBLISHED.items() for name in names.split()}
    packets = {name: getattr(aten, name) for name in printed}
    ours = {name: idioms_of(getattr(p, p.overloads()[0])) for name, p in packets.items()}
    differing = {name for name, row in printed.items() if tuple(ours[name]) != row}
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


@pytest.mark.slow
def test_each_operator_of_every_architecture_is_known() -> None:
    """Forward, backward and AdamW; at least forty architectures."""
    pytest.importorskip("transformers")
    result = carry_out(experiment.Idioms, experiment.Params())
    found = result["summary"]
    assert [row["architecture"] for row in result["rows"]] == list(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 40
    assert all(row["steps"] == 2 for row in result["rows"])
    assert found["unknown"] == {}
    assert sum(found["rules"].values()) == len(found["operator_rules"]) > 150


def test_an_unknown_operator_is_told_with_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a network that runs an operator of a stranger."""
    with torch.library._scoped_library("dynoffload_test", "FRAGMENT") as library:
        library.define("mystery(Tensor a) -> Tensor")
        library.impl("mystery", torch.neg, "CompositeExplicitAutograd")

        class Strange(torch.nn.Linear):
            config = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y - torch.ops.dynoffload_test.mystery(y.detach())

        strange = Architecture("", lambda g, c: {"x": torch.ones(2, 3)}, loss=torch.sum)
        monkeypatch.setattr(Architecture, "build", lambda self: Strange(3, 2))
        monkeypatch.setitem(ARCHITECTURES, "strange", strange)
        found = carry_out(experiment.Idioms, experiment.Params(architectures=("strange",)))[
            "summary"
        ]
    assert found["unknown"] == {"dynoffload_test.mystery.default": ["strange"]}
    assert found["rules"]["unknown"] == 1
