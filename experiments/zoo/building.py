"""What networks of the zoo have in common: samples, outputs, and what routers hint at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynoffload.datasets.sources import Split
from dynoffload.datasets.text import batches


@dataclass(frozen=True)
class ZooSample:
    """The input of one training step.

    Attributes:
        args: the positional arguments of the network's forward call; its result has a ``.loss``.
        source: the name of the file, or of whatever else the sample was cut from.
    """

    args: tuple[Any, ...]
    source: str


class Output(NamedTuple):
    """What a forward pass of most networks returns.

    Attributes:
        loss: scalar, in nats; None without targets.
        logits: of what is predicted, the classes last.
    """

    loss: Tensor | None
    logits: Tensor


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


def texts(split: Split | str = "train", *, seed: int = 0, **shape: Any) -> Iterator[ZooSample]:
    """Yield texts and what follows each token; see `dynoffload.datasets.text.batches`."""
    drawn = batches(split, seed=seed, **shape)
    return (ZooSample((batch.tokens, batch.targets), batch.source) for batch in drawn)


def singly(dataset: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[ZooSample]]:
    """Return ``samples`` that yield what ``dataset`` does; ``shape`` is the data set's."""

    def samples(
        split: Split | str = "train", *, seed: int = 0, **shape: Any
    ) -> Iterator[ZooSample]:
        return (ZooSample((one,), one.source) for one in dataset(split, seed=seed, **shape))

    return samples
