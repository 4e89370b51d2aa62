"""Tests on a torch backend of our own, in processes of their own: it is their only accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `accelerator`
