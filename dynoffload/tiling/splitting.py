"""Splits the large weights of a model into tiles, and joins them again.

[Note: in place]  Assigning ``__class__`` turns a module into a tiled one. So it stays the same
object, with its hooks and its place in the model. Its weight is replaced by tiles.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from dynoffload.errors import ConfigError
from dynoffload.managed import is_managed
from dynoffload.tiling.modules import (
    Tiled,
    TiledEmbedding,
    TiledLinear,
    TiledRows,
    lengths_of,
)
from dynoffload.units import format_bytes, parse_bytes

_TILED: dict[type[nn.Module], type[Tiled]] = {nn.Linear: TiledLinear, nn.Embedding: TiledEmbedding}


def tile(
    model: nn.Module, max_bytes: int | str = "256MB", *, skip: Collection[str] = ()
) -> list[str]:
    """Split, in place, every `nn.Linear` and `nn.Embedding` whose weight exceeds ``max_bytes``.

    Modules stay the same objects, with their hooks. Weights become parameters of tiles that keep
    values, dtype, device (also meta), ``requires_grad`` and attributes. So call it before the
    optimizer is created, and before ``offload()``. Exactly those two types are split; modules that
    already have small enough tiles stay unchanged. Linear layers and embeddings that share one
    weight, such as tied heads, share its tiles, and the table is split by rows. While a module is
    split its weight is in memory twice, unless it is on the meta device.

    Args:
        model: root, or a single layer.
        max_bytes: the most bytes of a tile's weight, or a text such as ``"256MB"``. An update needs
            as much again for the gradient, and for each tensor of optimizer state.
        skip: paths of modules to leave whole.

    Returns:
        The paths of the modules that were split, in the model's order.

    Raises:
        ConfigError: a weight is too large but cannot be split: it shares memory with another
            tensor, has a gradient, is of an embedding with ``max_norm`` or not an `nn.Parameter`,
            one row or column exceeds ``max_bytes``, or its tiles are larger; ``skip`` names no
            module; or a session manages the model. Nothing was split then.
    """
    most = parse_bytes(max_bytes, "max_bytes")
    _check_free(model, "tile")
    if isinstance(skip, str):
        raise ConfigError(f"skip={skip!r} is one path: pass a list of paths, as skip=[{skip!r}]")
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [path for path in skip if path not in modules]
    if unknown:
        raise ConfigError(f"skip names {unknown[0]!r}, but this model has no module of that path")
    inside = {part for one in modules.values() if isinstance(one, Tiled) for part in one.modules()}
    left = {modules[path] for path in skip} | inside
    for path, module in model.named_modules():
        if isinstance(module, Tiled) and module not in (modules[path] for path in skip):
            largest = max(_weight_bytes(part) for part in module.tiles)
            if largest > most:
                raise ConfigError(
                    f"{_named(path)} is tiled already, by tiles of {format_bytes(largest)}, and "
                    f"max_bytes is {format_bytes(most)}: call dynoffload.untile(model) first, or "
                    f"pass skip=[{path!r}] to leave it so"
                )
    large = {
        path: module
        for path, module in model.named_modules()
        if type(module) in _TILED and module not in left and _weight_bytes(module) > most
    }
    held = _holders(model)
    groups: dict[int, list[nn.Module]] = {}
    for path, module in large.items():
        _check_splits(path, module, held, set(large.values()))
        groups.setdefault(id(module._parameters["weight"]), []).append(module)
    paths = {module: path for path, module in large.items()}
    plans = []  # without a reference to a weight, so that each is freed once split
    for group in groups.values():
        dim = _TILED[type(group[0])].dim if len(group) == 1 else 0
        features = group[0].get_parameter("weight").shape[dim]
        try:
            lengths = lengths_of(features, _weight_bytes(group[0]) // features, None, most)
        except ConfigError as error:
            raise ConfigError(f"{_named(paths[group[0]])}: {error}") from None
        plans.append((group, dim, lengths))
    for group, dim, lengths in plans:
        _split(group, dim, lengths)
    return list(large)


def untile(model: nn.Module) -> nn.Module:
    """Join the tiles of every tiled module of ``model``, in place; the inverse of `tile`.

    One weight at a time is in memory twice, unless it is on the meta device.

    Returns:
        The model.

    Raises:
        ConfigError: the tiles of a module differ in dtype, device or ``requires_grad``, or have
            gradients, or a session manages the model. Nothing was changed then.
    """
    _check_free(model, "untile")
    tiled = [(path, part) for path, part in model.named_modules() if isinstance(part, Tiled)]
    for path, module in tiled:
        for key in {piece.whole for piece in module.tile_pieces().values()}:
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
    made: dict[tuple[int, ...], nn.Parameter] = {}  # tied tiles are joined once
    for _, module in tiled:
        for key in ("weight", "bias") if module.plain is nn.Linear else ("weight",):
            own = [getattr(tile, key) for tile in module.tiles]
            joined = None
            if own[0] is not None:
                of = tuple(map(id, own))
                if of not in made:
                    dim = module.dim if key == "weight" else 0
                    made[of] = _like(own[0], torch.cat([one.detach() for one in own], dim))
                joined = made[of]
            module._parameters[key] = joined
        del module._modules["tiles"]
        module.__class__ = module.plain  # type: ignore[assignment]
    return model


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model.state_dict()`` with whole tensors in place of tiles.

    Both a plain and a tiled model can load it. All whole tensors are copies in memory.
    """
    pieces = {
        name: piece
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Tiled)
        for name, piece in module.tile_pieces(f"{path}." if path else "").items()
    }
    state = model.state_dict(keep_vars=True)
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        parts.setdefault(pieces[name].whole if name in pieces else name, []).append(tensor)
    dims = {piece.whole: len(piece.part) - 1 for piece in pieces.values()}
    made: dict[tuple[int, ...], Tensor] = {}  # tied tiles are joined once
    for name, found in parts.items():
        of = tuple(map(id, found))
        if name in dims and of not in made:
            made[of] = torch.cat([one.detach() for one in found], dims[name])
    return {
        name: made[tuple(map(id, found))] if name in dims else found[0].detach()
        for name, found in parts.items()
    }


