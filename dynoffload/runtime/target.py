"""Where a session's operators run, where tensors go afterwards, and the memory below.

[Note: home]  A model from the accelerator stays there. One from the CPU or the meta device is on
the CPU after the block, as it may be larger than the accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dynoffload.config import ACCELERATOR, OffloadConfig
from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.streams import Streams, check_paging
from dynoffload.memory.accelerator.torch_streams import open_streams
from dynoffload.runtime.counting import parts_of
from dynoffload.units import parse_bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Target:
    """Where operators run.

    Attributes:
        queues: the accelerator's streams; None: on the CPU.
        home: where tensors are after the block; see [Note: home].
        host_budget: bytes of host memory below the accelerator; None: as much as needed, and no
            spill file.
    """

    queues: Streams | None = None
    home: torch.device = _CPU
    host_budget: int | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors that operators run on."""
        return _CPU if self.queues is None else self.queues.device


def target_of(
    model: nn.Module,
    device: torch.device | str | int | None,
    host_budget: int | str | None,
    options: OffloadConfig,
) -> Target:
    """Return where to train ``model``.

    Args:
        model: the root.
        device: the user's choice; None: where the model is, or the CPU for the meta device.
        host_budget: the user's choice.
        options: their backend must support that device.

    Raises:
        ConfigError: the model spans devices, is not where it could be trained, or an option does
            not suit that device.
        BackendError: there is no such accelerator, or it lacks what paging needs.
    """
    here = _place_of(model)
    wanted = (here or _CPU) if device is None else _parsed(device)
    if wanted.type == "cpu":
        if here is not None and here.type != "cpu":
            raise ConfigError(
                f"this {type(model).__name__} is on {here}, and device={str(wanted)!r} was asked "
                "for: call model.to('cpu') before the block, or leave device= out"
            )
        if host_budget is not None:
            raise ConfigError(
                "host_budget= is for what lies below an accelerator, and this model is trained on "
                "the CPU: pass device= the accelerator, or limit fast memory by budget= alone"
            )
        if options.backend == ACCELERATOR:
            raise ConfigError(
                f"backend={ACCELERATOR!r} is for models on one: pass device= its name, or leave "
                "backend= out"
            )
        return Target()
    if options.backend not in ("auto", ACCELERATOR):
        raise ConfigError(
            f"backend={options.backend!r} pages memory of the CPU, and the model is to be trained "
            f"on {str(wanted)!r}: leave backend= out"
        )
    queues = open_streams(wanted)
    if here is not None and here.type != "cpu" and here != queues.device:
        raise ConfigError(
            f"this {type(model).__name__} is on {here}, and device={str(wanted)!r} was asked for: "
            "move the model before the block, or leave device= out"
        )
    check_paging(queues)
    host = None if host_budget is None else parse_bytes(host_budget, "host_budget")
    return Target(queues, _CPU if here is None else here, host)


def _parsed(device: torch.device | str | int) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device={device!r} is no device: pass 'cpu', or what "
            "torch.accelerator.current_accelerator() names, such as 'cuda' or 'cuda:1'"
        ) from error
    if found.type == "meta":
        raise ConfigError(
            "device='meta' has no memory to train in: pass the device to train on; a model that "
            "is on the meta device may stay there"
        )
    return found


def _place_of(model: nn.Module) -> torch.device | None:
    """Return where the parameters are; None if all are on the meta device."""
    found: dict[torch.device, str] = {}
    for name, tensor in model.named_parameters():
        for part in parts_of(tensor):
            if not part.is_meta:
                found.setdefault(part.device, name)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ConfigError(
            f"{first!r} is on {one} and {second!r} on {other}, and offload() serves models on one "
            "device: move all parameters to one, or leave all on the CPU and pass device="
        )
    return next(iter(found), None)
