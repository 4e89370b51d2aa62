"""Tests on a torch backend of our own, in processes of their own: it is their only accelerator.

Of the hazards, the cases of accelerators run on it, but for those that ``left_out.txt`` names.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path

import exactness
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
try:
    import accelerator
except ImportError as error:
    WHY_NOT = str(error)
else:
    WHY_NOT = ""
    exactness.HOME = accelerator.DEVICE
torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects
IN_TIME = ("functional", "eval", "views")
"""The hazards of `make test`; the others are slow."""


def pytest_configure() -> None:
    """End without a test where the backend cannot be built."""
    if WHY_NOT:
        pytest.exit(f"tests on the backend are left out: {WHY_NOT}", returncode=0)


ALL = 400
"""So many cases are there only if all hazards are collected."""


def _left_out(names: list[str]) -> set[str]:
    """Return the names that the file leaves out; of all hazards, each of its patterns must name
    some."""
    lines = (HERE / "left_out.txt").read_text().splitlines()
    found: set[str] = set()
    for pattern in (line for line in lines if line and not line.startswith("#")):
        matching = fnmatch.filter(names, pattern)
        assert matching or len(names) < ALL, f"left_out.txt names {pattern}, and there is none"
        found.update(matching)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the hazards."""
    hazards = {item.nodeid.rpartition("tests/")[2]: item for item in items}
    hazards = {name: item for name, item in hazards.items() if name.startswith("test_hazard_")}
    out = _left_out(list(hazards))
    for name, item in hazards.items():
        if "torch" not in name or name in out:
            out.add(name)
        elif name.partition("::")[0][12:-3] not in IN_TIME:
            item.add_marker(pytest.mark.slow)
    chosen = [item for item in items if item.nodeid.rpartition("tests/")[2] not in out]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
