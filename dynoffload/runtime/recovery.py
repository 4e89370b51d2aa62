"""What makes up for a lost step where the user loads by ``load_state_dict``.

After a lost step, part of the model and of the optimizer's state is of that step, and part of the
one before. All is as it was saved once both have been loaded since, in any order: the optimizer,
whose ``load_state_dict`` replaces state and hyperparameters; and the whole of the model, with no
key missing and no error, by a load that has written every parameter of the optimizer in place.
Anything less leaves the step lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.updates.updates import Updates


class Recovery:
    """Watches loads of a model, until it is closed.

    Args:
        model: the root.
        updates: of its optimizer, which see themselves how that is loaded.
    """

    def __init__(self, model: nn.Module, updates: Updates) -> None:
        self._updates = updates
        self._faults: tuple[list[str], ...] = ()  # of the load that goes on
        self._versions: dict[torch.Tensor, int] = {}  # of parameters, when it began
        self._hooks = Hook(self._begin), Hook(self._end)
        self._handles = [
            model.register_load_state_dict_pre_hook(self._hooks[0]),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(self._hooks[1]),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()

    def _versions_now(self) -> dict[torch.Tensor, int]:
        groups = self._updates.optimizer.param_groups
        return {parameter: parameter._version for group in groups for parameter in group["params"]}

    def _begin(self, *args: Any) -> None:
        _module, _state, _prefix, _metadata, _strict, missing, _unexpected, errors = args
        self._faults = ()
        if self._updates.waiting.lost is not None:
            self._updates.begin_load()
            self._faults, self._versions = (missing, errors), self._versions_now()

    def _end(self, *args: Any) -> None:
        faults, self._faults = self._faults, ()
        before, self._versions = self._versions, {}
        if not faults or any(faults):
            return
        now = self._versions_now()
        if all(now[parameter] != before.get(parameter, now[parameter]) for parameter in now):
            self._updates.waiting.make_up("model")
