"""Blocks: the units of prediction and of migration.

A block is one call of a module whose control flow does not depend on the sample. It is named by the
module's path and, if one sample calls the module with several shapes (a cell per tree node, for
example), by the shapes of its arguments, its *variant*. `cutting` finds the blocks of a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynoffload.errors import PilotError
from dynoffload.planning.calls import CallSummary
from dynoffload.profiler.idioms import Idioms

UNSEEN = -1
"""The number of a call that matches no block."""
NO_SHAPES = "()"
"""The variant of calls without tensors, if other calls of the module have some."""
_FORMAT = "dynoffload-vocabulary"
_VERSION = 1
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
            "format": _FORMAT,
            "version": _VERSION,
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
        document = _mapping(data, "the vocabulary")
        if document.get("format") != _FORMAT or document.get("version") != _VERSION:
            raise PilotError(
                f"not a vocabulary that this release reads: format {document.get('format')!r}, "
                f"version {document.get('version')!r}; train the pilot anew with this release"
            )
        blocks = document.get("blocks")
        if not isinstance(blocks, list) or len(blocks) > _MAX_BLOCKS:
            raise PilotError("the vocabulary's blocks are not a list of at most a million")
        return cls(
            network=_text(document, "network"),
            blocks=tuple(_block(index, entry) for index, entry in enumerate(blocks)),
            repeated=frozenset(_texts(document, "repeated")),
        )


def _block(index: int, data: object) -> Block:
    entry = _mapping(data, f"block {index}")
    idioms = entry.get("idioms")
    if not isinstance(idioms, list) or len(idioms) != len(Idioms._fields):
        raise PilotError(f"block {index} has no six idiom counts")
    return Block(
        index=index,
        path=_text(entry, "path"),
        variant=_text(entry, "variant"),
        visits=_texts(entry, "visits"),
        nbytes=_count(entry.get("nbytes"), "nbytes"),
        activation_bytes=_count(entry.get("activation_bytes"), "activation_bytes"),
        idioms=Idioms(*(_count(count, "idioms") for count in idioms)),
    )


def _mapping(data: object, what: str) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise PilotError(f"{what} is not an object but {type(data).__name__}")
    return data


def _text(entry: Mapping[str, object], key: str) -> str:
    return _checked_text(entry.get(key), key)


def _texts(entry: Mapping[str, object], key: str) -> tuple[str, ...]:
    texts = entry.get(key)
    if not isinstance(texts, list):
        raise PilotError(f"vocabulary: {key} is not a list of texts")
    return tuple(_checked_text(text, key) for text in texts)


def _checked_text(text: object, key: str) -> str:
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise PilotError(f"vocabulary: {key} is not a text of at most {_MAX_TEXT} characters")
    return text


def _count(count: object, key: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
        raise PilotError(f"vocabulary: {key} is {count!r}, not a count from 0 on")
    return count
