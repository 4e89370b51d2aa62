"""Mixtures of experts: `register` offers transformers an implementation whose experts are paged.

What it is: the name under which users find it. transformers is imported only when it is called.
"""

from __future__ import annotations

from dynoffload.runtime.experts.calls import register

__all__ = ["register"]
