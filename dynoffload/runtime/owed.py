"""The values that a model from the meta device has not got yet, and who will give them.

What it is: `Owed`, of one session: the names of what has no value, how it will be given, and what
the user has written meanwhile, which stays. What it is not: the giving
(`dynoffload.runtime.materialize`).

[Note: written meanwhile]  From the start of the block all tensors have memory, of zeros. So a user
may write into them, or put others in their place, before anybody gives them values: a tensor has
its value once it is another object, its version has gone up, or, as ``Tensor.data`` leaves the
version as it is, it is not zero any more. Zeros that are written through ``Tensor.data`` cannot be
told from none; nor can anything else that is, once giving has failed.

[Note: in part]  Nobody knows which elements of a tensor were written, so one that was written in
part keeps its zeros elsewhere. Where somebody has said before the block how values are given, they
are given as it begins, and what is written comes after. Where not, a tensor with zeros for the most
part is told of, if it is in memory still.

[Note: what fails]  A file or function that fails is asked again at the next use, and fails again:
nothing runs on half of a model. What it wrote before is not the user's, so versions are noted anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch
from torch import nn

from dynoffload.runtime.access import Access
from dynoffload.runtime.filling import join, own_tensors
from dynoffload.runtime.materialize import (
    Init,
    check_init,
    check_kind,
    give_weights,
    leave_meta,
    note,
    tensors_on_meta,
)
from dynoffload.runtime.placing import leave_for_meta

logger = logging.getLogger(__name__)

_MOSTLY = 0.5  # of a tensor's elements that are zero
_Seen = tuple[torch.Tensor, int]  # no weak reference: tensors that have one cannot be swapped


class Owed:
    """What ``model`` lacks.

    Args:
        model: before it is paged.
        recipe: how its values are to be given, as a tuple of one; None if nobody has said.
        device: where what is not paged gets its memory.

    Attributes:
        init: as ``recipe``, None once all has values.
        said: somebody has said how it is to be given.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: tuple[Init] | None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._model, self._device = model, device
        self._names = tensors_on_meta(model)
        self._kept: set[str] = set()  # of what the user has written
        self._seen: dict[str, _Seen] = {}
        self._failed = False
        self.said = recipe is not None
        self._parameters = [p for p in model.parameters() if p.is_meta]
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        self.init = self._first = (recipe or (None,)) if self._names else recipe

    def begin(self) -> None:
        """The model is paged: what is not leaves the meta device too."""
        leave_meta(self._model, self._device)
        self._note()

    def revert(self) -> None:
        """Not all has values, and nobody will give them: what has none is on the meta device as
        before, and how it is to be given is noted again."""
        written = self.written()
        for module, name, buffer in self._buffers:
            now = module._buffers.get(name)
            if now is not None and id(now) not in written:
                module._buffers[name] = buffer
        self._seen.clear()
        if self.init is not None and self.said:
            note(self._model, self.init[0])
        leave_for_meta(one for one in self._parameters if id(one) not in written)

    def undo(self) -> None:
        """The block has not begun: the model lacks what it lacked, whoever has given it since."""
        self.init = self._first
        self._kept.clear()
        self._seen.clear()
        self.revert()

    def written(self) -> set[int]:
        """Return the ids of the tensors to which the user has given values."""
        names = self._kept | self._written(lambda tensor: True)
        return {id(tensor) for name, tensor in self._tensors().items() if name in names}

    def give_said(self, access: Access) -> None:
        """Give what is owed if somebody has said how: see [Note: in part].

        Raises:
            ConfigError: it cannot be given so.
        """
        if self.said:
            self.give(access)

    def give(self, access: Access) -> None:
        """Give what is owed, if anything is, as was said; what the user has written stays.

        Args:
            access: to the tensors' memory.

        Raises:
            ConfigError: it cannot be given so.
        """
        if self.init is not None:
            self._keep(access)
            self._give(self.init[0], access, self._kept)

    def give_by(self, init: Init, access: Access) -> None:
        """Give everything its value by ``init`` now; what the user has written stays, except by a
        file.

        Raises:
            ConfigError: ``init`` is none, or cannot give them.
        """
        check_kind(init)
        self.said = True
        if self.init is not None:
            self._keep(access)
        self._give(init, access, ())

    def _keep(self, access: Access) -> None:
        """Note what the user has written meanwhile."""
        new = self._written(access.reads_zero) - self._kept
        self._kept |= new
        tensors = self._tensors()
        once = {tensors[name]: name for name in sorted(new, reverse=True)}
        told = [name for tensor, name in once.items() if _MOSTLY < access.zeros(tensor) < 1.0]
        if told:
            logger.warning(
                "%s%s had no value when it was written, and most of it is zero: if a part of it "
                "was to be written over its values, call materialize() before, in the block or "
                "ahead of it",
                min(told),
                f" (and {len(told) - 1} more)" if told[1:] else "",
            )

    def _give(self, init: Init, access: Access, kept: Collection[str]) -> None:
        self.init = (init,)
        self._names |= tensors_on_meta(self._model)  # of modules that came since
        left = self._names - self._kept
        check_init(init, self._model, left)  # before anything is written
        try:
            give_weights(self._model, init, left, access, kept=kept, device=self._device)
        except BaseException:
            self._failed = True  # what is not zero may be what it wrote
            self._note()
            raise
        self.init = None
        self._seen.clear()

    def _note(self) -> None:
        tensors = self._tensors()
        self._seen = {
            name: (tensors[name], tensors[name]._version) for name in self._names & tensors.keys()
        }

    def _written(self, reads_zero: Callable[[torch.Tensor], bool]) -> set[str]:
        """Return the names of what the user has written; see [Note: written meanwhile]."""
        written = set()
        for name, tensor in self._tensors().items():
            seen = self._seen.get(name)
            if seen is not None and not tensor.is_meta:
                same = seen[0] is tensor and seen[1] == tensor._version
                if not same or not (self._failed or reads_zero(tensor)):
                    written.add(name)
        return written

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            join(path, key): tensor
            for path, module in self._model.named_modules()
            for key, tensor in own_tensors(module).items()
        }
