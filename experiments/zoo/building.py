"""Shared by networks of the zoo: samples, outputs, and router predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynoffload.datasets.sources import Split
from dynoffload.datasets.text import batches


@dataclass(frozen=True)
class ZooSample:
    """The input of one training step.

    Attributes:
        args: the positional arguments of the network's forward call; its result has a ``.loss``.
        source: name of the file, or of another origin, from which the sample was cut.
        kwargs: the other arguments.
    """

    args: tuple[Any, ...]
    source: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, model: nn.Module) -> Any:
        """Return the loss."""
        return model(*self.args, **self.kwargs).loss


class Output(NamedTuple):
    """Result of most networks' forward.

    Attributes:
        loss: scalar, in nats; None without targets.
        logits: of the predictions; classes are the last dimension.
    """

    loss: Tensor | None
    logits: Tensor


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with all its tensors on ``device``, including those nested in tuples,
    lists, dictionaries and dataclass fields."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{one.name: moved(getattr(value, one.name), device) for one in fields(value)},
        )
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(item, device) for item in value)
    return value


def chosen_by_any(logits: Tensor, top_k: int) -> Tensor:
    """Return each expert's estimated chance of being in any token's ``top_k``, ``[experts]``.

    It is above one half if some token's logits select the expert. It depends on the distance to
    the midpoint between the last selected and the first rejected logit.

    Args:
        logits: of a router, ``[tokens, experts]``.
        top_k: experts per token.
    """
    if top_k >= logits.shape[1]:
        return logits.new_ones(logits.shape[1])
    best = logits.topk(top_k + 1, dim=1).values
    line = (best[:, -2] + best[:, -1]) / 2
    return torch.sigmoid(4 * (logits - line[:, None]).amax(dim=0))


def texts(split: Split | str = "train", *, seed: int = 0, **shape: Any) -> Iterator[ZooSample]:
    """Yield texts with each token's successor; see `dynoffload.datasets.text.batches`."""
    drawn = batches(split, seed=seed, **shape)
    return (ZooSample((batch.tokens, batch.targets), batch.source) for batch in drawn)


def singly(dataset: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[ZooSample]]:
    """Return a ``samples`` function over ``dataset``; ``shape`` is the data set's."""

    def samples(
        split: Split | str = "train", *, seed: int = 0, **shape: Any
    ) -> Iterator[ZooSample]:
        return (ZooSample((one,), one.source) for one in dataset(split, seed=seed, **shape))

    return samples
