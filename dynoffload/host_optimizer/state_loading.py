"""Checks a saved state as a whole, then copies it into the masters and moments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer.states import MASTER, ParameterState


def _pairs(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[torch.Tensor, ParameterState],
) -> Iterator[tuple[ParameterState, dict[str, Any]]]:
    """Yield each parameter's state with its saved entries, in the order of parameters."""
    for group, saved_group in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            saved = state_dict["state"].get(number, {})
            yield states[parameter], {k: v for k, v in saved.items() if v is not None}


def check_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[torch.Tensor, ParameterState],
    defaults: Collection[str],
) -> None:
    """Check that a state matches these parameters.

    Args:
        state_dict: what is to be loaded.
        groups, states: of the optimizer.
        defaults: names of its options.

    Raises:
        ConfigError: naming what differs.
    """
    try:
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        state_dict["state"].items()
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "this is no state of an optimizer: pass what state_dict() has returned"
        ) from error
    ours = [len(group["params"]) for group in groups]
    if lengths != ours:
        raise ConfigError(
            f"the state has groups of {lengths} parameters, and this optimizer of {ours}: make its "
            "groups as before it was saved"
        )
    for group in state_dict["param_groups"]:
        if lacking := [name for name in defaults if name not in group]:
            raise ConfigError(
                f"the state has no {lacking[0]!r} in its groups: it is of another optimizer; make "
                "the one that it was saved from"
            )
    for state, saved in _pairs(state_dict, groups, states):
        for key in state.keys if saved else ():  # no entries: it was never updated
            value = saved.get(key)
            if value is None:
                if key == MASTER or key == "momentum_buffer":
                    continue  # from torch's optimizer; or no momentum yet
                raise ConfigError(
                    f"the state has no {key} of {state.name}: make the optimizer with the options "
                    "that it was saved with"
                )
            if not isinstance(value, torch.Tensor) or value.shape != state.parameter.shape:
                shape = list(value.shape) if isinstance(value, torch.Tensor) else value
                raise ConfigError(
                    f"{key} of {state.name} is {shape} in the state, and the parameter "
                    f"{list(state.parameter.shape)}: load the state of this model"
                )


def saved_entries(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[torch.Tensor, ParameterState],
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return complete entries for each parameter, from a state that `check_state` has accepted."""
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    for state, saved in _pairs(state_dict, groups, states):
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        entries[state.parameter] = {
            **dict.fromkeys(state.keys, zero.expand(state.parameter.shape)),
            MASTER: state.parameter.detach(),
            "step": zero + ("momentum_buffer" in saved),  # torch's SGD counts no steps
            "lags": zero,
            **{key: torch.as_tensor(value) for key, value in saved.items()},
        }
    return entries


@torch.no_grad()
def take_over(shown: MutableMapping[torch.Tensor, Any], states: Iterable[ParameterState]) -> None:
    """Make ``shown`` (``optimizer.state``) hold the optimizer's own tensors, with loaded values."""
    for state in states:
        found = shown.get(state.parameter, {})
        shown[state.parameter] = ours = state.shown()
        for key, mine in ours.items():
            value = found.get(key)
            if isinstance(value, torch.Tensor) and value.data_ptr() != mine.data_ptr():
                mine.copy_(value)
