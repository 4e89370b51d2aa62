"""Saving: from live tensors to a directory that is whole or not there.

Of several processes the first lays out the files and writes what all have alike; each writes its
own parts of what is spread over them, where they belong, once what several have is known to be
alike where nobody but the user's loop keeps it so; the first says what the files are, and
puts them in their place. The files are those that one process would have written.
"""

from __future__ import annotations

import base64
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

from dynoffload.errors import CheckpointError, ConfigError, DynOffloadError
from dynoffload.memory.pieces import Buffer
from dynoffload.runtime.checkpoints import manifest, randomness, shards
from dynoffload.runtime.checkpoints.alike import check_alike
from dynoffload.runtime.checkpoints.contents import (
    Kept,
    encode_optimizer,
    names_of,
    stateful_modules,
    tensors_of,
)
from dynoffload.runtime.checkpoints.directory import replacing, target_of
from dynoffload.runtime.checkpoints.extents import Extents, Held, agreed_extents, unlike
from dynoffload.runtime.checkpoints.manifest import File, Manifest
from dynoffload.runtime.checkpoints.peers import Peers, peers_of
from dynoffload.runtime.checkpoints.ranges import Span, joined
from dynoffload.runtime.checkpoints.shards import Shard
from dynoffload.runtime.checkpoints.tensors import Memory, check_savable
from dynoffload.runtime.checkpoints.values import encode
from dynoffload.runtime.ranks.sharded import reshard
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
    made: list[_Layout] = []

    def lay_out() -> dict[str, Any]:
        made.append(_laid_out(model, optimizer, directory, extra, max_shard_size, peers, extents))
        return {
            "alike": made[0].checksum(),
            "random": None if peers.first else _random_here(peers.rank),
        }

    said = peers.share(lay_out)
    layout = made[0]
    if len({one["alike"] for one in said}) > 1:
        raise unlike()
    if extents:
        tensors = layout.held("model"), layout.held("optimizer")
        check_alike(peers, layout.target, *tensors, layout.said.optimizer, memory)
    with contextlib.ExitStack() as stack:  # an error ends the new directory

        def begin() -> str | None:
            if not peers.first:
                return None
            layout.complete([one["random"] for one in said[1:]])
            new = stack.enter_context(replacing(layout.target, layout.need()))
            for shard in layout.shards():
                os.close(os.open(new / shard.file, _NEW, 0o666))
            return str(new)

        new = Path(peers.share(begin)[0])
        written = peers.share(lambda: _write(new, layout, memory, peers))

        def end() -> None:
            if peers.first:
                _finish(new, layout, written)
                stack.close()  # what is there by now takes the target's place

        peers.share(end)
    logger.info("saved checkpoint %s: %s", layout.target, format_bytes(layout.content()))


