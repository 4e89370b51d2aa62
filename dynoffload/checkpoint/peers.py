"""The processes that save or load one checkpoint together.

[Note: together]  A rank that raises in a step reports it to the others first, so none waits for a
rank that has left. If a rank dies, or never arrives, the process group's timeout ends the others'
wait; ``torch.distributed.init_process_group(timeout=...)`` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.distributed.replicas import has_part_of_experts
from dynoffload.distributed.sharded import groups_of
from dynoffload.errors import CheckpointError


class Peers:
    """Processes that do each step together: either all succeed, or all raise.

    Args:
        group: of `torch.distributed`; None: this process alone.
        compares: whether a save first compares state that ranks share, because only the user's
            loop keeps it equal.

    Attributes:
        rank: of this process.
        world: the number of processes.
        compares: as given.
    """

    rank, world = 0, 1

    def __init__(self, group: Any = None, *, compares: bool = False) -> None:
        self._group, self.compares = group, compares
        if group is not None:
            self.rank = torch.distributed.get_rank(group)
            self.world = torch.distributed.get_world_size(group)

    @property
    def first(self) -> bool:
        """Whether this process writes the state that all share."""
        return self.rank == 0

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every process and gather the results; see [Note: together].

        Returns:
            The result of each rank.

        Raises:
            CheckpointError: another rank failed, or does not answer.
            BaseException: what ``work`` raised in this process.
        """
        if self._group is None:
            return [work()]
        own_error: BaseException | None = None
        value: Any = None
        try:
            value = work()
        except BaseException as error:
            own_error = error
        failure = None if own_error is None else f"{own_error}" or type(own_error).__name__
        everyone: list[Any] = [None] * self.world
        try:
            torch.distributed.all_gather_object(everyone, (value, failure), group=self._group)
        except Exception as error:
            if own_error is not None:
                raise own_error from None
            raise CheckpointError(
                f"rank {self.rank} of {self.world} waits for the other ranks, which do not answer "
                f"({error}): all have to save, or to load, together; see which of them has ended"
            ) from error
        if own_error is not None:
            raise own_error
        for rank, (_, failure) in enumerate(everyone):
            if failure is not None:
                raise CheckpointError(
                    f"rank {rank} of {self.world} has failed, and so have all: {failure}"
                )
        return [value for value, _ in everyone]

    def check(self, directory: str | os.PathLike[str]) -> None:
        """Check that all ranks name the same directory; collective.

        Raises:
            CheckpointError: two differ; names both.
        """
        named = self.share(lambda: os.path.realpath(os.fspath(directory)))
        for rank, path in enumerate(named):
            if path != named[0]:
                raise CheckpointError(
                    f"ranks 0 and {rank} name two directories, {named[0]} and {path}: a checkpoint "
                    "is one for all ranks, so give all the same, and the same again when they "
                    "load; nothing was touched"
                )


def peers_of(model: nn.Module, wrappers: Iterable[nn.Module] = ()) -> Peers:
    """Return the processes that hold parts or replicas of ``model``.

    Args:
        model: the model itself.
        wrappers: modules among which its `DistributedDataParallel` may be.

    Raises:
        CheckpointError: its parts are distributed over different sets of processes.
    """
    groups = groups_of(model)
    if has_part_of_experts(model):
        if groups:
            raise CheckpointError(
                f"this {type(model).__name__} has shards of fully_shard and experts that are other "
                "ones on each rank, which no checkpoint holds together"
            )
        world = torch.distributed.group.WORLD  # includes groups that hold the same experts
        return Peers(world, compares=True)
    if not groups:
        return _of_replicas(model, wrappers)
    meshes = {id(one.mesh_info.mesh): one.mesh_info.mesh for group in groups for one in group.own}
    sets = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes.values()}
    if len(sets) > 1:
        raise CheckpointError(
            f"the shards of this {type(model).__name__} lie in {len(sets)} different sets of "
            "ranks: a checkpoint holds those of one mesh; shard all modules over the same"
        )
    mesh = next(iter(meshes.values()))
    if mesh.ndim == 1:
        return Peers(mesh.get_group())
    if mesh.size() != torch.distributed.get_world_size():
        raise CheckpointError(
            f"the shards of this {type(model).__name__} lie in {mesh.size()} of "
            f"{torch.distributed.get_world_size()} ranks on a mesh of {mesh.ndim} dimensions: a "
            "checkpoint takes one dimension, or all ranks"
        )
    return Peers(torch.distributed.group.WORLD)


def _of_replicas(model: nn.Module, wrappers: Iterable[nn.Module]) -> Peers:
    """Return the processes of a model that `DistributedDataParallel` wraps in whole or in part.
    Parameters outside the wrapped parts must be equal on all ranks, and are compared."""
    inner = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    for wrapper in wrappers if not inner else ():
        if isinstance(wrapper, DistributedDataParallel) and wrapper.module is model:
            return Peers(wrapper.process_group)
    if not inner:
        return Peers()
    reduced = {id(parameter) for one in inner for parameter in one._module_parameters}
    groups = [one.process_group for one in inner]
    members = {tuple(torch.distributed.get_process_group_ranks(one)) for one in groups}
    if len(members) == 1 and all(id(parameter) in reduced for parameter in model.parameters()):
        return Peers(groups[0])
    return Peers(torch.distributed.group.WORLD, compares=True)
