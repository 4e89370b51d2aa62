"""Guards: torch calls Python for an operator that touches a guarded tensor, and for no other.

Tensors over regions of an accelerator are guarded, so that a region is there before an operator
needs it. A guarded tensor is the same object as before, with its graph, its version and its
references. It has another class, which has a ``__torch_dispatch__``, and the dispatch key `Python`.
Views of it are guarded too.

[Note: the key]  Torch sets that key as it makes a tensor of such a class; no function sets it
later. So its bit is written to where a tensor keeps its keys. The place is found by comparing the
memory of some tensors with their keys, and each tensor is checked once its bit is set.

[Note: data]  ``x.data = p.data`` is no operator. It gives ``x`` the memory of another tensor, and
on some backends needs equal keys, for which modules ask before they are converted. So torch has a
property and a function of ours in these places meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import optimizer as of_optimizers
from torch.utils import _foreach_utils as of_foreach

from dynoffload import below_modes
from dynoffload.errors import BackendError
from dynoffload.memory.accelerator.storages import RegionStorage, RowStorage

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator with guarded arguments."""

_Key = torch._C.DispatchKey
_WORDS = 24  # of a tensor's memory that are searched for its keys
_KEYS = 0
for _one in (_Key.Python, _Key.PythonTLSSnapshot):
    _KEYS |= torch._C.DispatchKeySet(_one).raw_repr()
_DATA: Any = torch.Tensor.data
_COMPATIBLE = torch._has_compatible_shallow_copy_type
_SHOWN = ("__repr__", "__format__", "tolist")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_hidden: dict[types.CodeType, None] = {}
_taken: list[torch.UntypedStorage] = []
_compiling = False
_set_eval_frame: Any = None  # of torch's compiler, whose import takes seconds
_eager: list[Any] = []  # while there are handlers: torch runs compiled code as it was written

handlers: list[Handler] = []
"""Of the sessions that run; the last one is called."""


