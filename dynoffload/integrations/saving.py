"""Lets a client's own code save a model while it is managed.

[Note: EFAULT]  If the pager works in user mode, a system call on absent memory fails with EFAULT
instead of waiting. File writers such as safetensors, and `torch.save` to a path, pass tensor memory
to the kernel. So, while a client saves, ``state_dict()`` of the model and of the optimizer returns
copies mapped from a file. The kernel can read these, and reclaim their memory when needed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from dynoffload.memory.local import is_wrapper
from dynoffload.memory.outside import mapped_copy
from dynoffload.memory.pager import in_user_mode
from dynoffload.runtime.adoption.store import offset_of, view_of
from dynoffload.runtime.session import Session

_saving: weakref.WeakSet[Session] = weakref.WeakSet()  # a client's saves may be nested


@contextlib.contextmanager
def readable_state(session: Session) -> Iterator[None]:
    """Make ``state_dict()`` of the session's model and optimizer readable by system calls; see
    [Note: EFAULT].

    Raises:
        SpillError: in ``state_dict()``, if the spill directory lacks room for a copy.
    """
    directory, paged = session.spill_dir, session.backend == "pager" and session.paging
    if session in _saving or directory is None or not paged or not in_user_mode():
        yield
        return
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return value
        if is_wrapper(value):
            wrapper: Any = value
            names, context = wrapper.__tensor_flatten__()
            parts = {name: copied(getattr(wrapper, name)) for name in names}
            return type(wrapper).__tensor_unflatten__(
                parts, context, wrapper.size(), wrapper.stride()
            )
        storage = value.untyped_storage()
        if storage._cdata not in copies:  # tied parameters stay tied
            copies[storage._cdata] = mapped_copy(storage, directory)
        return view_of(copies[storage._cdata], value, offset_of(value))

    def model_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            state[name] = copied(value)

    def optimizer_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        parts = {
            index: {key: copied(value) for key, value in part.items()}
            for index, part in state["state"].items()
        }
        return {**state, "state": parts}

    register: Any = session.model.register_state_dict_post_hook
    handles = [register(model_state)]
    if session.optimizer is not None:
        handles.append(session.optimizer.register_state_dict_post_hook(optimizer_state))
    _saving.add(session)
    try:
        yield
    finally:
        _saving.discard(session)
        for handle in handles:
            handle.remove()
