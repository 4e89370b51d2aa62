"""Input features: what the pilot sees of a sample before the network runs.

The recorder stores `InputFeatures` in every `Trace`; the runtime computes them at the start of each
step and passes them to the pilot. Both call `describe_input`, so they always agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dynoffload.errors import TraceError

MAX_ELEMENTS = 65_536
"""The most discrete codes kept per sample."""
MAX_TENSORS = 32
"""The most tensors described per call."""
MAX_OBJECTS = 256
"""The most objects visited per call when walking its arguments."""
MAX_DEPTH = 6
"""The deepest nesting of arguments that is visited."""

_NO_ELEMENTS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_SUMMED = 65_536  # The largest mask, in elements, that is summed.
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

Features = Callable[..., "InputFeatures | Mapping[str, float]"]
"""A user-supplied featurizer, called with the arguments of the forward call."""


@dataclass(frozen=True)
class InputFeatures:
    """Features of one sample, known before forward.

    Attributes:
        values: named numbers, such as ``{"input_ids.numel": 512.0}``.
        elements: int64 ``[n]`` or ``[n, k]``: discrete codes in the order the network consumes
            them, such as tokens, or the arities of a tree's nodes. Empty if there are none.
    """

    values: dict[str, float]
    elements: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_ELEMENTS)

    def __eq__(self, other: object) -> bool:
        """Compare names, numbers and codes (the generated method fails on arrays)."""
        if not isinstance(other, InputFeatures):
            return NotImplemented
        return self.values == other.values and np.array_equal(self.elements, other.elements)


def describe_input(
    module: torch.nn.Module | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    features: Features | None = None,
) -> InputFeatures:
    """Describe one forward call ``module(*args, **kwargs)`` before it runs.

    Uses the first that exists: ``features(*args, **kwargs)``;
    ``module.sample_features(*args, **kwargs)``; the default. The default walks dicts, lists, tuples
    and dataclasses. It keeps the shape, element count and element size of each tensor, numbers, the
    sum of each mask, and the first integer tensor, flattened, at most `MAX_ELEMENTS` values of it.

    Args:
        module: the module that is about to be called, or None.
        args: its positional arguments.
        kwargs: its keyword arguments.
        features: the user's featurizer.

    Returns:
        The features; they alias no tensor of the arguments.

    Raises:
        TraceError: if a featurizer returns neither `InputFeatures` nor a mapping of names to
            numbers, or elements that are not integers in one or two dimensions; or if it writes
            into the arguments.
    """
    maker = "the featurizer passed as `features`"
    if features is None:
        features = getattr(module, "sample_features", None)
        maker = f"{type(module).__name__}.sample_features"
    if callable(features):
        with advising(maker, (args, kwargs)):
            try:
                return _checked(features(*args, **kwargs), maker)
            except Exception as error:
                error.add_note(f"It was raised in {maker}.")
                raise
    walk = _Walk()
    for position, argument in enumerate(args):
        walk.visit(f"arg{position}", argument, MAX_DEPTH)
    for name, argument in kwargs.items():
        walk.visit(name, argument, MAX_DEPTH)
    return InputFeatures(walk.values, walk.elements)


def merge_inputs(samples: Sequence[InputFeatures]) -> InputFeatures:
    """Return one sample for a step that ran several (gradient accumulation).

    Numbers are those of the first sample, plus the sample count under ``"samples"``. Elements of
    equal width are concatenated in call order, up to `MAX_ELEMENTS`.
    """
    if len(samples) == 1:
        return samples[0]
    first = samples[0]
    alike = [s.elements for s in samples if s.elements.shape[1:] == first.elements.shape[1:]]
    elements = np.concatenate(alike)[:MAX_ELEMENTS]
    return InputFeatures({**first.values, "samples": float(len(samples))}, elements)


@contextmanager
def advising(who: str, given: Any) -> Iterator[None]:
    """Run advisory user code (the body) without effect on the network's results: without gradients,
    and with torch's CPU random state restored afterwards.

    Args:
        who: names the code in messages.
        given: its arguments, in lists, tuples and dicts of any depth.

    Raises:
        TraceError: it wrote into an argument, which would change the values forward sees.
    """
    leaves = tree_leaves(given)
    tensors = [one for one in leaves if isinstance(one, Tensor) and not one.is_inference()]
    versions = [one._version for one in tensors]
    cached = torch.is_autocast_cache_enabled()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # A weight cast here, without gradients, would be reused in forward.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
    if [one._version for one in tensors] != versions:
        raise TraceError(
            f"{who} writes into what its module is given, and changes what the network computes: "
            "have it work on copies"
        )


class _Walk:
    """One bounded walk over the arguments of a call."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.elements = _NO_ELEMENTS
        self._objects = MAX_OBJECTS
        self._tensors = MAX_TENSORS
        self._seen_codes = False

    def visit(self, name: str, value: Any, depth: int) -> None:
        """Record the features of ``value`` and descend into it within the limits."""
        self._objects -= 1
        if self._objects < 0 or value is None or isinstance(value, str | bytes):
            return
        if isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, bool | int | float):
            self.values[name] = float(value)
        elif depth == 0:
            return
        elif isinstance(value, Mapping):
            for key, item in list(value.items())[:MAX_OBJECTS]:
                self.visit(f"{name}.{key}", item, depth - 1)
        elif isinstance(value, list | tuple):
            self.values[f"{name}.len"] = float(len(value))
            for position, item in enumerate(value[:MAX_OBJECTS]):
                self.visit(f"{name}.{position}", item, depth - 1)
        elif is_dataclass(value) and not isinstance(value, type):
            for part in fields(value):
                self.visit(f"{name}.{part.name}", getattr(value, part.name, None), depth - 1)

    def _tensor(self, name: str, tensor: Tensor) -> None:
        if self._tensors == 0:
            return
        self._tensors -= 1
        count = tensor.numel()
        self.values[f"{name}.numel"] = float(count)
        for position, extent in enumerate(tensor.shape[:MAX_DEPTH]):
            self.values[f"{name}.shape{position}"] = float(extent)
        self.values[f"{name}.itemsize"] = float(tensor.element_size())
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        integers = tensor.dtype in _INTEGERS
        if tensor.dtype is torch.bool or (integers and self._seen_codes and count):
            if count <= _SUMMED:
                self.values[f"{name}.sum"] = float(tensor.detach().sum())
        elif integers and not self._seen_codes:
            self._seen_codes = True
            codes = tensor.detach().reshape(-1)[:MAX_ELEMENTS]
            # Copy, as the training loop may overwrite the tensor.
            self.elements = codes.to("cpu", torch.int64, copy=True).numpy()


def _checked(made: object, maker: str) -> InputFeatures:
    if isinstance(made, InputFeatures):
        elements = made.elements
        if (
            not isinstance(elements, np.ndarray)
            or elements.ndim not in (1, 2)
            or elements.dtype.kind not in "iu"
        ):
            raise TraceError(
                f"{maker} returned elements that are not an integer array [n] or [n, k]; build"
                " them with numpy.asarray(codes, dtype=numpy.int64)"
            )
        kept = np.ascontiguousarray(elements[:MAX_ELEMENTS], dtype=np.int64)
        return InputFeatures(_numbers(made.values, maker), kept)
    if isinstance(made, Mapping):
        return InputFeatures(_numbers(made, maker))
    raise TraceError(
        f"{maker} returned {type(made).__name__}; it must return InputFeatures or a mapping of"
        " names to numbers"
    )


def _numbers(values: Mapping[str, float], maker: str) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise TraceError(
            f"{maker} returned a value that is not a number ({error}); each must be an int or a"
            " float"
        ) from error
