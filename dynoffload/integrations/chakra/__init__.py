"""Chakra: recorded steps as execution traces of MLCommons, which simulators of machines read.

What it is: `write_chakra`, which writes a trace, and if wanted the transfers of a schedule, in the
format of https://github.com/mlcommons/chakra. What it is not: a reader. Needs ``protobuf``, which
``pip install 'dynoffload[chakra]'`` brings.
"""

from __future__ import annotations

from dynoffload.integrations.chakra.writing import write_chakra

__all__ = ["write_chakra"]
