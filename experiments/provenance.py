"""Provenance of a result: command, commit and machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dynoffload.version import __version__

_WRITTEN = "docs/results"


def provenance() -> dict[str, Any]:
    """Return ``command``, ``commit`` and ``machine`` of the running process."""
    return {
        "command": shlex.join(["dynoffload", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
    }


def commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` appended if tracked files have changed,
    except results, which experiments write.

    An installed package, which has no history, returns its version.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return __version__

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return None if done.returncode else done.stdout.strip()

    described = git("describe", "--always", "--abbrev=12", "--exclude=*")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{_WRITTEN}")
    if described is None or changed is None:
        return f"{__version__}-dirty"  # git failed, so the code is unknown
    return described + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """Return processor, cores, threads, memory in bytes, kernel, and the version of torch."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__.partition("+")[0],
    }
