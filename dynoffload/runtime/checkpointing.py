"""``save_checkpoint`` and ``load_checkpoint``: checkpoints of any training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint.contents import tensors_of
from dynoffload.distributed.replicas import unwrapped
from dynoffload.errors import CheckpointError, ConfigError
from dynoffload.managed import managers
from dynoffload.runtime.session import Session


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Save a training run, under `dynoffload.offload` or not, so that it resumes bit for bit.

    It saves parameters and persistent buffers, by the names of ``model.state_dict()``, tied ones
    once, in safetensors files that Hugging Face's tools read. It also saves the optimizer's state
    and hyperparameters, ``extra``, and the random states of torch, ``random`` and numpy. Gradients
    are not saved: a loaded run begins a new step, so save between steps.

    The directory is replaced at once when everything is on the disk. A save that fails or is killed
    leaves the previous checkpoint in place.

    With ``fully_shard``, `DistributedDataParallel` or experts that differ between ranks
    (`dynoffload.moe.parallel.ExpertParallel`), all ranks call it with one shared directory. The
    files are those of a single process, and load at any number of ranks. Next to such experts,
    everything else must be equal on all ranks.

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        save_checkpoint(model, optimizer, "run/last", extra={"scheduler": scheduler})
        ...
        load_checkpoint(model, optimizer, "run/last", extra={"scheduler": scheduler})

    Args:
        model: the root module; of a `DistributedDataParallel` the module that it wraps is saved.
        optimizer: its optimizer, or None to save none.
        directory: the checkpoint's own; created or replaced, inside an existing directory.
        extra: by name, other objects with state to save. They have ``state_dict()`` and
            ``load_state_dict()`` of numbers, texts and tensors, such as schedulers and a
            ``GradScaler``, or are a ``torch.Generator``.
        max_shard_size: bytes, or a text such as ``"5GB"``, after which a new file begins.

    Raises:
        CheckpointError: a value cannot be saved, the disk is full or read-only, the directory is
            something else, or ranks differ where they must be equal. Training can go on.
        ConfigError: an argument is wrong.
        StepLostError: an earlier update was lost; see `load_checkpoint`.
    """
    _session_of(model, optimizer)._save(optimizer, directory, extra, max_shard_size)


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Load what `save_checkpoint` or a session's ``save`` has saved, under any budget.

    Everything is verified before anything changes. Then tensors are read in place, one piece at a
    time; gradients are dropped, and random states are restored. It also recovers from a lost step,
    within an `offload` block and after it.

    Args:
        model: the module as it was when saved: the same names, shapes, dtypes and ties.
        optimizer: of the same type, with the same groups; None loads no optimizer state.
        directory: the checkpoint's.
        extra: by the same names, the objects that load their state.

    Raises:
        CheckpointError: there is none, or it is damaged, foreign, of a newer version, or of another
            model; names what differs.
        ConfigError: an argument is wrong.
    """
    session = _session_of(model, optimizer)
    if id(session.model) not in managers:
        for name, tensor in tensors_of(session.model)[0].items():
            if tensor.is_meta:
                raise CheckpointError(
                    f"{name!r} is on the meta device, so there is no memory to load it into: load "
                    "inside an offload() block, or call model.to_empty(device='cpu') first"
                )
    session._load(optimizer, directory, extra)


def _session_of(model: nn.Module, optimizer: Optimizer | None) -> Session:
    """Return the session that manages ``model``, or a passthrough session.

    Raises:
        ConfigError: it has another optimizer, or these are no model and optimizer.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        raise ConfigError(
            "save_checkpoint and load_checkpoint take (model, optimizer, directory): a "
            "torch.nn.Module and a torch.optim.Optimizer or None, not "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    session = managers.get(id(unwrapped(model)))
    if not isinstance(session, Session):
        return Session.plain(unwrapped(model), optimizer, (model,))
    if optimizer is not None and optimizer is not session.optimizer:
        raise ConfigError(
            f"this {type(optimizer).__name__} is not the optimizer of the offload() block that "
            "manages the model: pass that one, or None"
        )
    return session
