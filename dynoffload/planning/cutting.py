"""Cuts a network into blocks: sample-independent in their control flow, and small enough to move.

`build_vocabulary` finds the *atomic* modules of a network in the call summaries of its samples,
and makes their calls the blocks.

[Note: Atomic]
The summary of a call is the sequence of modules with parameters that it runs. A module is atomic if

* all its calls have one summary or, if one sample calls it with several shapes, all calls of each
  variant have one. A variant is the shape key of the call. Of more than `MAX_VARIANTS` the rarest
  share the variant ``""``, which also covers shapes that no sample had. Shapes that differ only
  between samples are not variants;
* its regions (parameters, gradients, optimizer state, buffers) fit in an eighth of the budget, so
  that a block can compute while the next ones are fetched. They may take half of it if one forward
  calls the module many times, as the next block then most likely uses the same regions;
* it is not the root.

Blocks are the calls of the highest atomic modules. So a mixture of experts is never one block if
some sample skipped an expert, since its summaries differ. A module that is not atomic but has
parameters of its own gets a block for those alone. So does a module without inner modules, however
large, since it cannot be cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from dynoffload.errors import PilotError
from dynoffload.planning.blocks import NO_SHAPES, Block, Vocabulary
from dynoffload.planning.calls import CallSummary
from dynoffload.profiler.idioms import Idioms

MAX_VARIANTS = 16
"""The most variants of one module that are distinguished."""
BUDGET_SHARE = 8
"""A block's regions must fit in the budget divided by this, ..."""
LOOP_SHARE = 2
"""... or by this if one forward calls the module many times."""

_Outline = tuple[str, ...]


@dataclass
class _Module:
    """Statistics of the calls of one module over all samples."""

    keys: Counter[str] = field(default_factory=Counter)
    """shape key -> number of calls"""
    summaries: dict[str, set[_Outline]] = field(default_factory=lambda: defaultdict(set))
    """shape key -> the summaries its calls had"""
    inner: set[str] = field(default_factory=set)
    """modules with parameters that some call ran, itself included"""
    repeated: bool = False
    """whether one forward called it more than once"""
    mixed: bool = False
    """whether one forward called it with several shape keys"""

    @property
    def share(self) -> int:
        """The divisor of the budget that gives the limit of its size."""
        return LOOP_SHARE if self.repeated else BUDGET_SHARE

    def variants(self) -> dict[str, str]:
        """Return the variant of each shape key."""
        if not self.mixed:
            return dict.fromkeys(self.keys, "")
        ranked = sorted(self.keys, key=lambda key: (-self.keys[key], key))
        apart = len(ranked) if len(ranked) <= MAX_VARIANTS else MAX_VARIANTS - 1
        return {key: (key or NO_SHAPES) if rank < apart else "" for rank, key in enumerate(ranked)}

    def decides_nothing(self) -> bool:
        """Return whether all calls of each variant have one summary."""
        by_variant: dict[str, set[_Outline]] = defaultdict(set)
        for key, variant in self.variants().items():
            by_variant[variant] |= self.summaries[key]
        return all(len(summaries) == 1 for summaries in by_variant.values())


@dataclass
class _Seen:
    """Statistics of the calls of one block."""

    visits: tuple[str, ...]
    activation_bytes: int = 0
    idioms: Counter[Idioms] = field(default_factory=Counter)


