"""Options that make no sense are refused before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import load

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("ablations", {"only": ("none",)}, "base mixture, 1,024 tokens"),
    ("ablations", {"at_once": 0}, "at_once are at least 1"),
    ("capacity", {"ways": ("plan",)}, "ways names 'plan'"),
    ("capacity", {"share": 1.5}, r"share=1\.5"),
    ("cluster", {"tokens": 0}, "tokens=0 is too few"),
    ("cluster", {"sequences": (2, 0)}, "sequences=0 is too few"),
    ("cluster", {"sequences": ()}, "names none"),
    ("cluster", {"between_gb": 0.0}, "between_gb=0"),
    ("cluster", {"skew": -1.0}, "skew=-1"),
    ("costs", {"networks": ("nothing", "tree")}, "networks names 'nothing'"),
    ("costs", {"networks": ("tree",)}, "takes two networks"),
    ("estimates", {"only": ("gpt9",)}, "only names 'gpt9'"),
    ("estimates", {"steps": 3, "warmup": 3}, "leave some steps"),
    ("exactness", {"architectures": ("nothing",)}, "architectures names 'nothing'"),
    ("idioms", {"architectures": ("gpt9",)}, "names 'gpt9'; there are gpt2, "),
    ("ranks", {"ways": ("tp",)}, "ways names 'tp'; there are ddp, fsdp"),
    ("gpu", {"preset": "huge"}, "preset names 'huge'"),
    ("gpu", {"networks": ("tree",)}, "networks names 'tree'"),
    ("gpu", {"networks": ("evoformer:3",)}, "networks names 'evoformer:3'"),
    ("gpu", {"ways": ("all",)}, "ways names 'all'"),
    ("gpu", {"warmup": 0}, "warmup=0"),
    ("gpu", {"budgets": ("2",)}, "no share above 0 and at most 1"),
    ("gpu", {"budgets": ("x",)}, "'x' in budgets"),
    ("ablation", {"only": ("moe_63",)}, "moe_64"),
    ("ablation", {"sessions": ("moe_63",)}, "moe_64"),
    ("ablation", {"seeds": 0}, "seeds=0"),
    ("ablation", {"watched": 50}, "at least 1 and 51"),
    ("host-optimizer", {"steps": 5}, "must be more than"),
    ("moe-layer", {"configurations": ("conf9",)}, "configurations names 'conf9'; .* conf1"),
    ("moe-layer", {"activations": ("gelu",)}, "activations names 'gelu'"),
    ("moe-layer", {"dtype": "float64"}, "dtype names 'float64'"),
    ("moe-layer", {"rounds": 3}, "medians are of five at least"),
    ("moe-layer", {"fewer_tokens": 7}, "do not divide 65536 tokens of 512"),
    ("lora", {"ways": ("both",)}, "ways names 'both'; there are read"),
    ("lora", {"steps": 0}, "are at least 1"),
    ("moe-pipeline", {"sizes": ("GPT-9",)}, "sizes names 'GPT-9'; there are GPT-S"),
    ("moe-pipeline", {"steps": 0}, "must be at least 1"),
    ("paged", {"rows": ("maped",)}, "mapped"),
    ("paged", {"rows": ()}, "rows names nothing; there are main"),
    ("simulation", {"steps": 11}, "at most 10"),
    ("simulation", {"only": ("llama",)}, "names no network"),
    ("step-time", {"network": ("llama",)}, "network names 'llama'; there are moe, tree"),
    ("step-time", {"preset": "huge"}, "preset names 'huge'"),
    ("step-time", {"policies": ("pilots",)}, "policies names 'pilots'"),
    ("step-time", {"policies": ()}, "policies names nothing; there are pilot"),
    ("step-time", {"budgets": ("1/0",)}, "'1/0' in budgets is no share above 0"),
    ("step-time", {"budgets": ()}, "there are no budgets"),
    ("step-time", {"steps": 4}, "at least 5"),
    ("whatif", {"tolerance": 0}, "tolerance is 0: it is a share"),
    ("whatif", {"steps": 0}, "steps=0 is too few"),
]


@pytest.mark.parametrize(("name", "options", "told"), WRONG)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], told: str) -> None:
    kind = load(name)
    with pytest.raises(ConfigError, match=told):
        kind(kind.parameters(**options)).cases()
