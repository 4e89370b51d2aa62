"""The processes that save or load one checkpoint together.

What it is: a step that all of them take, after which all go on or all raise (`Peers.share`), and
who they are for a model (`peers_of`). What it is not: what each does in a step.

[Note: together]  Whoever raises in a step tells the others before it leaves, so nobody waits for
one that is gone. A rank that dies, or never comes, ends the wait of the others by the timeout of
the process group; ``torch.distributed.init_process_group(timeout=...)`` sets it.

What they tell each other is JSON, so nothing is unpickled.

[Note: apart]  Where parameters lie beside a `DistributedDataParallel` inside of the model, those of
one name may be other ones on each rank, and nobody knows whether they are meant to be. No rank can
write for another: each has a checkpoint of its own, in a directory of its own. A common one would
hold what whoever was last has had. Beside experts that are spread over ranks all else is meant to
be alike, and is compared (`dynoffload.runtime.checkpoints.alike`).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.errors import CheckpointError
from dynoffload.runtime.ranks.replicas import has_part_of_experts
from dynoffload.runtime.ranks.sharded import groups_of


class Peers:
    """One process, which has no others.

    Attributes:
        rank: of this process.
        world: of how many.
    """

    rank, world = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process writes what all have alike."""
        return self.rank == 0

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """Do ``work``, which all do; see [Note: together].

        Returns:
            What each rank's has returned: values that JSON can say.

        Raises:
            CheckpointError: another rank's has failed, or it does not answer.
            BaseException: what ``work`` has raised here.
        """
        return [work()]

    def check(self, directory: str | os.PathLike[str]) -> None:
        """Refuse a directory that does not suit; all do so together.

        Raises:
            CheckpointError: several ranks name it that have checkpoints of their own, or some that
                have one in common do not.
        """


class Ranks(Peers):
    """Processes of one group.

    Args:
        group: of `torch.distributed`, whose backend takes tensors of the CPU.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.world = torch.distributed.get_world_size(group)

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """See `Peers.share`."""
        mine: BaseException | None = None
        said: dict[str, Any] = {}
        try:
            said = {"value": work()}
        except BaseException as error:
            mine = error
            said = {"error": f"{error}" or type(error).__name__}
        try:
            everyone = [json.loads(text) for text in self._exchange(json.dumps(said).encode())]
        except (RuntimeError, ValueError) as error:
            if mine is not None:
                raise mine from None
            raise CheckpointError(
                f"rank {self.rank} of {self.world} waits for the other ranks, which do not answer "
                f"({error}): all have to save, or to load, together; see which of them has ended"
            ) from error
        if mine is not None:
            raise mine
        for rank, other in enumerate(everyone):
            if "error" in other:
                raise CheckpointError(
                    f"rank {rank} of {self.world} has failed, and so have all: {other['error']}"
                )
        return [other["value"] for other in everyone]

    def check(self, directory: str | os.PathLike[str]) -> None:
        """See `Peers.check`."""
        named = self.share(lambda: os.path.realpath(os.fspath(directory)))
        for rank, path in enumerate(named):
            if path != named[0]:
                raise CheckpointError(
                    f"ranks 0 and {rank} name two directories, {named[0]} and {path}: a checkpoint "
                    "is one for all ranks, so give all the same, and the same again when they "
                    "load; nothing was touched"
                )

    def _exchange(self, data: bytes) -> list[bytes]:
        """Return what each rank has to say; a few bytes to some megabytes."""
        told = torch.tensor([len(data), zlib.crc32(data)])
        sizes = [torch.empty_like(told) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, told, group=self._group)
        most = max(int(one[0]) for one in sizes)
        mine = torch.zeros(most, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(texts, mine, group=self._group)
        found = [
            text[: int(size[0])].numpy().tobytes() for text, size in zip(texts, sizes, strict=True)
        ]
        for rank, (text, size) in enumerate(zip(found, sizes, strict=True)):
            if zlib.crc32(text) != int(size[1]):
                raise ValueError(f"what rank {rank} says has arrived damaged")
        return found


class Apart(Peers):
    """Processes that have a checkpoint each, and go on or raise together; see [Note: apart].

    Args:
        ranks: all of them.
        what: each has, for errors.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._ranks, self._what = ranks, what

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """Do ``work``, and return what it has returned here; see `Peers.share`."""
        return [self._ranks.share(work)[self._ranks.rank]]

    def check(self, directory: str | os.PathLike[str]) -> None:
        """See `Peers.check`."""
        named = self._ranks.share(lambda: os.path.realpath(os.fspath(directory)))
        for rank, path in enumerate(named):
            if (before := named.index(path)) != rank:
                raise CheckpointError(
                    f"ranks {before} and {rank} name one directory, {path}, for {self._what}: give "
                    "each rank a directory of its own, such as rank0, and the same again when it "
                    "loads"
                )


def peers_of(model: nn.Module, wrappers: Iterable[nn.Module] = ()) -> Peers:
    """Return the processes that have parts of ``model``, or replicas of it.

    Args:
        model: the model itself.
        wrappers: what may be its `DistributedDataParallel`.

    Raises:
        CheckpointError: its parts lie in different sets of processes.
    """
    groups = groups_of(model)
    if has_part_of_experts(model):
        if groups:
            raise CheckpointError(
                f"this {type(model).__name__} has shards of fully_shard and experts that are other "
                "ones on each rank, which no checkpoint holds together"
            )
        return Ranks(torch.distributed.group.WORLD)  # groups that hold the same experts, too
    inner = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if inner and not groups:
        return _of_inner(model, inner)
    if not groups:
        for wrapper in wrappers:
            if isinstance(wrapper, DistributedDataParallel) and wrapper.module is model:
                return Ranks(wrapper.process_group)
        return Peers()
    meshes = {id(one.mesh_info.mesh): one.mesh_info.mesh for group in groups for one in group.own}
    sets = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes.values()}
    if len(sets) > 1:
        raise CheckpointError(
            f"the shards of this {type(model).__name__} lie in {len(sets)} different sets of "
            "ranks: a checkpoint holds those of one mesh; shard all modules over the same"
        )
    mesh = next(iter(meshes.values()))
    if mesh.ndim == 1:
        return Ranks(mesh.get_group())
    if mesh.size() != torch.distributed.get_world_size():
        raise CheckpointError(
            f"the shards of this {type(model).__name__} lie in {mesh.size()} of "
            f"{torch.distributed.get_world_size()} ranks on a mesh of {mesh.ndim} dimensions: a "
            "checkpoint takes one dimension, or all ranks"
        )
    return Ranks(torch.distributed.group.WORLD)


def _of_inner(model: nn.Module, wrappers: list[DistributedDataParallel]) -> Peers:
    """Return the processes of a model with replicas inside: they have it alike if all of its
    parameters are of those; nobody knows of others."""
    alike = {id(parameter) for one in wrappers for parameter in one._module_parameters}
    same = all(id(parameter) in alike for parameter in model.parameters())
    groups = [one.process_group for one in wrappers]
    members = {tuple(torch.distributed.get_process_group_ranks(one)) for one in groups}
    if same and len(members) == 1:
        return Ranks(groups[0])
    what = (
        f"this {type(model).__name__}, which has parameters beside its DistributedDataParallel "
        "that may differ between ranks"
    )
    return Apart(Ranks(torch.distributed.group.WORLD), what)
