"""Saves live tensors to a directory that appears complete or not at all.

The first process lays out the files and writes the state that all share. Each process writes its
parts of distributed tensors at their offsets. The files equal those that a single process would
write. Finally the first process writes the manifest and publishes the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
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
from dynoffload.checkpoint.tensors import Memory
from dynoffload.checkpoint.values import encode
from dynoffload.distributed.sharded import reshard
from dynoffload.errors import CheckpointError, ConfigError, DynOffloadError
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Buffer
from dynoffload.units import format_bytes, parse_bytes
from dynoffload.version import __version__

logger = logging.getLogger(__name__)

_SLACK = 65536  # bytes beyond the content, for the directory itself


def things_of(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``extra``, or an empty mapping for None.

    Raises:
        ConfigError: it is not a mapping with names as keys.
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
    """Save; see `dynoffload.save_checkpoint`. No update may be pending on any of ``peers``, by
    default the processes of the model."""
    peers = peers_of(model) if peers is None else peers
    peers.check(directory)
    extents = agreed_extents(model, peers)
    random = peers.share(randomness.states)
    made: list[_Layout] = []

    def lay_out() -> tuple[int, Any]:
        layout = _make_layout(model, optimizer, directory, extra, max_shard_size, extents, random)
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
        _check_replicated(layout, memory, peers)
    with contextlib.ExitStack() as stack:  # an error removes the new directory

        def begin() -> str | None:
            if not peers.first:
                return None
            layout.check_covered([spans for _, spans in found])
            content = sum(shard.nbytes for shard in layout.shards())
            need = content + len(layout.said.to_bytes()) + _SLACK
            new = stack.enter_context(replacing(layout.target, need))
            for shard in layout.shards():
                (new / shard.file).touch(exist_ok=False)
            return str(new)

        new = Path(peers.share(begin)[0])
        written = peers.share(lambda: _write(new, layout, memory, peers))[0]
        summed = peers.share(lambda: _read_checksums(new, layout, peers))

        def end() -> None:
            if not peers.first:
                return
            checksums = {**written, **{k: v for one in summed for k, v in one.items()}}
            for shard in layout.shards():
                layout.said.files[shard.file] = File(shard.nbytes, checksums[shard.file])
            _finish(new, layout)
            stack.close()  # the new directory replaces the target

        peers.share(end)
    nbytes = sum(shard.nbytes for shard in layout.shards())
    logger.info("saved checkpoint %s: %s", layout.target, format_bytes(nbytes))


@dataclass
class _Layout:
    """The files to write: the first process writes them, except for the parts of the others."""

    target: Path
    said: Manifest
    sets: dict[str, list[Shard]]

    def held(self, stem: str) -> dict[str, Held]:
        """Return the tensors of a set."""
        return {name: one for shard in self.sets[stem] for name, one in shard.tensors.items()}

    def shards(self) -> list[Shard]:
        """Return all files of tensors."""
        return [shard for parts in self.sets.values() for shard in parts]

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return the range that this process writes of each distributed tensor."""
        found = {
            f"{stem}/{n}": one.span for stem in self.sets for n, one in self.held(stem).items()
        }
        return {name: span for name, span in found.items() if span is not None}

    def check_covered(self, everyone: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        """Check that the ranges of all ranks cover each tensor without gap or overlap.

        Raises:
            CheckpointError: they do not; names the tensor.
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
                key = f"{stem}/{name}"
                spans = sorted(one[key] for one in everyone if key in one)
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


def _check_replicated(layout: _Layout, memory: Memory, peers: Peers) -> None:
    """Compare state that several ranks hold and only the user's loop keeps equal; collective.

    This applies to models with distributed experts, or with a `DistributedDataParallel` around only
    a part of them. Differing buffers only cause a warning: the first rank's are saved.

    Raises:
        CheckpointError: other state differs; all ranks raise it.
    """

    def checksums() -> dict[str, int]:
        buffer, found = Buffer(), {}
        for stem in ("model", "optimizer"):
            for name, held in layout.held(stem).items():
                if held.extent is not None and not held.extent.several:
                    continue
                what = f"optimizer state {name!r}"
                if stem == "model":
                    kind = "parameter" if isinstance(held.tensor, nn.Parameter) else "buffer"
                    what = f"{kind} {name!r}"
                if held.extent is not None:
                    what += f", of experts {held.extent.begin} and on, which both hold,"
                found[what] = 0
                for data in files.bytes_of(local(held.tensor.detach()), memory, buffer):
                    found[what] = zlib.crc32(data, found[what])
        numbers = json.dumps(layout.said.optimizer, sort_keys=True).encode()
        return {**found, "what the optimizer has beside tensors": zlib.crc32(numbers)}

    first: dict[str, tuple[int, int]] = {}  # checksum, and whose
    warnings = []
    for rank, found in enumerate(peers.share(checksums)):
        for what, checksum in found.items():
            known, before = first.setdefault(what, (checksum, rank))
            if known == checksum:
                continue
            differs = f"{what} differs between ranks {before} and {rank}"
            if not what.startswith("buffer "):
                raise CheckpointError(
                    f"{differs} of {peers.world}, and a checkpoint has it once for all: begin "
                    "alike; sum the gradients of replicated_parameters(), and of all else that "
                    "several ranks hold, over those ranks before each step; clip by a norm that is "
                    "the same on all, as of dynoffload.moe.parallel.clip_grad_norm_; step a "
                    "scheduler on each; nothing was written, and what was saved there before is "
                    "as it was"
                )
            warnings.append(differs)
    for differs in warnings if peers.first else ():
        logger.warning("%s: checkpoint %s has the first rank's", differs, layout.target)


def _make_layout(
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
def _naming_rank(target: Path, peers: Peers) -> Iterator[None]:
    """Name the rank and the checkpoint in an OSError of any rank but the first, which does itself.

    Raises:
        CheckpointError: replaces it.
    """
    try:
        yield
    except OSError as error:
        if peers.first or isinstance(error, DynOffloadError):
            raise
        remedy = "free space there, raise the limit, or save to another disk"
        if isinstance(error, FileNotFoundError):
            remedy = "save to a directory that all ranks have in common"
        raise CheckpointError(
            error.errno or errno.EIO,
            f"cannot write the part of rank {peers.rank} of {peers.world} in checkpoint {target} "
            f"({error.strerror or error}): {remedy}; what was saved there before is as it was",
        ) from error


def _write(new: Path, layout: _Layout, memory: Memory, peers: Peers) -> dict[str, int]:
    """Write this process's parts; return the checksum of what it wrote in each file."""
    buffer, found = Buffer(), {}
    with _naming_rank(layout.target, peers):
        for shard in layout.shards():
            with open(new / shard.file, "r+b", buffering=0) as file:
                fd = file.fileno()
                found[shard.file] = files.write(fd, shard, memory, buffer, first=peers.first)
                os.fsync(fd)
    return found


def _read_checksums(new: Path, layout: _Layout, peers: Peers) -> dict[str, int]:
    """Return checksums of files that several ranks may have written, for this rank's share of
    those files. They are read back."""
    buffer, found = Buffer(), {}
    spread = [shard for shard in layout.shards() if shard.is_spread]
    with _naming_rank(layout.target, peers):
        for shard in spread[peers.rank :: peers.world]:
            with open(new / shard.file, "rb", buffering=0) as file:
                found[shard.file] = files.checksum_of(file.fileno(), shard.nbytes, buffer)
    return found


def _finish(new: Path, layout: _Layout) -> None:
    """Write the index files, and the manifest, which lists all other files."""

    def create(name: str, data: bytes) -> None:
        with open(new / name, "xb", buffering=0) as file:
            files.write_all(file.fileno(), data)
            os.fsync(file.fileno())

    for stem, parts in layout.sets.items():
        if len(parts) > 1:
            index, name = files.index_of(parts), f"{stem}.safetensors.index.json"
            create(name, index)
            layout.said.files[name] = File(len(index), zlib.crc32(index))
    create(manifest.NAME, layout.said.to_bytes())
