"""Implementation ``"dynoffload"`` of the experts in transformers' models.

transformers looks up an implementation by the name in a model's configuration. This one uses the
class's own parameters, in any layout and paged by slices or not, and its own activation. Results
equal those of transformers' loop up to rounding, as backward sums in another order. A class that is
not supported, such as one with a norm after each expert or a trained activation, runs its own loop,
by slices if they are paged so.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.moe.activations import Activation, SiLU, SwiGLU, Traced
from dynoffload.moe.computation import experts
from dynoffload.runtime.experts.parts import run_eager, stand_ins

NAME = "dynoffload"


def register() -> None:
    """Register the implementation ``"dynoffload"`` with transformers.

    Use it by ``from_pretrained(..., experts_implementation="dynoffload")``, or
    ``model.set_experts_implementation("dynoffload")``.

    Raises:
        ConfigError: transformers is missing, or has no registry of experts.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ConfigError(
            f"transformers has no registry of experts' implementations ({error}): install "
            "transformers 5"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a class's experts, by `experts` if supported, else by the class's own loop.

    Raises:
        ConfigError: neither is possible.
    """
    if kwargs or len(args) != 3 or not _is_known(module):
        return run_eager(module, *args, **kwargs)
    tokens, chosen, gates = args
    first = "gate_up" if module.has_gate else "up"
    paged = stand_ins(module)

    def weight(name: str) -> Any:
        return paged.get(name, getattr(module, name))

    return experts(
        tokens,
        chosen,
        gates,
        weight(f"{first}_proj"),
        weight("down_proj"),
        up_bias=weight(f"{first}_proj_bias") if module.has_bias else None,
        down_bias=weight("down_proj_bias") if module.has_bias else None,
        activation=_activation_of(module),
        transposed=bool(module.is_transposed),
        count=int(module.num_experts),  # type: ignore[arg-type]
    )


def _is_known(module: nn.Module) -> bool:
    """Return whether a class declares the properties of its experts that `experts` needs."""
    needed = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    plain = not getattr(module, "has_post_expert_norm", False) and not any(
        one.requires_grad for child in module.children() for one in child.parameters()
    )  # such as an activation that is trained
    return plain and all(hasattr(module, name) for name in needed)


def _activation_of(module: nn.Module) -> Activation:
    own: Any = module
    function: Any = getattr(own, "act_fn", None)
    if not own.has_gate:
        return SiLU() if _is_silu(function) else Traced(function, 1)
    from transformers.integrations.moe import _default_apply_gate

    usual = getattr(own._apply_gate, "__func__", None) is _default_apply_gate
    if usual and own.is_concatenated and _is_silu(function):
        return SwiGLU()
    return Traced(own._apply_gate, 2)


def _is_silu(function: Any) -> bool:
    known = isinstance(function, nn.SiLU) or function is nn.functional.silu
    return known or type(function).__name__ == "SiLUActivation"  # transformers' own
