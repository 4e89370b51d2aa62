"""Saving: from live tensors to a directory that is whole or not there."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.memory.pieces import Buffer
from dynoffload.runtime.checkpoints import manifest, randomness, shards
from dynoffload.runtime.checkpoints.contents import (
    Kept,
    encode_optimizer,
    names_of,
    stateful_modules,
    tensors_of,
)
from dynoffload.runtime.checkpoints.directory import replacing, target_of
from dynoffload.runtime.checkpoints.manifest import File, Manifest
from dynoffload.runtime.checkpoints.tensors import Memory, check_savable
from dynoffload.runtime.checkpoints.values import encode
from dynoffload.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_SLACK = 65536  # bytes beyond content, for the directory


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
) -> None:
    """Save; see `dynoffload.save_checkpoint`. No update may be pending."""
    extra = things_of(extra)
    limit = parse_bytes(max_shard_size)
    if limit < 1:
        raise ConfigError(f"max_shard_size={max_shard_size!r} holds nothing: pass, say, '5GB'")
    target = target_of(directory)
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
        else encode_optimizer(optimizer, names_of(model), of_optimizer.put),
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
        written_by={"dynoffload": dynoffload.__version__, "torch": str(torch.__version__)},
    )
    sets = {
        "model": shards.shards_of("model", weights, limit),
        "optimizer": shards.shards_of("optimizer", of_optimizer, limit),
        "extra": shards.shards_of("extra", of_extra, limit),
    }
    content = sum(shard.nbytes for parts in sets.values() for shard in parts)
    with replacing(target, content + len(said.to_bytes()) + _SLACK) as new:
        buffer = Buffer()
        for stem, parts in sets.items():
            for shard in parts:
                with _created(new / shard.file) as fd:
                    checksum = shards.write(fd, shard, memory, buffer)
                said.files[shard.file] = File(shard.nbytes, checksum)
            if len(parts) > 1:
                index = shards.index_of(parts)
                name = f"{stem}.safetensors.index.json"
                with _created(new / name) as fd:
                    shards.write_all(fd, index)
                said.files[name] = File.of(index)
        with _created(new / manifest.NAME) as fd:
            shards.write_all(fd, said.to_bytes())
    logger.info("saved checkpoint %s: %s", target, format_bytes(content))


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """Yield a new file's descriptor; the disk has what was written when the block ends."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)