def _dispatch(
    _: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    if len(types) > 1 and not all(hasattr(one, "unguarded") for one in types):
        return NotImplemented  # a wrapper's class comes first, and unwraps it
    return (_handle if handlers else call_below)(func, args, kwargs or {})


def untraced(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Hide ``function`` from torch's compiler, in whose code it may be called."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not _compiling:
            return function(*args, **kwargs)
        before = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(before)

    _hidden[call.__code__] = None  # type: ignore[attr-defined] # the same for all functions
    return call


@untraced
def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return handlers[-1](func, args, kwargs)


def begin(handler: Handler) -> None:
    """Call ``handler`` for what touches guarded tensors, until `end`; see [Note: data]."""
    if not handlers:
        _eager.append(torch.compiler.set_stance("force_eager"))
        torch.Tensor.data = property(_get_data, set_data)  # type: ignore[assignment]
        torch._has_compatible_shallow_copy_type = _are_compatible  # type: ignore[assignment]
    handlers.append(handler)


def end(handler: Handler) -> None:
    """Call ``handler`` no more."""
    if handler in handlers:
        handlers.remove(handler)
        if not handlers:
            del torch.Tensor.data
            torch._has_compatible_shallow_copy_type = _COMPATIBLE
            _eager.pop().__exit__(None, None, None)


def may_compile() -> bool:
    """Return whether `compiling` is what the user expects, who has set no stance since `begin`."""
    from torch._dynamo import eval_frame

    return bool(_eager) and eval_frame._stance is _eager[0].stance


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let torch run compiled code as if there were no handlers. It takes addresses: what it touches
    must be there, and not guarded."""
    from torch._dynamo import eval_frame

    global _compiling, _set_eval_frame
    _set_eval_frame = eval_frame.set_eval_frame  # type: ignore[attr-defined]
    for code in (_dispatch.__code__, *_hidden):
        eval_frame.skip_code(code)
    before = _eager[0].prev
    with torch.compiler.set_stance(
        before.stance,
        skip_guard_eval_unsafe=before.skip_guard_eval_unsafe,
        force_backend=before.backend,
    ):
        outside, _compiling = _compiling, True
        try:
            yield
        finally:
            _compiling = outside


def take_data() -> list[torch.UntypedStorage]:
    """Return the storages of tensors whose ``data`` was taken while torch compiled: what writes to
    these counts no version."""
    taken = list(_taken)
    _taken.clear()
    return taken


def let_go() -> None:
    """Guard no tensor whose memory is ordinary by now. It scans all Python objects, which takes
    tens of milliseconds."""
    for one in gc.get_objects():
        # Tests the type, as a proxy object may answer anything to isinstance.
        if issubclass(type(one), torch.Tensor) and is_guarded(one):
            fit(one)


def call_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator that `is_plain` past all guards."""
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def call_below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator past all guards, as torch would call it without any."""
    with torch._C._DisableTorchDispatch():
        return below_modes.call_below(func, args, kwargs)


@functools.cache
def _guarded(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of guarded tensors of class ``kind``."""
    members: dict[str, Any] = {
        "__torch_dispatch__": classmethod(_dispatch),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "unguarded": kind,
        "as_subclass": _as_subclass,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "data_ptr": _data_ptr,
        **{name: _shown(kind, name) for name in _SHOWN},
    }
    if issubclass(kind, nn.Parameter):
        members["detach"] = _detach
    if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
        members["__torch_function__"] = classmethod(functools.partial(_function, kind))
    made: type[torch.Tensor] = types.new_class(
        kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(members)
    )
    _place()  # once found
    for known in (of_optimizers._foreach_supported_types, of_foreach._foreach_supported_types):
        if kind in known:
            known.append(made)  # as DTensor does
    return made


def _function(
    kind: type[torch.Tensor],
    _: type,
    func: Any,
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
) -> Any:
    """Return what the ``__torch_function__`` of a user's class returns; torch sets none there."""
    plain = tuple(getattr(one, "unguarded", one) for one in types)
    return kind.__torch_function__(func, plain, args, kwargs)  # type: ignore[no-untyped-call]


def _detach(parameter: nn.Parameter) -> torch.Tensor:
    """Return `Tensor.detach`; for `nn.Parameter` itself, of the class that it asks for."""
    made = torch.Tensor.detach(parameter)
    if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
        made.__class__ = type(parameter)
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the same memory, as `copy.copy` does."""
    return fit(_as_kind(tensor, unguard(torch.Tensor.detach(tensor))))


def _as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return what `Tensor.as_subclass` returns, guarded."""
    made: torch.Tensor = unguard(torch.ops.aten.alias.default(tensor))
    made.__class__ = kind
    return fit(made)


def _are_compatible(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether ``tensor.data`` can be set to ``data``, by which modules are converted."""
    return _COMPATIBLE(plain_alias(tensor), plain_alias(data))


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    if _compiling and tensor.layout is torch.strided and not tensor.is_meta:
        _taken.append(tensor.untyped_storage())
    data: torch.Tensor = _DATA.__get__(tensor)
    return data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``tensor.data``; see [Note: data]."""
    with torch._C.DisableTorchFunction():
        for one in (tensor, data):
            unguard(one)
        try:
            _DATA.__set__(tensor, data)
        finally:
            for one in (tensor, data):
                fit(one)


def _shown(kind: type[torch.Tensor], name: str) -> Any:
    """Return a method that asks an unguarded copy of the tensor."""
    inherited = getattr(kind, name)

    @functools.wraps(inherited)
    def method(self: torch.Tensor, *args: Any) -> Any:
        copied = _as_kind(self, torch.Tensor.detach(self).clone())
        return getattr(type(copied), name)(copied, *args)

    return method


def _reduce_ex(tensor: torch.Tensor, protocol: Any) -> Any:
    """Return what an unguarded tensor over the same memory returns, which reads no byte yet."""
    alias: Any = _as_kind(tensor, unguard(torch.Tensor.detach(tensor)))
    return alias.__reduce_ex__(protocol)


def _data_ptr(tensor: torch.Tensor) -> int:
    """Return the address, for a kernel that is launched at once; see `Accelerator.lend`."""
    storage = tensor.untyped_storage()
    if isinstance(storage, RegionStorage) and storage.bring is not None:
        storage.bring(True, True)
    return int(torch.Tensor.data_ptr(tensor))


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return the copy that an unguarded tensor over the same memory would return."""
    kind: Any = kind_of(tensor)
    if not tensor.is_leaf or id(tensor) in memo:
        return kind.__deepcopy__(tensor, memo)
    if kind.__deepcopy__ is nn.Parameter.__deepcopy__:
        made = torch.Tensor.detach(tensor).clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = copied = kind(made, tensor.requires_grad)
        return copied
    present(tensor.untyped_storage())
    alias = _as_kind(tensor, unguard(torch.Tensor.detach(tensor)))
    memo[id(tensor)] = copied = kind.__deepcopy__(alias, memo)
    memo[id(alias)] = alias  # whose id must not be another's
    return copied


def _as_kind(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return ``plain`` as ``tensor`` is: of its class, with its attributes."""
    kind = kind_of(tensor)
    if kind is torch.Tensor:
        plain.requires_grad_(tensor.requires_grad)
    else:
        plain = torch.Tensor._make_subclass(kind, plain, tensor.requires_grad)
    plain.__dict__.update(tensor.__dict__)
    if kind is nn.Parameter:
        plain.__dict__.pop("_is_param", None)
    return plain


@functools.cache
def _place() -> int:
    """Return how many bytes into a tensor its keys are; see [Note: the key].

    Raises:
        BackendError: they are not found.
    """
    samples = [
        torch.zeros(1),
        torch.zeros(1, dtype=torch.complex64).conj(),
        torch.zeros(1, device="meta"),
        torch.zeros(1).to_sparse(),
        nn.Parameter(torch.zeros(1)),
    ]
    places = set(range(_WORDS))
    for one in samples:
        words = (ctypes.c_uint64 * _WORDS).from_address(one._cdata)
        keys = torch._C._dispatch_keys(one).raw_repr()
        places &= {number for number, word in enumerate(words) if word == keys}
    if len(places) != 1:
        raise BackendError(
            f"torch {torch.__version__} keeps the dispatch keys of a tensor where dynoffload does "
            "not find them: use another release of torch, or train on the CPU"
        )
    return places.pop() * ctypes.sizeof(ctypes.c_uint64)


def is_guarded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is guarded."""
    return hasattr(type(tensor), "unguarded")


def kind_of(tensor: torch.Tensor) -> type:
    """Return the class of ``tensor``, without its guard."""
    kind = type(tensor)
    plain: type = getattr(kind, "unguarded", kind)
    # `nn.Parameter` makes such a tensor of a guarded one.
    is_parameter = plain is not kind and plain is torch.Tensor and hasattr(tensor, "_is_param")
    return nn.Parameter if is_parameter else plain


def is_paged(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is that of a region or of a row of an accelerator."""
    if isinstance(storage, RegionStorage):
        return storage.bring is not None
    return isinstance(storage, RowStorage)


def present(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return ``storage``, whose bytes are there if it is that of a region: torch would resize an
    empty one to put a tensor over it."""
    if isinstance(storage, RegionStorage) and storage.bring is not None:
        storage.bring(False, False)
    return storage


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, if it is not guarded, or else a detached one over the same memory, with
    the same version, that has no guard: only for while its region stays."""
    if not is_guarded(tensor):
        return tensor
    with torch._C._DisableTorchDispatch():
        return torch.Tensor.detach(tensor)


def guard(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, guarded from now on."""
    if not is_guarded(tensor):
        tensor.__class__ = _guarded(type(tensor))
        _set(tensor, on=True)
    elif not torch._C._dispatch_keys(tensor).has(_Key.Python):
        _set(tensor, on=True)
    return tensor


def unguard(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, not guarded any more."""
    if is_guarded(tensor):
        _set(tensor, on=False)
        tensor.__class__ = kind_of(tensor)
        if type(tensor) is nn.Parameter:
            tensor.__dict__.pop("_is_param", None)
    return tensor


def fit(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, guarded if and only if it is over a region or a row."""
    if tensor.layout is torch.strided and not tensor.is_meta and is_paged(tensor.untyped_storage()):
        return guard(tensor)
    return unguard(tensor)


def _set(tensor: torch.Tensor, *, on: bool) -> None:
    word = ctypes.c_uint64.from_address(tensor._cdata + _place())
    word.value = word.value | _KEYS if on else word.value & ~_KEYS
    if torch._C._dispatch_keys(tensor).has(_Key.Python) is not on:
        raise BackendError(f"the keys of a tensor of torch {torch.__version__} were not found")
