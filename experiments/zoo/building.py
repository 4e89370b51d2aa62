"""What all networks of the zoo have in common: how one is made, and what a sample of it is.

What it is: `built`, sizes by the name of a preset and weights by a seed, `ZooSample`, and `moved`,
which takes one to a device, and what routers hint at. What it is not: a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ZooSample:
    """The input of one training step.

    Attributes:
        args: the positional arguments of the network's forward call; its result has a ``.loss``.
        source: the name of the file, or of whatever else the sample was cut from.
    """

    args: tuple[Any, ...]
    source: str


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``: in tuples, lists and dictionaries,
    and in the fields of dataclasses, as samples are made of."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{field.name: moved(getattr(value, field.name), device) for field in fields(value)},
        )
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(item, device) for item in value)
    return value


def chosen_by_any(logits: Tensor, top_k: int) -> Tensor:
    """Return how likely each expert is to be among the first ``top_k`` of any token, ``[experts]``.

    Above a half where some token's logits say so now; how far is told by the distance to the line
    between those taken and those left.

    Args:
        logits: of a router, ``[tokens, experts]``.
        top_k: how many experts a token takes.
    """
    if top_k >= logits.shape[1]:
        return logits.new_ones(logits.shape[1])
    best = logits.topk(top_k + 1, dim=1).values
    line = (best[:, -2] + best[:, -1]) / 2
    return torch.sigmoid(4 * (logits - line[:, None]).amax(dim=0))


class Config(Protocol):
    """The sizes of a network, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int:
        """Of the initial weights."""


ConfigT = TypeVar("ConfigT", bound=Config)
NetworkT = TypeVar("NetworkT", bound=nn.Module)


def built(
    network: Callable[[ConfigT], NetworkT],
    presets: Mapping[str, ConfigT],
    preset: str,
    device: str | torch.device,
    overrides: Mapping[str, Any],
) -> NetworkT:
    """Return a network of a preset's sizes with weights that follow from its seed.

    Args:
        network: makes it.
        presets: sizes by name.
        preset: a key of these.
        device: where to build it; on ``"meta"`` it has shapes and no bytes.
        overrides: fields of the configuration to change.

    Raises:
        ValueError: there is no such preset, or the sizes make no network.
        TypeError: an override is no field of the configuration.
    """
    if preset not in presets:
        raise ValueError(f"no preset {preset!r} of this network; there are {', '.join(presets)}")
    config: ConfigT = replace(presets[preset], **overrides)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(config.seed)
        return network(config)