def build_vocabulary(summaries: Sequence[CallSummary], budget: int | None = None) -> Vocabulary:
    """Return the blocks of the network that ``summaries`` ran.

    Args:
        summaries: summaries of one or more samples of one network.
        budget: bytes of fast memory; None does not limit the blocks' size.

    Raises:
        PilotError: if there are no summaries, or they are of different networks.
    """
    if not summaries:
        raise PilotError("no programs to build a vocabulary from: profile some samples first")
    network = summaries[0].network
    for summary in summaries:
        if summary.network != network:
            raise PilotError(
                f"programs of two networks, {network[:12]} and {summary.network[:12]} "
                f"(source {summary.source!r}, step {summary.step}): give traces of one"
            )
    modules = _modules(summaries)
    sizes, owned = _regions(summaries)
    atomic = {
        path
        for path, module in modules.items()
        if path
        and module.inner
        and module.decides_nothing()
        and (budget is None or _bytes(module.inner, owned, sizes) <= budget // module.share)
    }
    variants = {path: module.variants() for path, module in modules.items()}
    seen: dict[tuple[str, str], _Seen] = {}
    for summary in summaries:
        _count_calls(summary, atomic, variants, seen)
    _add_unseen_shapes(seen, modules)
    blocks = []
    for index, ((path, variant), block) in enumerate(seen.items()):
        blocks.append(
            Block(
                index=index,
                path=path,
                variant=variant,
                visits=block.visits,
                nbytes=_bytes(block.visits, owned, sizes),
                activation_bytes=block.activation_bytes,
                idioms=block.idioms.most_common(1)[0][0],
            )
        )
    repeated = {path for path, _ in seen if modules[path].mixed}
    return Vocabulary(network, tuple(blocks), frozenset(repeated))


def _add_unseen_shapes(seen: dict[tuple[str, str], _Seen], modules: Mapping[str, _Module]) -> None:
    """Add a block for unseen shapes of each module whose calls of all seen shapes visit the same
    modules: such a call is assumed to use the same regions."""
    by_path: dict[str, list[_Seen]] = defaultdict(list)
    for path, variant in seen:
        if modules[path].mixed and (path, "") not in seen:
            by_path[path].append(seen[path, variant])
    for path, known in by_path.items():
        if len({block.visits for block in known}) > 1:
            continue
        seen[path, ""] = _Seen(
            known[0].visits,
            max(block.activation_bytes for block in known),
            sum((block.idioms for block in known), Counter()),
        )


def _modules(summaries: Iterable[CallSummary]) -> dict[str, _Module]:
    """Gather the statistics of each module's calls."""
    modules: dict[str, _Module] = {}
    for summary in summaries:
        times: Counter[tuple[int, str]] = Counter()
        shapes: dict[tuple[int, str], str] = {}
        roots: list[int] = []
        calls = zip(summary.paths, summary.keys, summary.parents, summary.ran(), strict=True)
        for index, (path, key, parent, ran) in enumerate(calls):
            roots.append(index if parent < 0 else roots[parent])
            times[roots[-1], path] += 1
            module = modules.setdefault(path, _Module())
            module.mixed |= shapes.setdefault((roots[-1], path), key) != key
            module.keys[key] += 1
            module.summaries[key].add(ran)
            module.inner.update(ran)
        for (_, path), called in times.items():
            modules[path].repeated |= called > 1
    return modules


def _regions(summaries: Iterable[CallSummary]) -> tuple[dict[str, int], dict[str, dict[str, None]]]:
    """Return the largest size of each region, and the regions of each module with parameters.

    A module's regions are its parameters with their gradients and state, and those its visits used:
    buffers and tied parameters of other modules.
    """
    numbers: dict[str, int] = defaultdict(count().__next__)  # of names, shared by all summaries
    largest = np.zeros(0, dtype=np.int64)
    pairs: set[int] = set()
    owned: dict[str, dict[str, None]] = defaultdict(dict)
    for summary in summaries:
        names = summary.names
        alike = np.array([numbers[name] for name in names], dtype=np.int64)
        largest = np.append(largest, np.full(len(numbers) - len(largest), -1))
        np.maximum.at(largest, alike[summary.region], summary.region_bytes)
        pair_codes = (alike[summary.owned] @ np.array([2**32, 1])).tolist()
        if pairs.issuperset(pair_codes):
            continue
        pairs.update(pair_codes)
        for path, region in summary.owned.tolist():
            owned[names[path]][names[region]] = None
    sizes = zip(numbers, largest.tolist(), strict=True)
    return {name: nbytes for name, nbytes in sizes if nbytes >= 0}, owned


def _bytes(
    paths: Iterable[str], owned: Mapping[str, Mapping[str, None]], sizes: Mapping[str, int]
) -> int:
    """Return the bytes of all regions of some modules."""
    return sum(sizes[name] for name in {name for path in paths for name in owned.get(path, ())})


def _count_calls(
    summary: CallSummary,
    atomic: set[str],
    variants: Mapping[str, Mapping[str, str]],
    seen: dict[tuple[str, str], _Seen],
) -> None:
    """Add the calls of one sample to the statistics of the blocks."""
    owners, paths, keys = summary.owner_paths, summary.paths, summary.keys
    costs = np.column_stack([summary.call_activations, summary.call_idioms]).astype(np.float64)
    opened: dict[int, _Seen] = {}
    inside: list[int] = []  # the call whose block each call's cost counts for, or -1
    opener: list[int] = []  # the call that opened the atomic block around this one, or -1
    for index, (ran, parent) in enumerate(zip(summary.ran(), summary.parents, strict=True)):
        within = opener[parent] if parent >= 0 else -1
        path = paths[index]
        if within < 0 and ran and (path in atomic or path in owners):
            whole = path in atomic
            key = (path, variants[path][keys[index]])
            opened[index] = seen.setdefault(key, _Seen(ran if whole else (path,)))
            inside.append(index)
            opener.append(index if whole else -1)
            continue
        opener.append(within)
        inside.append(within)
    totals = np.zeros_like(costs)
    counted = np.flatnonzero(np.array(inside, dtype=np.int64) >= 0)
    np.add.at(totals, np.array(inside, dtype=np.int64)[counted], costs[counted])
    for index, block in opened.items():
        activations, *idioms = map(int, totals[index].tolist())
        block.activation_bytes = max(block.activation_bytes, activations)
        block.idioms[Idioms(*idioms)] += 1
