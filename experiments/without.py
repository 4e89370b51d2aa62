"""Switches off one part of the runtime in this process, for the ablations.

The library has no such options: its methods are replaced, or its C pager is built once more with a
line changed. Losses stay those of plain training. What cannot be switched off:

- Moves of pages: what is not at its address cannot be computed with. Input and output without
  moves is the interference floor of `dynoffload.experiments.overhead`.
- Bytes of transfers: routers would follow wrong values, and steps would visit other experts.
- Hooks on saved tensors and gradients, without which neither would leave memory.
- Locks of pending updates: without them, an update is missed where a tensor is used unannounced.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method."""


def _in_memory(*_: Any) -> int:
    """Return the descriptor of a file that no disk holds."""
    return os.memfd_create("spill")


def _replace(where: str, **functions: Callable[..., Any]) -> None:
    """Replace functions of a module, or methods of a class."""
    owner = pkgutil.resolve_name(f"dynoffload.{where}")
    for name, function in functions.items():
        assert hasattr(owner, name), f"{where} has no {name}"
        setattr(owner, name, function)


def _rebuilt(file: str, line: str, other: str) -> None:
    """Build the pager with ``line`` of a source ``file`` replaced, and load it."""
    from dynoffload.memory import native_pager

    with tempfile.TemporaryDirectory() as folder:
        sources = Path(native_pager.__file__).with_name("native")
        copy = shutil.copytree(sources, Path(folder) / "native")
        text = (copy / file).read_text("utf-8")
        assert text.count(line) == 1, f"{file} has changed"
        (copy / file).write_text(text.replace(line, other), "utf-8")
        command = (
            "-O3 -std=gnu11 -pthread -fvisibility=hidden -shared -fPIC -o ../_pager.so".split()
        )
        files = [path.name for path in copy.glob("*.c")]
        subprocess.run([os.environ.get("CC", "cc"), *command, *files], cwd=copy, check=True)
        native_pager.load.cache_clear()
        with mock.patch.object(native_pager, "__file__", f"{folder}/native_pager.py"):
            native_pager.load()


WITHOUT: dict[str, Callable[[], None]] = {
    "guard": partial(_replace, "runtime.paging:Paging", _begin_guard=_nothing),
    "visits": partial(_replace, "runtime.stepping:Stepping", _visit=_nothing),
    "samples": partial(
        _replace, "runtime.recording:Recording", sample=_nothing, look_at_heap=_nothing
    ),
    "disk": partial(_replace, "memory.spill", _unnamed=_in_memory),
    "checks": partial(
        _rebuilt, "file.c", "write || file_sum(p, r, 0) == r->sum ? 0 : EBADMSG", "0"
    ),
    "comparison": partial(
        _rebuilt,
        "transfer.c",
        "int alike = r->has_copy && sum == r->sum, hashes = alike || r->same;",
        "int alike = 0, hashes = 0;",
    ),
}
"""Part by name -> switches it off, before a session begins."""
