"""Weights of PEFT models on the meta device: the base's and saved adapters' from files, other
adapters' by PEFT's own code.

PEFT moves an adapter to the device of the layer under it. So the adapters of a model on the meta
device have lost their values, and get them again as the block begins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.integrations.constructing import PlainWeights
from dynoffload.integrations.converting import converted
from dynoffload.runtime.file_parts import FileValue, Shape
from dynoffload.runtime.initialising import Around, named_tensors
from dynoffload.runtime.weight_files import WeightFiles

logger = logging.getLogger(__name__)

_REMEDY = "give the directory that save_pretrained() wrote for an adapter of this configuration"
_BASE, _COPY = "base_model.model.", ".modules_to_save."
_SAME_NUMBERS = frozenset(
    "auto_mapping base_model_name_or_path exclude_modules inference_mode init_ia3_weights "
    "init_lora_weights layers_pattern layers_to_transform lora_dropout modules_to_save "
    "peft_version revision runtime_config target_modules target_parameters task_type".split()
)
"""Fields of a configuration that change no number of a saved adapter, or names of tensors, too."""


class AdapterWeights(PlainWeights):
    """Initializes a PEFT model of a transformers model; an `Initialiser`.

    Args:
        model: with adapters that are saved, or that do not read the weights under them at first.
        saved: directories of saved adapters, by the adapters' names.

    Raises:
        ConfigError: it has other adapters, or a directory does not fit.
    """

    name = "the reset of PEFT's layers"

    def __init__(self, model: PeftModel, saved: Mapping[str, str | Path]) -> None:
        for name in saved:
            if name not in model.peft_config:
                raise ConfigError(
                    f"adapters= names {name!r}, and this {type(model).__name__} has "
                    f"{', '.join(map(repr, model.peft_config))}: name one of these"
                )
        on_meta = any(p.is_meta for p in model.parameters())
        if saved and not on_meta:
            raise ConfigError(
                f"adapters= is for a model on the meta device, and this {type(model).__name__} is "
                "in memory: load its adapters by PEFT"
            )
        for name, config in model.peft_config.items():
            _check_kind(name, config, saved=name in saved)
            was_loaded = config.inference_mode or config.auto_mapping  # as far as PEFT tells
            if was_loaded and on_meta and name not in saved:
                raise ConfigError(
                    f"the adapter {name!r} was loaded, and the meta device has lost its values: "
                    f"pass materialize() adapters={{{name!r}: its directory}}; for a new one, set "
                    "its config's auto_mapping to None"
                )
        self._saved = {name: Path(directory).absolute() for name, directory in saved.items()}
        self._given = _with_ties(model, [n for n, _ in self._saved_values(model)])
        parameters = model.named_parameters()
        new = [n for n, p in parameters if p.is_meta and p.requires_grad and n not in self._given]
        names = [repr(name) for name in model.peft_config if name not in saved]
        if names and new:
            logger.warning(
                "adapters of this %s begin anew, as the meta device holds no values: %s; to go on "
                "with saved ones, pass materialize() adapters={%s}",
                type(model).__name__,
                ", ".join(names),
                ", ".join(f"{name}: its directory" for name in names),
            )

    @torch.no_grad()
    def initialise(self, model: Any, names: Collection[str], around: Around) -> None:
        """Initialize the tensors ``names`` of ``model``."""
        plain = _plain_names(model, names)
        own = {n.removeprefix(_BASE) for n in names if plain[n] and n not in self._given}
        if own:
            super().initialise(model.get_base_model(), own, around)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                for name, config in model.peft_config.items():
                    if name not in self._saved:
                        self._reset(layer, name, config, around)
        if _with_ties(model, [n for n, _ in self._saved_values(model)]) != self._given:
            raise ConfigError(
                f"an adapter in {', '.join(map(str, self._saved.values()))} has other tensors than "
                "when materialize() was called: call it after the adapters are saved"
            )
        for name, value in self._saved_values(model):
            owner, _, key = name.rpartition(".")
            with around(model.get_submodule(owner)):
                getattr(model.get_submodule(owner), key).copy_(value)

    def _saved_values(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of one adapter after the other, none of which is kept."""
        for name, directory in self._saved.items():
            yield from _saved_values(model, name, directory).items()

    def _reset(self, layer: Any, adapter: str, config: Any, around: Around) -> None:
        """Initialize an adapter of a layer, if it has it."""
        holders = [getattr(layer, key) for key in layer.adapter_layer_names if hasattr(layer, key)]
        held: list[Any] = [one for one in holders if hasattr(one, "keys") and adapter in one]
        with contextlib.ExitStack() as stack:
            for one in held:
                part = one[adapter]
                stack.enter_context(around(part if isinstance(part, nn.Module) else one))
            if held and isinstance(layer, LoraLayer):
                layer.reset_lora_parameters(adapter, config.init_lora_weights)
            elif held and isinstance(layer, IA3Layer):
                layer.reset_ia3_parameters(adapter)

    def values(
        self, model: Any, shapes: Mapping[str, Shape], files: WeightFiles
    ) -> tuple[Mapping[str, FileValue], Collection[str]]:
        """Return what ``files`` of the base have and may lack; they have no adapter."""
        plain, base = _plain_names(model, shapes), model.get_base_model()
        wanted = {name: shapes[outer] for outer, name in plain.items() if name}
        values, may_lack = converted(base, wanted, files)
        found = {}
        for outer, name in plain.items():
            if _COPY in outer and name not in values:
                name = base.all_tied_weights_keys.get(name, name)  # the copy is not tied
            if name in values and outer not in self._given:
                found[outer] = values[name]
        lacking = {outer for outer, name in plain.items() if not name or name in may_lack}
        lacking |= self._given
        known = _with_ties(model, [*found, *lacking])
        missing = next((name for outer, name in plain.items() if outer not in known), "")
        if missing:
            raise ConfigError(
                f"{files.path} has no tensor {missing!r}: give the files that save_pretrained() "
                "wrote for the model under the adapters, with its config"
            )
        return found, lacking


