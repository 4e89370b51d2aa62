"""Units: the modules that the runtime watches, which own paged parameters.

A *unit* is a module that directly owns paged parameters; its forward is one use of its regions.
Other modules move nothing and are not watched. Each slice of fused parameters is a unit of its own
(`dynoffload.profiler.experts`); which slices a forward uses is known only when it reaches them.
Modules with small submodules are one unit with these (`dynoffload.planning.small_modules`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dynoffload.distributed.sharded import Group
from dynoffload.memory.local import local_bytes
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.planning.small_modules import nests
from dynoffload.profiler.experts import unit_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.runtime.adoption.slots import Fused, Slot


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that owns paged parameters.

    Attributes:
        index: position in the session's list of units.
        path: the module's path in the model; "" is the root.
        module: the module.
        slots: its paged parameters, all slices of flat ones, or one slice of each fused parameter.
        number: index of the slices, or None.
        beside: of slices, the parameters of the module that are paged whole.
        gathers: whether a hook of the module reads its parameters before anything in it runs; see
            `dynoffload.distributed.sharded`.
        members: paths of the modules that own its parameters.
    """

    index: int
    path: str
    module: nn.Module
    slots: tuple[Slot, ...]
    number: int | None = None
    beside: tuple[Slot, ...] = ()
    gathers: bool = False
    members: tuple[str, ...] = ()

    @property
    def regions(self) -> list[int]:
        """Return the regions of its parameters."""
        return [slot.region for slot in self.slots]


def units_of(
    model: nn.Module,
    slots: Mapping[nn.Parameter, Slot],
    fused: Mapping[nn.Parameter, Fused],
    groups: Sequence[Group] = (),
    small_bytes: int = 0,
    apart: Container[str] = (),
) -> list[Unit]:
    """Return the units of ``model`` in module order; each group of shards is one unit.

    Args:
        model: the root.
        slots: its parameters that are paged whole.
        fused: those that are paged by slices.
        groups: its groups of shards.
        small_bytes: most bytes of the parameters of modules that are one unit together.
        apart: paths of modules whose submodules run without them.
    """
    units: list[Unit] = []
    modules, nested = dict(model.named_modules()), nests(model) if small_bytes else {}
    inside: set[nn.Module] = set()  # modules of units begun above them
    gathered = {group.module: group for group in groups}
    shards = {parameter for group in groups for parameter in group.parameters}
    for path, module in modules.items():
        if module in inside:
            continue
        members = {one: modules[one]._parameters.values() for one in nested.get(path, ())}
        every = dict.fromkeys(p for own in members.values() for p in own if p is not None)
        together = tuple(slots[p] for p in every if p in slots)
        if (
            path not in apart
            and sum(any(p in slots for p in own) for own in members.values()) > 1
            and not any(p in fused or p in shards for p in every)
            and sum(local_bytes(slot.parameter) for slot in together) <= small_bytes
        ):
            paged = tuple(m for m, own in members.items() if any(p in slots for p in own))
            units.append(Unit(len(units), path, module, together, members=paged))
            inside.update(module.modules())
            continue
        group = gathered.get(module)
        if group is not None and (parts := [slots[p] for p in group.parameters if p in slots]):
            units.append(Unit(len(units), path, module, tuple(parts), gathers=True))
        own = [p for p in dict.fromkeys(module._parameters.values()) if p is not None]
        own = [p for p in own if p not in shards]
        whole = [slots[p] for p in own if p in slots]
        whole += [slot for p in own if p in fused and fused[p].is_flat for slot in fused[p].slots]
        if whole:
            units.append(Unit(len(units), path, module, tuple(whole), members=(path,)))
        sliced = [fused[p].slots for p in own if p in fused and not fused[p].is_flat]
        for number in range(max(map(len, sliced), default=0)):
            each_own = tuple(each[number] for each in sliced if number < len(each))
            name, beside = unit_path(path, number), tuple(whole)
            units.append(Unit(len(units), name, module, each_own, number, beside))
    return units


def vocabulary_of(network: str, units: Sequence[Unit]) -> Vocabulary:
    """Return a vocabulary with one block per unit."""
    blocks = tuple(
        Block(
            index=number,
            path=unit.path,
            variant="",
            visits=(unit.path,),
            nbytes=sum(local_bytes(p) for p in {slot.parameter for slot in unit.slots}),
            activation_bytes=0,
            idioms=Idioms(0, 0, 0, 0, 0, 0),
        )
        for number, unit in enumerate(units)
    )
    return Vocabulary(network, blocks)