def _named(path: str) -> str:
    return repr(path) if path else "the model"


def _weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the module's weight, 0 if it has none of its own."""
    weight = module._parameters.get("weight")
    return 0 if weight is None else weight.numel() * weight.element_size()


def _check_free(model: nn.Module, call: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"dynoffload.{call}() takes a torch.nn.Module, not a {type(model).__name__}"
        )
    if is_managed(model):
        raise ConfigError(
            f"dynoffload.{call}() was called inside the offload() block that manages the model: "
            "call it before the block, and before the optimizer is made"
        )


def _holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Map each storage to the modules with a parameter or buffer in it, and that tensor's name."""
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.layout is torch.strided:
                name = f"{path}.{key}" if path else key
                held.setdefault(tensor.untyped_storage()._cdata, []).append((module, name))
    return held


def _check_splits(
    path: str,
    module: nn.Module,
    held: dict[int, list[tuple[nn.Module, str]]],
    large: Collection[nn.Module],
) -> None:
    """Check that a module can be split; its weight may be shared with modules in ``large``."""
    leave = f"leave it whole: dynoffload.tile(model, skip=[{path!r}])"
    for key, tensor in module._parameters.items():
        name = f"{path}.{key}" if path else key
        if tensor is None:
            continue
        if type(tensor) is not nn.Parameter:
            raise ConfigError(f"{name!r} is a {type(tensor).__name__}, which is not split; {leave}")
        for owner, other in held[tensor.untyped_storage()._cdata]:
            shared = key == "weight" and owner._parameters.get("weight") is tensor
            if owner is not module and not (shared and owner in large):
                raise ConfigError(
                    f"{name!r} shares its memory with {other!r}, which is not split with it: give "
                    f"one of them values of its own (nn.Parameter({key}.detach().clone())), or "
                    f"{leave}"
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


def _split(group: list[nn.Module], dim: int, lengths: list[int]) -> None:
    """Turn modules that share one weight into tiled ones."""
    weights = _parts(group[0].get_parameter("weight"), dim, lengths)
    for module in group:
        biased = module._parameters.get("bias")
        biases = None if biased is None else _parts(biased, 0, lengths)
        tiles, begin = [], 0
        for number, length in enumerate(lengths):
            tile = _blank(module, dim, begin, length).train(module.training)
            tile.weight = weights[number]
            if biases is not None:
                tile.bias = biases[number]
            tiles.append(tile)
            begin += length
        module._parameters.clear()
        kind = _TILED[type(module)]
        module.__class__ = kind if kind.dim == dim else TiledRows
        module.tiles = nn.ModuleList(tiles).train(module.training)


def _parts(parameter: nn.Parameter, dim: int, lengths: list[int]) -> list[nn.Parameter]:
    """Return copies of the parts of a parameter."""
    return [
        _like(parameter, part.clone(memory_format=torch.contiguous_format))
        for part in torch.split(parameter.detach(), lengths, dim)
    ]


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter of ``data`` with the properties and attributes of ``parameter``."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _blank(module: nn.Module, dim: int, begin: int, length: int) -> nn.Module:
    """Return a tile like ``module``, on the meta device."""
    if isinstance(module, nn.Embedding):
        padding, rows, columns = module.padding_idx, module.num_embeddings, length
        if dim == 0:
            rows, columns = length, module.embedding_dim
            own = padding is not None and begin <= padding < begin + length
            padding = padding - begin if own and padding is not None else None
        return nn.Embedding(
            rows,
            columns,
            padding,
            scale_grad_by_freq=module.scale_grad_by_freq,
            sparse=module.sparse,
            device="meta",
        )
    assert isinstance(module, nn.Linear)
    return nn.Linear(module.in_features, length, module.bias is not None, device="meta")