def _check_kind(name: str, config: Any, *, saved: bool) -> None:
    """Refuse an adapter of which it is not known how it begins.

    Raises:
        ConfigError: naming it.
    """
    if getattr(config, "trainable_token_indices", None):
        raise ConfigError(
            f"the adapter {name!r} has trainable_token_indices, whose rows begin as copies of the "
            "embedding: use modules_to_save, or build the model in memory"
        )
    lora = config.peft_type == "LORA" and isinstance(config.init_lora_weights, bool | str)
    drawn = lora and config.init_lora_weights in (True, "gaussian")
    if (drawn and (saved or not config.use_dora)) or config.peft_type == "IA3":
        return
    raise ConfigError(
        f"the adapter {name!r} begins from the weights under it, or is of a kind without a known "
        "reset: use LoRA with init_lora_weights True or 'gaussian' and, unless it is saved, "
        "without DoRA, or IA3; or build the model in memory"
    )


def _check_config(config: PeftConfig, adapter: str, directory: Path) -> None:
    """Refuse a saved adapter whose configuration computes something else than ``config``.

    Raises:
        ConfigError: it cannot be read, or a field has another value.
    """
    try:
        other = PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"cannot load the adapter {adapter!r} from {directory}: {words:.300}: {_REMEDY}"
        ) from error
    mine, saved = config.to_dict(), other.to_dict()
    for key in (mine.keys() | saved.keys()) - _SAME_NUMBERS:
        if mine.get(key) != saved.get(key):
            raise ConfigError(
                f"cannot load the adapter {adapter!r} from {directory}: its {key} is "
                f"{saved.get(key)!r}, and the model's {mine.get(key)!r}: {_REMEDY}"
            )


def _saved_values(model: PeftModel, adapter: str, directory: Path) -> dict[str, torch.Tensor]:
    """Return the values of a saved adapter by the names of the model, as PEFT would load them.

    Raises:
        ConfigError: the files cannot be read, or do not fit.
    """
    path = directory / SAFETENSORS_WEIGHTS_NAME
    _check_config(model.peft_config[adapter], adapter, directory)
    values: dict[str, torch.Tensor] = {}

    def take(module: nn.Module, state: dict[str, torch.Tensor], *args: Any) -> None:
        values.update(state)
        state.clear()  # nothing is copied

    handle = model.register_load_state_dict_pre_hook(take)
    try:
        set_peft_model_state_dict(model, load_file(path), adapter_name=adapter)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"cannot load the adapter {adapter!r} from {path}: {words:.300}: {_REMEDY}"
        ) from error
    finally:
        handle.remove()
    modules, own = dict(model.named_modules(remove_duplicate=False)), named_tensors(model)
    for name, value in values.items():
        if name in own and value.shape != own[name].shape:
            raise ConfigError(
                f"{path} has a {name!r} of shape {list(value.shape)}, and that of the adapter "
                f"{adapter!r} is {list(own[name].shape)}: {_REMEDY}"
            )
    lacking = [
        name
        for name, _ in model.named_parameters()
        if name not in values
        and (adapter in name.split(".")[-2:] or f"{_COPY}{adapter}." in name)
        and (not _plain_name(modules, name) or _COPY in name)
    ]
    for name in (*(name for name in values if name not in own), *lacking):
        verb, what = ("lacks", "has") if name in lacking else ("has", "lacks")
        raise ConfigError(
            f"{path} {verb} {name!r}, which the adapter {adapter!r} {what}: {_REMEDY}"
        )
    return values


def _with_ties(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return ``names``, and the other names of their tensors."""
    named = named_tensors(model)
    tensors = {named[name] for name in names if name in named}
    return {*names, *(name for name, tensor in named.items() if tensor in tensors)}


def _plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return for each of ``names`` the name of the tensor in the model without adapters, "" for a
    tensor of an adapter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: _plain_name(modules, name) for name in names}


def _plain_name(modules: Mapping[str, nn.Module], name: str) -> str:
    parts, path, left = [], _BASE[:-1], name.removeprefix(_BASE).split(".")
    while left:
        owner, part = modules.get(path), left.pop(0)
        path = f"{path}.{part}"
        if isinstance(owner, BaseTunerLayer):
            if part in (*owner.adapter_layer_names, *owner.other_param_names):
                return ""
            if part != "base_layer":
                parts.append(part)
        elif isinstance(owner, ModulesToSaveWrapper):
            if part == "modules_to_save":
                path = f"{path}.{left.pop(0)}"  # the copy of one adapter
        else:
            parts.append(part)
    return ".".join(parts)
