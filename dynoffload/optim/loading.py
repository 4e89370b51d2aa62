"""A saved state, checked as a whole and then read into the places of masters and moments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.optim.shelves import MASTER, Entry, flat, shaped


def _pairs(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[torch.Tensor, Entry],
) -> Iterator[tuple[Entry, Mapping[str, Any]]]:
    """Yield each entry with what was saved of it, in the order of parameters."""
    for here, there in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(here["params"], there["params"], strict=True):
            yield entries[parameter], state_dict["state"].get(number, {})


def check_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[torch.Tensor, Entry],
    defaults: Collection[str],
) -> None:
    """Refuse a state that is not of these parameters.

    Args:
        state_dict: what is to be loaded.
        groups, entries: of the optimizer.
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
    for entry, saved in _pairs(state_dict, groups, entries):
        live = {key: value for key, value in saved.items() if value is not None}
        if not live:
            continue  # never updated
        for key in entry.keys:
            value = live.get(key)
            if value is None:
                if key == MASTER or key == "momentum_buffer":
                    continue  # of torch's own; or a momentum that has not begun
                raise ConfigError(
                    f"the state has no {key} of {entry.name}: make the optimizer with the options "
                    "that it was saved with"
                )
            if not isinstance(value, torch.Tensor) or value.shape != entry.parameter.shape:
                shape = list(value.shape) if isinstance(value, torch.Tensor) else value
                raise ConfigError(
                    f"{key} of {entry.name} is {shape} in the state, and the parameter "
                    f"{list(entry.parameter.shape)}: load the state of this model"
                )


@torch.no_grad()
def fill(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[torch.Tensor, Entry],
) -> None:
    """Read a state that `check_state` has passed."""
    for entry, saved in _pairs(state_dict, groups, entries):
        live = {key: value for key, value in saved.items() if value is not None}
        for key in entry.moments:
            _put(entry, key, live.get(key))
        master = live.get(MASTER)
        if master is None:
            entry.flat(MASTER).copy_(flat(entry.parameter))
        else:
            _put(entry, MASTER, master)
        started = float("momentum_buffer" in live)  # of torch's SGD, which counts no steps
        entry.step.fill_(float(live.get("step", started)))
        entry.lags.fill_(bool(live.get("lags", False)))


@torch.no_grad()
def take_over(state: MutableMapping[torch.Tensor, Any], entries: Iterable[Entry]) -> None:
    """Let ``state`` show entries, which take over the tensors that lie in the place of theirs."""
    for entry in entries:
        shown = state.get(entry.parameter, {})
        state[entry.parameter] = ours = entry.state()
        for key, mine in ours.items():
            value = shown.get(key)
            if isinstance(value, torch.Tensor) and value.data_ptr() != mine.data_ptr():
                mine.copy_(value)


def _put(entry: Entry, key: str, value: torch.Tensor | None) -> None:
    target = entry.flat(key)
    if value is None:
        target.zero_()
    else:
        shaped(target, entry.parameter).copy_(value)
