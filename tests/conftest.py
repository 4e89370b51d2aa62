"""The rules of this folder: a test marked ``alone`` never runs beside another, ``long.txt`` names
what is left to ``make slow``, and no test may leave a dispatch mode behind. Tests in ``backend``
run in processes of their own, as they make an accelerator for all of a process.

The repository's top level holds a folder named ``datasets``. With the root on ``sys.path``,
transformers would take it for Hugging Face's package, so the root leaves the path, here and in
every child process.
"""

from __future__ import annotations

import fnmatch
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _is_root(entry: str) -> bool:
    """Return whether a path entry means the repository's root; an empty one means here."""
    return Path(entry or os.curdir).resolve() == ROOT


def _leave_root() -> None:
    """Take the root off the path of this process and of its children."""
    sys.path[:] = [entry for entry in sys.path if not _is_root(entry)]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in inherited if entry and not _is_root(entry)]
    os.environ.pop("PYTHONPATH", None)
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.environ["PYTHONSAFEPATH"] = "1"


if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, or never
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile what the others have
sys.dont_write_bytecode = False
gc.disable()  # until all is imported: nothing of that is garbage
_leave_root()
importlib.invalidate_caches()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave ``backend`` out, unless it is asked for."""
    asked = any("backend" in Path(argument).parts for argument in config.args)
    return True if collection_path.name == "backend" and not asked else None


def pytest_sessionstart() -> None:
    """Let no comparison meet a kernel that several threads choose at once, and put temporary files
    on a disk, as spill files have to be."""
    numerics = importlib.import_module("dynoffload.numerics")
    numerics.settle_kernels()
    spill = importlib.import_module("dynoffload.memory.spill")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(spill.default_spill_dir()))


def _mark_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that ``long.txt`` names as slow, and refuse a line that names none."""
    if "accelerator" in sys.modules:  # of `backend`, where cases have other names
        return
    tests = {item.nodeid.removeprefix("tests/"): item for item in items}
    files = {name.partition("::")[0] for name in tests}
    for line in (Path(__file__).parent / "long.txt").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        found = [name for name in tests if fnmatch.fnmatchcase(name, pattern)]
        for name in found:
            tests[name].add_marker(pytest.mark.slow)
        whole = not any("::" in argument for argument in config.args)
        if not found and whole and pattern.partition("::")[0] in files:
            raise pytest.UsageError(f"tests/long.txt names {pattern}, and there is no such test")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is long; in one of several test processes, skip the tests that measure."""
    _mark_long(config, items)
    if not hasattr(config, "workerinput"):
        return
    skip = pytest.mark.skip(reason="marked alone: it measures, so run it without -n")
    for item in items:
        if item.get_closest_marker("alone") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: many tests collect, and that would take most
    of their time. What tests make is collected as ever."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail the test that leaves a dispatch mode behind, and not one that runs after it."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(mode)
        _pop_mode()
    assert not left, f"dispatch modes were left behind: {left}"


def pytest_report_header() -> str:
    """Say which package is tested."""
    spec = importlib.util.find_spec("dynoffload")
    return f"dynoffload: {spec.origin if spec else 'not importable'}"
