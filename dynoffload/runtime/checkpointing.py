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
    """Save a training run, under `dynoffload.offload` or not, so that it can go on bit for bit.

    Saved are parameters and persistent buffers (by the names of ``model.state_dict()``, tied ones
    once, in safetensors files that Hugging Face's tools read), the optimizer's state and
    hyperparameters, ``extra``, and the states of the random numbers of torch, ``random`` and numpy.
    Gradients are not: a run that is loaded begins a new step, so save between steps.

    The directory is replaced at once when everything is on the disk. A save that fails or is killed
    leaves what was saved there before.

    Of a model that ``fully_shard`` has spread over processes, or of replicas under
    `DistributedDataParallel`, or with experts that are other ones on each rank
    (`dynoffload.moe.parallel.ExpertParallel`), all ranks call it, with a directory that all see:
    the files are those that one process would have saved, and load at any number of ranks. Beside
    such experts all else has to be alike on all ranks.

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        save_checkpoint(model, optimizer, "run/last", extra={"scheduler": scheduler})
        ...
        load_checkpoint(model, optimizer, "run/last", extra={"scheduler": scheduler})

    Args:
        model: the root module; of a `DistributedDataParallel` the module that it wraps is saved.
        optimizer: its optimizer, or None to save none.
        directory: the checkpoint's own; made, or replaced, in a directory that exists.
        extra: by name what else has a state to keep: objects with ``state_dict()`` and
            ``load_state_dict()`` of numbers, texts and tensors, such as schedulers and a
            ``GradScaler``, or a ``torch.Generator``.
        max_shard_size: bytes of content, or a text such as ``"5GB"``, after which a new file is
            begun.

    Raises:
        CheckpointError: a value cannot be kept, the disk is full or read-only, the directory is
            something else, or ranks have what is not alike. Training can go on.
        ConfigError: an argument is wrong.
        StepLostError: an update was lost before; see `load_checkpoint`.
    """
    _session_of(model, optimizer)._save(optimizer, directory, extra, max_shard_size)


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Load what `save_checkpoint` or a session's ``save`` has saved, under whatever budget.

    Everything is verified before anything is touched. Then tensors are read in place, one piece
    after the other; gradients are dropped; the random numbers go on as they would have. It also
    makes up for a lost step, within an `offload` block and after it.

    Args:
        model: the module as it was when saved: the same names, shapes, dtypes and ties.
        optimizer: of the same type, with the same groups; None loads no optimizer state.
        directory: of the checkpoint.
        extra: by the same names, what is to be given its state.

    Raises:
        CheckpointError: there is none, it is damaged, foreign or of a newer version, or it is not
            of this model; names what differs.
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
    """Return the session that manages ``model``, or one that leaves it alone.

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
