"""What the files of a transformers model have for its parameters, by transformers' own conversions.

`save_pretrained` may write other tensors than the model has, such as one per expert for a fused
parameter. ``from_pretrained`` renames and converts them. Here the same code runs once on `Recorded`
tensors, so most parameters become parts that are read one by one. What is also transposed or
permuted, say, is converted by transformers when the parameter is filled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.integrations.imports import importing
from dynoffload.integrations.recording import Recorded, Writes
from dynoffload.runtime.file_parts import Conversion, FileValue, Shape, whole
from dynoffload.runtime.weight_files import WeightFiles

with importing("transformers", extra="transformers"):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )

_REMEDY = "give the files that save_pretrained() wrote for a model of this class and this config"


@dataclass(frozen=True)
class _Group:
    """Tensors of the files that transformers converts together.

    Attributes:
        model: that they are for.
        converter: of transformers; it stays without tensors.
        target: the name of the first tensor that is made.
        sources: their names in the files, and the converter's patterns for these.
    """

    model: Any
    converter: WeightConverter
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name what transformers makes of the ``tensors`` of `sources`."""
        converter = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.target, name, pattern, tensor)
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def make(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor ``name`` of those made."""
        return self.convert(tensors)[name]

    def values(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, FileValue]]:
        """Yield the names of what is made and the values, given the ``shapes`` in the files."""
        names = tuple(name for name, _ in self.sources)
        recorded = [Recorded(whole(name, shapes[name])) for name in names]
        with Writes() as writes:
            made = self.convert(recorded)
        for name, tensor in made.items():
            if isinstance(tensor, Recorded) and not writes.seen:
                yield name, tensor.value
            else:
                conversion = Conversion(names, functools.partial(self.make, name))
                yield name, whole(conversion, tuple(tensor.shape))


def converted(
    model: Any, shapes: Mapping[str, Shape], files: WeightFiles
) -> tuple[dict[str, FileValue], set[str]]:
    """Return by name the values that ``files`` have for ``model``, as ``from_pretrained`` loads
    them, and the names of tensors that they may lack.

    Args:
        model: of transformers.
        shapes: of the tensors of ``model`` that are saved.
        files: with the names that ``save_pretrained`` writes.

    Raises:
        ConfigError: a tensor of the files is not of the model, or cannot be converted; or the files
            are quantized.
    """
    _check_config(files.path.with_name("config.json"))
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    values: dict[str, FileValue] = {}
    groups: dict[str, _Group] = {}
    unknown: dict[str, str] = {}
    for name in sorted(files.shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = rename_source_key(name, [], [], prefix, shapes)
        if target not in shapes:
            unknown[target] = name
        elif pattern is None:
            values.setdefault(target, whole(name, files.shapes[name]))
        else:
            group = groups.setdefault(target, _Group(model, by_pattern[pattern], target))
            group.sources.append((name, pattern))
    for target, group in groups.items():
        try:
            found = dict(group.values(files.shapes))
        except Exception as error:  # of any kind: an operation's own
            _check_sources(model, target, shapes, files)
            name, _ = group.sources[0]
            raise ConfigError(
                f"transformers cannot convert {name!r} of {files.file_of(name)} for {target}: "
                f"{error}: {_REMEDY}"
            ) from error
        for name, value in found.items():
            if name in shapes and value.shape != shapes[name]:
                _check_sources(model, name, shapes, files)
        values |= found
    info = SimpleNamespace(missing_keys=set(shapes) - set(values), unexpected_keys=set(unknown))
    may_lack = info.missing_keys
    model._adjust_missing_and_unexpected_keys(info)  # drops what the class ignores
    for target in sorted(info.unexpected_keys):
        name = unknown[target]
        raise ConfigError(
            f"{files.file_of(name)} has a tensor {name!r} that is not of this "
            f"{type(model).__name__}: build the model with the class and the config that the files "
            "were written with (quantized weights cannot be read)"
        )
    return values, may_lack - info.missing_keys


def _check_config(path: Path) -> None:
    """Refuse a config that says that the weights beside it are quantized."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        how = config.get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return  # the files may stand without it
    if how:
        kind = how.get("quant_method") if isinstance(how, dict) else how
        raise ConfigError(
            f"{path} says that the weights of {path.parent} are quantized ({kind}): give "
            "materialize() plain weights, or load these by from_pretrained"
        )


def _check_sources(model: Any, name: str, shapes: Mapping[str, Shape], files: WeightFiles) -> None:
    """Refuse files that lack a tensor for the parameter ``name``, or have one of another shape."""
    wanted = revert_weight_conversion(model, {name: torch.empty(shapes[name], device="meta")})
    for source, tensor in wanted.items():
        shape = files.shapes.get(source)
        if shape is None:
            raise ConfigError(f"{files.path} has no tensor {source!r}, a part of {name}: {_REMEDY}")
        if shape != tuple(tensor.shape):
            raise ConfigError(
                f"tensor {source!r} of {files.file_of(source)} has shape {list(shape)} but the "
                f"model's has {list(tensor.shape)}, as a part of {name}: {_REMEDY}"
            )
