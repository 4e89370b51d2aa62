"""The errors a user can meet: one base, and the public names."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import SMALL, filled, needs_pager, opened, schedule, uses_of

import dynoffload
from dynoffload import errors
from dynoffload.errors import BudgetError
from dynoffload.memory.pager import Pager
from dynoffload.profiler.costs import CostModel
from dynoffload.profiler.storage import load_trace
from dynoffload.simulation.machine import load_machines
from dynoffload.telemetry import RunLog


def test_every_error_is_of_one_base_and_public() -> None:
    kinds = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception)
    }
    assert all(issubclass(kind, errors.DynOffloadError) for kind in kinds.values())
    assert all(getattr(dynoffload, name) is kind for name, kind in kinds.items())
    assert kinds.keys() <= set(dynoffload.__all__)


@pytest.mark.parametrize("kind", ["SpillError", "CorruptionError", "CheckpointError"])
def test_an_error_of_a_file_reads_as_its_words(kind: str) -> None:
    """Python puts ``[Errno 28]`` before the words of an `OSError` that has a number."""
    error = getattr(errors, kind)(errno.ENOSPC, "the disk is full: free space there")
    assert str(error) == "the disk is full: free space there"
    assert error.errno == errno.ENOSPC
    assert str(getattr(errors, kind)("without a number")) == "without a number"


def _unreadable(path: Path) -> dict[str, Callable[[], object]]:
    model = torch.nn.Linear(2, 2)
    return {
        "checkpoint": lambda: dynoffload.load_checkpoint(model, None, path),
        "weights": lambda: dynoffload.materialize(model, path),
        "pilot": lambda: dynoffload.Pilot.load(path),
        "trace": lambda: load_trace(path),
        "run log": lambda: RunLog.load(path),
        "machine": lambda: load_machines(path),
        "costs": lambda: CostModel.load(path),
    }


@pytest.mark.parametrize("what", list(_unreadable(Path())))
def test_a_file_that_is_not_there_is_named_in_words(what: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(dynoffload.DynOffloadError) as told:
        _unreadable(missing)[what]()
    text = str(told.value)
    assert text.count(str(missing)) == 1
    assert "Errno" not in text


@needs_pager
@pytest.mark.parametrize("call", ["pager_create", "pager_plan"])
def test_no_memory_for_its_books_is_an_error_of_ours(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: errno.ENOMEM) if name == call else getattr(native, name)

    with opened("pager", 8 * SMALL, SMALL, tmp_path) as device:
        assert isinstance(device, Pager)
        native = device._native
        with monkeypatch.context() as patch:
            patch.setattr(device, "_native", NoMemory())
            with pytest.raises(
                BudgetError, match=r"bookkeeping of .*: end other programs"
            ) as caught:
                device.follow(uses_of(device.allocate(SMALL)), schedule())
            assert isinstance(caught.value, MemoryError)
        filled(device, [device.allocate(SMALL)])  # it lives on