@dataclass
class _Layout:
    """What will be written: the first of several processes writes it all but their parts."""

    target: Path
    said: Manifest
    sets: dict[str, list[Shard]]
    of_extra: Kept
    limit: int

    def checksum(self) -> int:
        """Return what is equal on all processes that may save together."""
        heads = (shard.head for parts in self.sets.values() for shard in parts)
        return zlib.crc32(b"".join(heads))

    def complete(self, random: Sequence[Mapping[str, Any]]) -> None:
        """Add what only the first process has: what is not spread, and others' random numbers."""
        for one in random:
            self.said.random_of_others.append(one["said"])
            for name, text in one["tensors"].items():
                data = bytearray(base64.b64decode(text))
                self.of_extra[name] = Held(torch.frombuffer(data, dtype=torch.uint8))
        self.sets["extra"] = shards.shards_of("extra", self.of_extra, self.limit)

    def held(self, stem: str) -> dict[str, Held]:
        """Return the tensors of a set."""
        return {name: one for shard in self.sets[stem] for name, one in shard.tensors.items()}

    def shards(self) -> list[Shard]:
        """Return all files of tensors."""
        return [shard for parts in self.sets.values() for shard in parts]

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
    peers: Peers,
    extents: Extents,
) -> _Layout:
    extra = things_of(extra)
    limit = parse_bytes(max_shard_size, "max_shard_size")
    if limit < 1:
        raise ConfigError(f"max_shard_size={max_shard_size!r} holds nothing: pass, say, '5GB'")
    target = target_of(directory)
    reshard(model)
    weights, tied = tensors_of(model)
    for name, tensor in weights.items():
        check_savable(name, tensor)
    of_optimizer, of_extra = Kept(), Kept()
    said = Manifest(
        tied=tied,
        module_state={
            name: encode(module.get_extra_state(), name, of_extra.put)
            for name, module in stateful_modules(model).items()
        },
        optimizer=None
        if optimizer is None
        else encode_optimizer(optimizer, names_of(model), of_optimizer, extents),
        extra={
            name: {
                "type": type(thing).__name__,
                "state": encode(state_of(name, thing), f"extra {name}", of_extra.put),
            }
            for name, thing in extra.items()
        },
        random={
            name: encode(state, f"random {name}", of_extra.put)
            for name, state in randomness.states().items()
        },
        written_by={"dynoffload": __version__, "torch": str(torch.__version__)},
    )
    sets = {
        "model": shards.shards_of(
            "model", {name: extents.held(tensor) for name, tensor in weights.items()}, limit
        ),
        "optimizer": shards.shards_of("optimizer", of_optimizer, limit),
    }
    layout = _Layout(target, said, sets, of_extra, limit)
    if peers.world == 1:
        layout.complete(())
    return layout


def _random_here(rank: int) -> dict[str, Any]:
    """Return this rank's random numbers, for the first rank to keep."""
    kept = Kept()
    said = {
        name: encode(state, f"random {name} of rank {rank}", kept.put)
        for name, state in randomness.states().items()
    }
    tensors = {
        name: base64.b64encode(held.tensor.cpu().numpy().tobytes()).decode()
        for name, held in kept.items()
    }
    return {"said": said, "tensors": tensors}


def _write(new: Path, layout: _Layout, memory: Memory, peers: Peers) -> dict[str, list[Span]]:
    """Write what this process has to write; return the stretches of each file."""
    buffer, found = Buffer(), {}
    for shard in layout.shards():
        try:
            fd = os.open(new / shard.file, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CheckpointError(
                error.errno,
                f"rank {peers.rank} of {peers.world} does not see {new}, which the first has made: "
                "save to a directory that all ranks have in common",
            ) from error
        try:
            found[shard.file] = shards.write(fd, shard, memory, buffer, first=peers.first)
            os.fsync(fd)
        except OSError as error:
            if peers.first or isinstance(error, DynOffloadError):
                raise  # the first says what becomes of the directory
            raise CheckpointError(
                error.errno or errno.EIO,
                f"cannot write the part of rank {peers.rank} in checkpoint {layout.target} "
                f"({error.strerror or error}): free space there, raise the limit, or save to "
                "another disk; what was saved there before is as it was",
            ) from error
        finally:
            os.close(fd)
    return found


def _finish(new: Path, layout: _Layout, written: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Write what says what was ``written``, by each rank."""
    said = layout.said
    for stem, parts in layout.sets.items():
        for shard in parts:
            spans = [Span(*span) for one in written for span in one.get(shard.file, ())]
            span = joined(spans)
            if span.nbytes != shard.nbytes:
                raise CheckpointError(
                    f"{shard.file} has {span.nbytes} bytes of {shard.nbytes}: not all ranks have "
                    "written; what was saved there before is as it was"
                )
            said.files[shard.file] = File(span.nbytes, span.crc32)
        if len(parts) > 1:
            index = shards.index_of(parts)
            name = f"{stem}.safetensors.index.json"
            with _created(new / name) as fd:
                shards.write_all(fd, index)
            said.files[name] = File.of(index)
    with _created(new / manifest.NAME) as fd:
        shards.write_all(fd, said.to_bytes())


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """Yield a new file's descriptor; the disk has what was written when the block ends."""
    fd = os.open(path, _NEW, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)
