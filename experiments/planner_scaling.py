"""How long planning takes as steps grow.

What it is: `scaling`, processor time from a recorded step of so many operators to its plan. What it
is not: the quality of plans.
"""

from __future__ import annotations

from typing import Any


def scaling(operators: tuple[int, ...]) -> list[dict[str, Any]]:
    return []
