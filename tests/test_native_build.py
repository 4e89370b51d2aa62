"""The pager is there wherever it can be: tests of it must not be left out for want of a build."""

from __future__ import annotations

import shutil
import sys

import pytest

from dynoffload.memory import native_pager
from dynoffload.memory.pager import probe


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="there is no C compiler here, or this is not Linux",
)
def test_the_pager_was_built_where_there_is_a_compiler() -> None:
    native_pager.load()
    assert probe() == "" or "UFFDIO_MOVE is refused here" in probe()
