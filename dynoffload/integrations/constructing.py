"""The random weights of a model of transformers, as transformers itself makes them.

transformers walks over the modules, children first, and calls what initialises each; `PlainWeights`
comes before every module, has its tensors at hand, and keeps those that are not to be written.

[Note: tied]  A constructor initialises both of two tied weights, and ties them afterwards: what
the second is given is lost. On the meta device they are tied before they are initialised. So, while
transformers walks, the second is what it is in ``from_pretrained``: on the meta device, and marked.

[Note: bits]  After the same seed these are the bits of ``model.initialize_weights()`` for a model
that is not tied yet, with the second of two tied weights marked as initialised: as in
``from_pretrained``, for what a file lacks. They are not those of the constructor: that first draws
torch's own defaults for each layer, which transformers then overwrites, from the same generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dynoffload.integrations.imports import importing
from dynoffload.runtime.initialising import Around, join, own_tensors

with importing("transformers", extra="transformers"):
    from transformers import PreTrainedModel

_DONE = "_is_hf_initialized"  # transformers passes over modules and tensors that have it


class PlainWeights:
    """Initialises a model of transformers; an `Initialiser`.

    After the same seed the bits are those of ``from_pretrained`` for a model of whose weights the
    file has none. They are not those of the constructor, which draws torch's defaults first.
    """

    name = "_init_weights()"

    @torch.no_grad()
    def initialise(self, model: nn.Module, names: Collection[str], around: Around) -> None:
        """Write the tensors ``names`` of ``model``, by transformers' own walk and functions."""
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
            module.__dict__.pop(_DONE, None)  # so that they are initialised, again if need be
        with _done(kept), _untied(model), contextlib.ExitStack() as stack:
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    stack.enter_context(_instead(part, one))
            model.initialize_weights()  # type: ignore[operator]


def _modules_over(model: nn.Module, names: Collection[str]) -> set[nn.Module]:
    """Return the modules that have one of the tensors ``names``, or a part that has."""
    over = {""}
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            over.add(name)
    return {module for path, module in model.named_modules() if path in over}


@contextlib.contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Have all but the first of tied weights be without memory; see [Note: tied]."""
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
def _done(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Have transformers pass over ``tensors``."""
    fresh = {id(tensor): tensor for tensor in tensors if not hasattr(tensor, _DONE)}
    for tensor in fresh.values():
        setattr(tensor, _DONE, True)
    try:
        yield
    finally:
        for tensor in fresh.values():
            delattr(tensor, _DONE)


@contextlib.contextmanager
def _instead(part: PreTrainedModel, one: Callable[..., None]) -> Iterator[None]:
    """Have ``one`` called with what initialises a module of ``part``, and with the module."""
    initialise = part._initialize_weights
    part.__dict__["_initialize_weights"] = lambda module, *args: one(initialise, module, *args)
    try:
        yield
    finally:
        del part.__dict__["_initialize_weights"]
