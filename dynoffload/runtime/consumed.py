"""The stand-in for a gradient that was used in backward; see `updates.in_backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dynoffload.errors import ConfigError


class ConsumedGradient(torch.Tensor):
    """A tensor without memory. Operators on it, and reads of its memory, raise.

    Args:
        parameter: whose ``grad`` it becomes.
        name: of the parameter, for errors.
        on_use: called with the error, before it is raised.
    """

    whose: str
    _on_use: Callable[[BaseException], None]

    @staticmethod
    def __new__(
        cls, parameter: torch.Tensor, name: str, on_use: Callable[[BaseException], None]
    ) -> ConsumedGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.whose, made._on_use = name, on_use
        return made

    def is_like(self, parameter: torch.Tensor) -> bool:
        """Return whether it can stand for a gradient of ``parameter`` as it is now."""
        same = self.shape == parameter.shape and self.dtype == parameter.dtype
        return same and self.device == parameter.device

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        next(one for one in _flat((args, kwargs)) if isinstance(one, cls))._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        error = ConfigError(
            f"the gradient of {self.whose!r} is gone, as its update is made in backward: with "
            "optimizer_in_backward no gradient can be read, clipped, scaled, kept as zeros or "
            "added to. To use gradients, leave that option off; else call backward() once for "
            "each step(), and zero_grad() without set_to_none=False"
        )
        self._on_use(error)
        raise error

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ConsumedGradient({self.whose!r})"


for _name in (
    *("data_ptr", "numpy", "share_memory_", "tolist", "untyped_storage"),
    *("__array__", "__dlpack__", "__reduce_ex__"),
):
    setattr(ConsumedGradient, _name, ConsumedGradient._refuse)
ConsumedGradient.data = property(ConsumedGradient._refuse, ConsumedGradient._refuse)  # type: ignore[assignment]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return [value]
    return [one for item in value for one in _flat(item)]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf, None if there is none or an update has consumed it."""
    gradient = parameter.grad
    return None if type(gradient) is ConsumedGradient else gradient
