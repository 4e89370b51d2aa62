"""Initializes random weights of a transformers model, with transformers' own code.

transformers visits the modules, children first, and calls the function that initializes each.
`PlainWeights` wraps these calls to fetch each module's tensors, and keeps all others unchanged.

[Note: tied]  A constructor initializes both of two tied weights and ties them afterwards, so the
values of the second are lost. On the meta device they are tied before initialization. So during the
walk the second is as in ``from_pretrained``: on the meta device, and marked as initialized.

[Note: bits]  With the same seed the bits are those of ``model.initialize_weights()`` for a model
that is not yet tied, with the second of two tied weights marked as initialized. ``from_pretrained``
does the same for weights missing in a file. The constructor's bits differ: it first draws torch's
defaults for each layer, which transformers then overwrites, from the same generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dynoffload.integrations.converting import converted
from dynoffload.integrations.imports import importing
from dynoffload.runtime.file_parts import FileValue, Shape
from dynoffload.runtime.initialising import Around, join, own_tensors
from dynoffload.runtime.weight_files import WeightFiles

with importing("transformers", extra="transformers"):
    from transformers import PreTrainedModel

_DONE = "_is_hf_initialized"  # transformers skips modules and tensors with this attribute


class PlainWeights:
    """Initializes a transformers model; an `Initialiser`.

    With the same seed the bits are those of ``from_pretrained`` for a model whose weights are all
    missing in the file. The constructor's differ, as it draws torch's defaults first.
    """

    name = "_init_weights()"

    @torch.no_grad()
    def initialise(self, model: nn.Module, names: Collection[str], around: Around) -> None:
        """Initialize the tensors ``names`` of ``model``, by transformers' own code."""
        wanted = _modules_over(model, names)

        def one(initialise: Callable[..., None], module: nn.Module, *args: Any) -> None:
            if module in wanted:
                with around(module):
                    initialise(module, *args)

        kept = [
            tensor
            for path, module in model.named_modules()
            for key, tensor in own_tensors(module).items()
            if join(path, key) not in names and not hasattr(tensor, _DONE)
        ]
        for module in wanted:
            module.__dict__.pop(_DONE, None)  # so that they are initialized, even again
        with _marked_done(kept), _ties_on_meta(model), contextlib.ExitStack() as stack:
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    stack.enter_context(_wrapped_initialize(part, one))
            model.initialize_weights()  # type: ignore[operator]

    def values(
        self, model: nn.Module, shapes: Mapping[str, Shape], files: WeightFiles
    ) -> tuple[Mapping[str, FileValue], Collection[str]]:
        """Return what ``files`` have and may lack, by transformers' own conversions."""
        return converted(model, shapes, files)


def _modules_over(model: nn.Module, names: Collection[str]) -> set[nn.Module]:
    """Return the modules that hold one of the tensors ``names``, directly or in a submodule."""
    over = {""}
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            over.add(name)
    return {module for path, module in model.named_modules() if path in over}


@contextlib.contextmanager
def _ties_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace all but the first of tied weights by meta tensors; see [Note: tied]."""
    parameters = {
        join(path, key): (module, key, tensor)
        for path, module in model.named_modules()
        for key, tensor in module._parameters.items()
        if tensor is not None
    }
    pairs: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[torch.Tensor, str] = {}
    for name, (_, _, tensor) in parameters.items():
        source = parameters.get(pairs.get(name, ""))
        if source is None or source[2] is not tensor:
            first.setdefault(tensor, name)
    seconds = [one for name, one in parameters.items() if first.get(one[2], name) != name]
    for module, key, tensor in seconds:
        away = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        setattr(away, _DONE, True)
        module._parameters[key] = away
    try:
        yield
    finally:
        for module, key, tensor in seconds:
            module._parameters[key] = tensor


@contextlib.contextmanager
def _marked_done(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Make transformers skip ``tensors``."""
    fresh = {id(tensor): tensor for tensor in tensors if not hasattr(tensor, _DONE)}
    for tensor in fresh.values():
        setattr(tensor, _DONE, True)
    try:
        yield
    finally:
        for tensor in fresh.values():
            delattr(tensor, _DONE)


@contextlib.contextmanager
def _wrapped_initialize(part: PreTrainedModel, one: Callable[..., None]) -> Iterator[None]:
    """Call ``one`` with the function that initializes a module of ``part``, and the module."""
    initialise = part._initialize_weights
    part.__dict__["_initialize_weights"] = lambda module, *args: one(initialise, module, *args)
    try:
        yield
    finally:
        del part.__dict__["_initialize_weights"]
