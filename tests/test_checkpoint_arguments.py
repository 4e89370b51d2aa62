"""Arguments of checkpoints that are in the wrong order, or of another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import dynoffload
from dynoffload.errors import ConfigError


@pytest.mark.parametrize("call", [dynoffload.save_checkpoint, dynoffload.load_checkpoint])
def test_the_directory_comes_last(call: Callable[..., Any], tmp_path: Path) -> None:
    """Other than in `Session.load`."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"\(model, optimizer, directory\).* not str and Linear"):
        call(str(tmp_path / "run"), model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [dynoffload.save_checkpoint, dynoffload.load_checkpoint])
def test_what_else_is_saved_has_names(call: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    scheduler = StepLR(optimizer, 1)
    for extra in (scheduler, [scheduler], {0: scheduler}):
        with pytest.raises(
            ConfigError, match=r"as in extra=\{'scheduler': scheduler\}: pass such a"
        ):
            call(model, optimizer, tmp_path / "run", extra=extra)
    assert not list(tmp_path.iterdir())
