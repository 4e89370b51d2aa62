"""Saving: from live tensors to a directory that is whole or not there.

Of several processes the first lays out the files and writes what all have in common; each writes
its own parts of what is spread over them where they belong. The files are those that one process
would have written. The first then writes the manifest, and puts the directory in its place.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint import files, manifest, randomness
from dynoffload.checkpoint.contents import (
    Kept,
    encode_optimizer,
    names_of,
    stateful_modules,
    tensors_of,
)
from dynoffload.checkpoint.extents import Extents, Held, agreed_extents, check_savable
from dynoffload.checkpoint.files import Shard
from dynoffload.checkpoint.manifest import File, Manifest
from dynoffload.checkpoint.peers import Peers, peers_of
from dynoffload.checkpoint.publishing import replacing, target_of
from dynoffload.checkpoint.replicated import check_replicated
from dynoffload.checkpoint.tensors import Memory
from dynoffload.checkpoint.values import encode
from dynoffload.distributed.sharded import reshard
from dynoffload.errors import CheckpointError, ConfigError, DynOffloadError
from dynoffload.memory.pieces import Buffer
from dynoffload.units import format_bytes, parse_bytes
from dynoffload.version import __version__

logger = logging.getLogger(__name__)

_SLACK = 65536  # bytes beyond content, for the directory
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def things_of(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``extra``, or an empty mapping for None.

    Raises:
        ConfigError: it does not give names to what it has.
    """
    if not isinstance(extra, Mapping | None) or not all(
        isinstance(name, str) for name in extra or ()
    ):
        raise ConfigError(
            f"extra names what else has a state, as in extra={{'scheduler': scheduler}}: pass such "
            f"a mapping, not {extra!r:.80}"
        )
    return extra or {}


def state_of(name: str, thing: Any) -> Any:
    """Return the state of something given as ``extra``.

    Raises:
        ConfigError: it has none.
    """
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        raise ConfigError(
            f"extra={{{name!r}: ...}} has no state_dict() and load_state_dict(), being of type "
            f"{type(thing).__name__}: pass a scheduler, a GradScaler, a torch.Generator, or an "
            "object with these two"
        )
    return thing.state_dict()


def save(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None,
    max_shard_size: int | str,
    memory: Memory,
    peers: Peers | None = None,
) -> None:
    """Save; see `dynoffload.save_checkpoint`. No update may be pending, on any of ``peers``,
    which are those of the model by default."""
    peers = peers_of(model) if peers is None else peers
    peers.check(directory)
    extents = agreed_extents(model, peers)
    random = peers.share(randomness.states)
    made: list[_Layout] = []

    def lay_out() -> tuple[int, Any]:
        layout = _laid_out(model, optimizer, directory, extra, max_shard_size, extents, random)
        made.append(layout)
        if not peers.first:
            del layout.sets["extra"]  # the first rank's are saved
        parts = (*layout.sets["model"], *layout.sets["optimizer"])
        return zlib.crc32(b"".join(shard.head for shard in parts)), layout.spans()

    found = peers.share(lay_out)
    layout = made[0]
    if len({heads for heads, _ in found}) > 1:
        raise CheckpointError(
            "the ranks have models, or optimizers, of other names, shapes or dtypes than each "
            "other: build them alike, and step them alike, before they save together"
        )
    if peers.compares:
        tensors = layout.held("model"), layout.held("optimizer")
        check_replicated(peers, layout.target, *tensors, layout.said.optimizer, memory)
    with contextlib.ExitStack() as stack:  # an error ends the new directory

        def begin() -> str | None:
            if not peers.first:
                return None
            layout.check_covered([spans for _, spans in found])
            new = stack.enter_context(replacing(layout.target, layout.need()))
            for shard in layout.shards():
                os.close(os.open(new / shard.file, _NEW, 0o666))
            return str(new)

        new = Path(peers.share(begin)[0])
        written = peers.share(lambda: _write(new, layout, memory, peers))[0]
        summed = peers.share(lambda: _summed(new, layout, peers))

        def end() -> None:
            if not peers.first:
                return
            checksums = {**written, **{k: v for one in summed for k, v in one.items()}}
            for shard in layout.shards():
                layout.said.files[shard.file] = File(shard.nbytes, checksums[shard.file])
            _finish(new, layout)
            stack.close()  # what is there by now takes the target's place

        peers.share(end)
    logger.info("saved checkpoint %s: %s", layout.target, format_bytes(layout.content()))


