"""docs/idioms.md is what its command makes, and what it says of other operators is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.profiler import is_known
from dynoffload.profiler.idiom_page import page
from dynoffload.profiler.idiom_published import (
    PUBLISHED,
    STAND_IN_DIFFERENCES,
    STAND_INS,
    stand_in,
)
from dynoffload.profiler.idioms import base_name
from dynoffload.profiler.operator_sets import core, registered, with_formula

PAGE = Path(__file__).parents[1] / "docs" / "idioms.md"


def test_the_page_is_what_the_command_makes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = re.search(r"with torch ([\d.]*\d)\.", text)
    assert told is not None
    if told[1] != torch.__version__.partition("+")[0]:
        pytest.skip(f"docs/idioms.md is of torch {told[1]}, this is torch {torch.__version__}")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("docs/idioms.md is of a torch with oneDNN, whose operators this one lacks")
    remedy = "make it anew: python -m dynoffload.profiler.idiom_page > docs/idioms.md"
    assert page() == text, remedy


def test_the_page_names_every_operator() -> None:
    text = page()
    named = {name.partition(".")[0].removesuffix("_") for name in re.findall(r"`([\w.]+)`", text)}
    missing = {
        base_name(func)
        for func in [*core(), *with_formula(), *registered()]
        if base_name(func).removesuffix("_") not in named
    }
    assert missing == set()
    assert "### unknown" not in text
    assert all(is_known(func) for func in registered())


class _Collect(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, requires_grad=True)


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(_image(), 0.5, training=True),
    "conv_transpose1d": lambda: F.conv_transpose1d(_image()[0], _weight(8, 4, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(_image(), _weight(3, 4, 3, 3)),
    "conv_transpose3d": lambda: F.conv_transpose3d(_image()[None], _weight(2, 4, 3, 3, 3)),
    "avg_pool1d": lambda: F.avg_pool1d(_image()[0], 2),
    "adaptive_max_pool1d": lambda: F.adaptive_max_pool1d(_image()[0], 2),
    "max_pool1d": lambda: F.max_pool1d(_image()[0], 2),
    "max_pool2d": lambda: F.max_pool2d(_image(), 2),
    "max_pool3d": lambda: F.max_pool3d(_image()[None], 2),
    "gather_backward": lambda: _image().gather(3, torch.zeros(2, 3, 8, 2, dtype=torch.long)),
    "embedding_backward": lambda: F.embedding(torch.tensor([1, 2]), _weight(10, 4)),
    "prelu_backward": lambda: F.prelu(_image(), _weight(3)),
    "l1_loss_backward": lambda: F.l1_loss(_image(), torch.zeros(2, 3, 8, 8)),
    "col2im_backward": lambda: F.fold(_weight(1, 12, 9), (4, 4), 2),
    "im2col_backward": lambda: F.unfold(_image(), 3),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_what_is_said_to_run_instead_of_a_printed_operator_does(name: str) -> None:
    """And the printed operator itself does not."""
    collected = _Collect()
    with collected:
        CALLS[name]().sum().backward()
    assert set(STAND_INS[name]) <= set(collected.names)
    assert name not in collected.names


def test_each_difference_of_what_runs_instead_is_explained() -> None:
    differing = {name for name in STAND_INS if tuple(stand_in(name)) != PUBLISHED[name]}
    assert differing == set(STAND_IN_DIFFERENCES)
