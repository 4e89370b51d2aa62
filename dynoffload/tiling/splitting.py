"""Splitting the large weights of a model into tiles, and making them whole again.

What it is: `tile`, `untile` and `whole_state_dict`. What it is not: the tiled modules, nor what
they compute (`dynoffload.tiling.modules`).

[Note: in place]  A module becomes a tiled one by another ``__class__``, and so stays the same
object with its hooks, wherever it stands in the model; its weight goes, and tiles come.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.offload import session_of
from dynoffload.tiling.modules import Tiled, TiledEmbedding, TiledLinear, lengths_of, pieces_of
from dynoffload.units import parse_bytes

_TILED: dict[type[nn.Module], type[Tiled]] = {nn.Linear: TiledLinear, nn.Embedding: TiledEmbedding}


def tile(
    model: nn.Module, max_bytes: int | str = "256MB", *, skip: Collection[str] = ()
) -> list[str]:
    """Split, in place, every `nn.Linear` and `nn.Embedding` whose weight passes ``max_bytes``.

    Modules stay the same objects, with their hooks; weights become parameters of tiles, with the
    values, dtype, device (also meta), ``requires_grad`` and attributes that they had. So call it
    before the optimizer is made, and before ``offload()``. Exactly those two types are split; what
    is tiled already stays as it is. While a module is split its weight is in memory twice, unless
    it is on the meta device.

    Args:
        model: root, or a single layer.
        max_bytes: the most bytes of a tile's weight, or a text such as ``"256MB"``. Its update
            takes as much again for the gradient, and for each tensor of optimizer state.
        skip: paths of modules to leave whole.

    Returns:
        The paths of the modules that were split, in the model's order.

    Raises:
        ConfigError: a weight is too large but cannot be split: it is tied to another, has a
            gradient, is of an embedding with ``max_norm`` or of another type than `nn.Parameter`,
            or one row or column passes ``max_bytes``; ``skip`` names no module; or a session
            manages the model. Nothing was split then.
    """
    most = parse_bytes(max_bytes)
    _check_free(model, "tile")
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [path for path in skip if path not in modules]
    if unknown:
        raise ConfigError(f"skip names {unknown[0]!r}, but this model has no module of that path")
    inside = {part for one in modules.values() if isinstance(one, Tiled) for part in one.modules()}
    left = {modules[path] for path in skip} | inside
    large = {
        path: module
        for path, module in model.named_modules()
        if type(module) in _TILED and module not in left and _weight_bytes(module) > most
    }
    held = _holders(model)
    plans = []  # without a reference to a weight, so that each goes as it is split
    for path, module in large.items():
        _check_splits(path, module, held)
        weight = module.get_parameter("weight")
        features = weight.shape[_TILED[type(module)].dim]
        try:
            lengths = lengths_of(features, _weight_bytes(module) // features, None, most)
        except ConfigError as error:
            raise ConfigError(f"{_named(path)}: {error}") from None
        plans.append((module, lengths))
        del weight
    for module, lengths in plans:
        _split(module, lengths)
    return list(large)


def untile(model: nn.Module) -> nn.Module:
    """Make every tiled module of ``model`` whole again, in place, the inverse of `tile`.

    One whole weight after the other is in memory twice, unless it is on the meta device.

    Returns:
        The model.

    Raises:
        ConfigError: the tiles of a module differ in dtype, device or ``requires_grad``, or have
            gradients, or a session manages the model. Nothing was changed then.
    """
    _check_free(model, "untile")
    tiled = [(path, part) for path, part in model.named_modules() if isinstance(part, Tiled)]
    for path, module in tiled:
        for key in {piece.whole for piece in module.pieces().values()}:
            own = [getattr(tile, key) for tile in module.tiles]
            if len({(one.dtype, one.device, one.requires_grad) for one in own}) > 1:
                raise ConfigError(
                    f"the tiles of {_named(path)} cannot be joined, as their {key!r} differ in "
                    "dtype, device or requires_grad: make them alike first"
                )
            if any(one.grad is not None for one in own):
                raise ConfigError(
                    f"the tiles of {_named(path)} have gradients, which are not joined: call "
                    "model.zero_grad(set_to_none=True) first"
                )
    for _, module in tiled:
        for key in ("weight", "bias"):
            own = [getattr(tile, key, None) for tile in module.tiles]
            joined = None
            if own[0] is not None:
                dim = module.dim if key == "weight" else 0
                joined = _like(own[0], torch.cat([one.detach() for one in own], dim))
            if key == "weight" or module.plain is nn.Linear:
                module._parameters[key] = joined
        del module._modules["tiles"]
        module.__class__ = module.plain  # type: ignore[assignment]
    return model


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model.state_dict()`` with the whole tensors' names in place of the tiles'.

    A plain model reads it, as does a tiled one. Whole tensors are copies, in memory together.
    """
    pieces, state = pieces_of(model), model.state_dict()
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        parts.setdefault(pieces[name].whole if name in pieces else name, []).append(tensor)
    dims = {piece.whole: piece.dim for piece in pieces.values()}
    return {
        name: torch.cat(found, dims[name]) if name in dims else found[0]
        for name, found in parts.items()
    }