@dataclass
class _Layout:
    """What will be written: the first of several processes writes it all but their parts."""

    target: Path
    said: Manifest
    sets: dict[str, list[Shard]]

    def held(self, stem: str) -> dict[str, Held]:
        """Return the tensors of a set."""
        return {name: one for shard in self.sets[stem] for name, one in shard.tensors.items()}

    def shards(self) -> list[Shard]:
        """Return all files of tensors."""
        return [shard for parts in self.sets.values() for shard in parts]

    def spans(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return what this process is to write of each tensor that is spread."""
        return {
            (stem, name): held.span
            for stem in self.sets
            for name, held in self.held(stem).items()
            if held.span is not None
        }

    def check_covered(self, everyone: Sequence[Mapping[tuple[str, str], tuple[int, int]]]) -> None:
        """Refuse spans of all ranks that leave a gap in a tensor, or overlap.

        Raises:
            CheckpointError: naming the tensor.
        """
        for stem in self.sets:
            for name, held in self.held(stem).items():
                if held.extent is None:
                    continue
                if stem == "extra" and len(everyone) > 1:
                    raise CheckpointError(
                        f"tensor {name!r} is spread over processes, and of extra a checkpoint has "
                        "what the first rank has: keep it in the model, or as optimizer state"
                    )
                spans = sorted(one[stem, name] for one in everyone if (stem, name) in one)
                whole, end = held.extent.shape[held.extent.dim] if held.extent.shape else 1, 0
                for begin, stop in (*spans, (whole, whole)):
                    if begin != end:
                        raise CheckpointError(
                            f"rows {min(begin, end)} to {max(begin, end)} of {name!r} are on "
                            f"{'no rank' if end < begin else 'two ranks'} that saves: all ranks "
                            "that have parts of it save together, in groups of one size, and none "
                            "has parts of another's; what was saved there before is as it was"
                        )
                    end = stop

    def content(self) -> int:
        """Return the bytes of all files of tensors."""
        return sum(shard.nbytes for shard in self.shards())

    def need(self) -> int:
        """Return the bytes that will be written."""
        return self.content() + len(self.said.to_bytes()) + _SLACK


def _laid_out(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    max_shard_size: int | str,
    extents: Extents,
    random: Sequence[Mapping[str, Any]],
) -> _Layout:
    limit = parse_bytes(max_shard_size, "max_shard_size")
    if limit < 1:
        raise ConfigError(f"max_shard_size={max_shard_size!r} holds nothing: pass, say, '5GB'")
    extra = things_of(extra)
    reshard(model)
    weights, tied = tensors_of(model)
    for name, tensor in weights.items():
        check_savable(name, tensor)
    of_optimizer, of_extra = Kept(extents), Kept(extents)
    said = Manifest(
        tied=tied,
        module_state={
            name: encode(module.get_extra_state(), name, of_extra.put)
            for name, module in stateful_modules(model).items()
        },
        optimizer=None
        if optimizer is None
        else encode_optimizer(optimizer, names_of(model), of_optimizer),
        extra={
            name: {
                "type": type(thing).__name__,
                "state": encode(state_of(name, thing), f"extra {name}", of_extra.put),
            }
            for name, thing in extra.items()
        },
        written_by={"dynoffload": __version__, "torch": str(torch.__version__)},
    )
    said.random, *said.random_of_others = (
        {
            name: encode(state, f"random {name}" + f" of rank {rank}" * (rank > 0), of_extra.put)
            for name, state in states.items()
        }
        for rank, states in enumerate(random)
    )
    of_model = {name: extents.held(tensor, tensor) for name, tensor in weights.items()}
    sets = {
        "model": files.shards_of("model", of_model, limit),
        "optimizer": files.shards_of("optimizer", of_optimizer, limit),
        "extra": files.shards_of("extra", of_extra, limit),
    }
    return _Layout(target_of(directory), said, sets)


@contextlib.contextmanager
def _opened(path: Path, flags: int, target: Path, peers: Peers) -> Iterator[int]:
    """Yield the descriptor of a file in the new directory, to write or read a rank's part.

    Raises:
        CheckpointError: in place of the system's error on a rank beside the first, which itself
            says what becomes of the directory.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(
            error.errno,
            f"rank {peers.rank} of {peers.world} does not see {path.parent}, which the first has "
            "made: save to a directory that all ranks have in common",
        ) from error
    try:
        yield fd
    except OSError as error:
        if peers.first or isinstance(error, DynOffloadError):
            raise
        raise CheckpointError(
            error.errno or errno.EIO,
            f"cannot write the part of rank {peers.rank} in checkpoint {target} "
            f"({error.strerror or error}): free space there, raise the limit, or save to another "
            "disk; what was saved there before is as it was",
        ) from error
    finally:
        os.close(fd)


def _write(new: Path, layout: _Layout, memory: Memory, peers: Peers) -> dict[str, int]:
    """Write what this process has to write; return the checksums of that by file."""
    buffer, found = Buffer(), {}
    for shard in layout.shards():
        with _opened(new / shard.file, os.O_WRONLY, layout.target, peers) as fd:
            found[shard.file] = files.write(fd, shard, memory, buffer, first=peers.first)
            os.fsync(fd)
    return found


def _summed(new: Path, layout: _Layout, peers: Peers) -> dict[str, int]:
    """Return the checksums of this rank's share of the files that several may have written, which
    are read back for that."""
    buffer, found = Buffer(), {}
    for number, shard in enumerate(shard for shard in layout.shards() if shard.is_spread):
        if number % peers.world == peers.rank:
            with _opened(new / shard.file, os.O_RDONLY, layout.target, peers) as fd:
                found[shard.file] = files.checksum_of(fd, shard.nbytes, buffer)
    return found


def _finish(new: Path, layout: _Layout) -> None:
    """Write the indices, and the manifest, which says what all other files are."""
    said = layout.said
    for stem, parts in layout.sets.items():
        if len(parts) > 1:
            index = files.index_of(parts)
            name = f"{stem}.safetensors.index.json"
            _create(new / name, index)
            said.files[name] = File(len(index), zlib.crc32(index))
    _create(new / manifest.NAME, said.to_bytes())


def _create(path: Path, data: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    fd = os.open(path, _NEW, 0o666)
    try:
        files.write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
