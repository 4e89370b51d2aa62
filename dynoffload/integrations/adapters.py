"""Weights of PEFT models on the meta device: the base's from files, adapters' by PEFT's own code.

PEFT moves an adapter to the device of the layer under it. So the adapters of a model on the meta
device have lost their first values, and get them again as the block begins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.integrations.constructing import PlainWeights
from dynoffload.integrations.converting import converted
from dynoffload.runtime.file_parts import FileValue, Shape
from dynoffload.runtime.initialising import Around
from dynoffload.runtime.weight_files import WeightFiles

logger = logging.getLogger(__name__)

_BASE = "base_model.model."


class AdapterWeights(PlainWeights):
    """Initializes a PEFT model of a transformers model; an `Initialiser`.

    Args:
        model: with LoRA or IA3 adapters, which do not read the weights under them at first.

    Raises:
        ConfigError: it has other adapters.
    """

    name = "the reset of PEFT's layers"

    def __init__(self, model: PeftModel) -> None:
        for name, config in model.peft_config.items():
            lora = config.peft_type == "LORA" and isinstance(config.init_lora_weights, bool | str)
            known = lora and config.init_lora_weights in (True, "gaussian") and not config.use_dora
            if config.inference_mode and any(p.is_meta for p in model.parameters()):
                raise ConfigError(
                    f"the adapter {name!r} was loaded to be used as it is, and the meta device has "
                    "lost its values: make it with get_peft_model, and load it in the block, by "
                    "peft.set_peft_model_state_dict"
                )
            if not known and config.peft_type != "IA3":
                raise ConfigError(
                    f"the adapter {name!r} begins from the weights under it, or is of a kind "
                    "without a known reset: use LoRA with init_lora_weights True or 'gaussian' and "
                    "without DoRA, or IA3; or build the model in memory"
                )
        if any(p.is_meta and p.requires_grad for p in model.parameters()):
            logger.warning(
                "the adapters of this %s begin anew, as the meta device holds no values: load a "
                "saved one in the block, by peft.set_peft_model_state_dict",
                type(model).__name__,
            )

    @torch.no_grad()
    def initialise(self, model: Any, names: Collection[str], around: Around) -> None:
        """Initialize the tensors ``names`` of ``model``."""
        plain = _plain_names(model, names)
        own = {name.removeprefix(_BASE) for name in names if plain[name]}
        if own:
            super().initialise(model.get_base_model(), own, around)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                for name, config in model.peft_config.items():
                    self._reset(layer, name, config, around)

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
        plain = _plain_names(model, shapes)
        wanted = {name: shapes[outer] for outer, name in plain.items() if name}
        values, may_lack = converted(model.get_base_model(), wanted, files)
        return (
            {outer: values[name] for outer, name in plain.items() if name in values},
            {outer for outer, name in plain.items() if not name or name in may_lack},
        )


def _plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return for each of ``names`` the name of the tensor in the model without adapters, "" for a
    tensor of an adapter."""
    modules = dict(model.named_modules())
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
