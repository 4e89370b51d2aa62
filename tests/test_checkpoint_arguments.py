"""Arguments of checkpoints in the wrong order, as `Session.load` takes the directory first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

import dynoffload
from dynoffload.errors import ConfigError


@pytest.mark.parametrize("call", [dynoffload.save_checkpoint, dynoffload.load_checkpoint])
def test_the_directory_comes_last(call: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"\(model, optimizer, directory\).* not str and Linear"):
        call(str(tmp_path / "run"), model, optimizer)
    assert not list(tmp_path.iterdir())
