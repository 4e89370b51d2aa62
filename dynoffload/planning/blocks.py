"""Blocks: the units of prediction and of migration.

A block is one call of a module whose control flow does not depend on the sample. It is named by the
module's path and, if one sample calls the module with several shapes (a cell per tree node, for
example), by the shapes of its arguments, its *variant*. `cutting` finds the blocks of a network.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynoffload.errors import PilotError
from dynoffload.planning.calls import CallSummary
from dynoffload.profiler.idioms import Idioms

UNSEEN = -1
"""The number of a call that matches no block."""
NO_SHAPES = "()"
"""The variant of calls without tensors, if other calls of the module have some."""
_FORMAT = ("dynoffload-vocabulary", 1)
_MAX_BLOCKS = 1_000_000
_MAX_TEXT = 4096


@dataclass(frozen=True)
class Block:
    """Consecutive operators whose regions migrate together.

    Attributes:
        index: its number in the vocabulary.
        path: path of the module that is called.
        variant: shapes of the call, if they distinguish calls of this module; else ``""``.
        visits: paths of the modules with parameters that it runs, in order.
        nbytes: bytes of the parameters, gradients, optimizer state and buffers it uses.
        activation_bytes: most bytes of activations that one call leaves alive.
        idioms: sum of the idiom counts of its forward operators.
    """

    index: int
    path: str
    variant: str
    visits: tuple[str, ...]
    nbytes: int
    activation_bytes: int
    idioms: Idioms

    @property
    def name(self) -> str:
        """The block's display name: ``"layers.0.experts.3"`` or ``"cell[2x150]"``."""
        path = self.path or "(root)"
        return f"{path}[{self.variant}]" if self.variant else path


@dataclass(frozen=True)
class Vocabulary:
    """The blocks of one network, found in training samples.

    Attributes:
        network: fingerprint of the network.
        blocks: blocks by index, in the order in which they were first seen.
        repeated: paths of modules whose calls are distinguished by shape.
    """

    network: str
    blocks: tuple[Block, ...]
    repeated: frozenset[str] = frozenset()
    _indices: dict[tuple[str, str], int] = field(init=False, repr=False, compare=False)
    _within: dict[str, tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        indices = {(block.path, block.variant): block.index for block in self.blocks}
        if [block.index for block in self.blocks] != list(range(len(self.blocks))):
            raise PilotError("the blocks of a vocabulary are not numbered in order")
        if len(indices) != len(self.blocks):
            raise PilotError("a vocabulary names one block twice")
        object.__setattr__(self, "_indices", indices)

    def __len__(self) -> int:
        return len(self.blocks)

    def index_of(self, path: str, shape_key: str = "") -> int:
        """Return the block of a call of the module at ``path``, or `UNSEEN`.

        Args:
            path: the module's path.
            shape_key: shapes of the call (`dynoffload.profiler.shape_key`); only needed for paths
                in ``repeated``.
        """
        if path in self.repeated:
            found = self._indices.get((path, shape_key or NO_SHAPES))
            if found is not None:
                return found
        return self._indices.get((path, ""), UNSEEN)

    def within(self, path: str) -> tuple[int, ...]:
        """Return the block of the module at ``path``, or else those of the modules in it."""
        found = self._within.get(path)
        if found is None:
            own = self.index_of(path)
            found = (own,) if own >= 0 else self._below(f"{path}.")
            self._within[path] = found
        return found

    def _below(self, head: str) -> tuple[int, ...]:
        return tuple(block.index for block in self.blocks if block.path.startswith(head))

    def encode(self, summary: CallSummary) -> list[tuple[int, int]]:
        """Return the blocks that a forward ran, in order, each as ``(index of its call, block)``.

        Calls inside a block's call are part of it. The outermost call that uses parameters, but
        neither is nor contains a block, is `UNSEEN` as a whole. Calls that use no parameters are
        omitted.

        Raises:
            PilotError: if the summary is of another network.
        """
        if summary.network != self.network:
            raise PilotError(
                f"this vocabulary is of network {self.network[:12]}, the program of "
                f"{summary.network[:12]}: profile the network at hand and build it anew"
            )
        paths, parents, owners = summary.paths, summary.parents, summary.owner_paths
        found = [self.index_of(path, key) for path, key in zip(paths, summary.keys, strict=True)]
        runs = [path in owners for path in paths]  # whether it uses parameters, inner calls too
        known = [index >= 0 for index in found]  # whether it is or contains a block
        for place in range(len(found) - 1, -1, -1):
            parent = parents[place]
            if parent >= 0:
                runs[parent] |= runs[place]
                known[parent] |= known[place]
        inside: list[bool] = []
        order: list[tuple[int, int]] = []
        for place, (path, parent, index) in enumerate(zip(paths, parents, found, strict=True)):
            within = parent >= 0 and inside[parent]
            if not within and index >= 0:
                order.append((place, index))
                # A block of only the module's own parameters does not include its children.
                within = self.blocks[index].visits != (path,)
            elif not within and runs[place] and (not known[place] or path in owners):
                order.append((place, UNSEEN))
                within = not known[place]
            inside.append(within)
        return order

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary as plain JSON data."""
        return {
            "format": _FORMAT[0],
            "version": _FORMAT[1],
            "network": self.network,
            "repeated": sorted(self.repeated),
            "blocks": [
                {
                    "path": block.path,
                    "variant": block.variant,
                    "visits": list(block.visits),
                    "nbytes": block.nbytes,
                    "activation_bytes": block.activation_bytes,
                    "idioms": list(block.idioms),
                }
                for block in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, data: object) -> Vocabulary:
        """Return the vocabulary from what `to_json` returned.

        Raises:
            PilotError: if the data is not such a vocabulary; names the problem.
        """
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != _FORMAT:
            raise PilotError(
                "not a vocabulary that this release reads; train the pilot anew with this release"
            )
        return cls(
            network=_read(data, "network", _is_text),
            blocks=tuple(_block(*one) for one in enumerate(_read(data, "blocks", _is_list))),
            repeated=frozenset(_read(data, "repeated", _is_texts)),
        )


def _block(index: int, entry: Any) -> Block:
    """Return a block of a file that a stranger may have written."""
    idioms = _read(entry, "idioms", _is_list)
    if len(idioms) != len(Idioms._fields) or not all(map(_is_count, idioms)):
        raise PilotError(f"block {index} of the vocabulary has no six idiom counts")
    return Block(
        index=index,
        path=_read(entry, "path", _is_text),
        variant=_read(entry, "variant", _is_text),
        visits=tuple(_read(entry, "visits", _is_texts)),
        nbytes=_read(entry, "nbytes", _is_count),
        activation_bytes=_read(entry, "activation_bytes", _is_count),
        idioms=Idioms(*idioms),
    )


def _read(entry: Any, key: str, holds: Callable[[Any], bool]) -> Any:
    """Return what ``entry`` has by ``key``, if it is what it is to be."""
    value = entry.get(key) if isinstance(entry, dict) else entry
    if not holds(value):
        wanted = holds.__name__.removeprefix("_is_")
        raise PilotError(
            f"the vocabulary's {key} is {reprlib.repr(value)}, and no {wanted} within limits; "
            "train the pilot anew with this release"
        )
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_BLOCKS


def _is_texts(value: Any) -> bool:
    return _is_list(value) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