def _named(path: str) -> str:
    return repr(path) if path else "the model"


def _weight_bytes(module: nn.Module) -> int:
    """Return the bytes of its weight, 0 if it has none of its own."""
    weight = module._parameters.get("weight")
    return 0 if weight is None else weight.numel() * weight.element_size()


def _check_free(model: nn.Module, call: str) -> None:
    if session_of(model) is not None:
        raise ConfigError(
            f"dynoffload.{call}() was called inside the offload() block that manages the model: "
            "call it before the block, and before the optimizer is made"
        )


def _holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return by storage the modules with a parameter or buffer in it, and that one's full name."""
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.layout is torch.strided:
                name = f"{path}.{key}" if path else key
                held.setdefault(tensor.untyped_storage()._cdata, []).append((module, name))
    return held


def _check_splits(
    path: str, module: nn.Module, held: dict[int, list[tuple[nn.Module, str]]]
) -> None:
    """Refuse what cannot be split."""
    leave = f"leave it whole: dynoffload.tile(model, skip=[{path!r}])"
    for key, tensor in module._parameters.items():
        name = f"{path}.{key}" if path else key
        if tensor is None:
            continue
        if type(tensor) is not nn.Parameter:
            raise ConfigError(f"{name!r} is a {type(tensor).__name__}, which is not split; {leave}")
        sharing = held[tensor.untyped_storage()._cdata]
        other = next((other for owner, other in sharing if owner is not module), "")
        if other:
            raise ConfigError(
                f"{name!r} is tied to {other!r}, so it cannot be split: give one of them values of "
                f"its own (nn.Parameter({key}.detach().clone())), or {leave}"
            )
        if tensor.grad is not None:
            raise ConfigError(
                f"{name!r} has a gradient, which is not split: call "
                "model.zero_grad(set_to_none=True), and make the optimizer afterwards"
            )
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise ConfigError(
            f"the embedding {path!r} has max_norm, which needs whole rows, and cannot be split; "
            f"{leave}"
        )


def _split(module: nn.Module, lengths: list[int]) -> None:
    """Turn ``module`` into a tiled one."""
    kind = _TILED[type(module)]
    tiles = []
    own = {key: one for key, one in module._parameters.items() if one is not None}
    begin = 0
    for length in lengths:
        made = _blank(module, length)
        for key, parameter in own.items():
            dim = kind.dim if key == "weight" else 0
            part = parameter.detach().narrow(dim, begin, length)
            setattr(made, key, _like(parameter, part.clone(memory_format=torch.contiguous_format)))
        tiles.append(made.train(module.training))
        begin += length
    for key in list(module._parameters):
        del module._parameters[key]
    module.__class__ = kind
    module.tiles = nn.ModuleList(tiles).train(module.training)


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter of ``data`` with the properties and attributes of another one."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _blank(module: nn.Module, length: int) -> nn.Module:
    """Return a tile like ``module``, without memory."""
    if isinstance(module, nn.Embedding):
        return nn.Embedding(
            module.num_embeddings,
            length,
            module.padding_idx,
            scale_grad_by_freq=module.scale_grad_by_freq,
            sparse=module.sparse,
            device="meta",
        )
    assert isinstance(module, nn.Linear)
    return nn.Linear(module.in_features, length, module.bias is not None, device="meta")
