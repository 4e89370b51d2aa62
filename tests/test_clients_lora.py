"""Adapters on a checkpoint larger than its budget: the example, small, and what is moved."""

from __future__ import annotations

import re
import runpy
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged
from torch import nn

import dynoffload
from dynoffload.datasets.text import batches
from dynoffload.experiments.moe_checkpoint import on_meta, qwen3_moe, write
from dynoffload.integrations.transformers import materialize
from dynoffload.memory.pager import probe
from dynoffload.runtime.session import Session

pytest.importorskip("peft")
EXAMPLE = Path(__file__).parents[1] / "examples" / "lora_moe.py"
BUDGET = 4_000_000


@pytest.mark.filterwarnings("ignore")
def test_the_example_trains_what_its_budget_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands of its docstring. The adapter that it saves has changed and can be loaded."""
    sessions: list[Session] = []
    opened = Session.__init__

    def on_session(session: Session, *args: Any, **kwargs: Any) -> None:
        opened(session, *args, **kwargs)
        sessions.append(session)

    monkeypatch.setattr(Session, "__init__", on_session)
    text = EXAMPLE.read_text().split('"""')[1]
    make, train = re.findall(r"^    python (\S+ .*?) +#", text, re.MULTILINE)
    small = "--layers 2 --hidden 256 --experts 8 --steps 2 --tokens 32"

    def run(command: str, more: str) -> str:
        words = command.replace("/var/tmp/moe", str(tmp_path / "moe")).split()[1:]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words, *more.split()])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    assert "3 of 3 files" in run(make, small)
    written = sum(path.stat().st_size for path in (tmp_path / "moe").glob("*.safetensors"))
    assert written > BUDGET
    assert not sessions
    adapter = tmp_path / "adapter"
    printed = run(train.replace("1.5GB", str(BUDGET)), f"{small} --adapter {adapter}")
    assert len(re.findall(r"^step +\d  loss \d+\.\d+$", printed, re.MULTILINE)) == 2
    (session,) = sessions
    assert_paged(session, steps=2)
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.bfloat16)
    changed = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert len(changed) == 8
    assert all(p.any() for p in changed)


def adapted(model: nn.Module) -> nn.Module:
    """Return a model under LoRA on its attention."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """Train; return the losses, exactly."""
    found = []
    for row in islice(batches("train", length=64), steps):
        loss = model(input_ids=row.tokens, labels=row.tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
    return found


@pytest.mark.skipif(bool(probe()), reason=probe() or "never")
@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
@pytest.mark.filterwarnings("ignore")
def test_frozen_weights_leave_before_what_has_to_be_written(tmp_path: Path, kind: str) -> None:
    """Under a budget with room for all activations, beside the experts of a layer, most steps write
    next to nothing of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    list(write(tmp_path, qwen3_moe(6, 512, 8)))
    config = AutoConfig.from_pretrained(tmp_path, experts_implementation=kind)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.bfloat16)
    plain = adapted(plain)
    paged = adapted(on_meta(config))
    materialize(paged, tmp_path)
    optimizer = torch.optim.AdamW(trained(paged), lr=1e-2)
    with dynoffload.offload(paged, optimizer, budget="40MB") as session:
        with torch.no_grad():
            for ours, other in zip(trained(paged), trained(plain), strict=True):
                ours.copy_(other)
        found = losses(paged, optimizer, 6)
        assert_paged(session, steps=6)
        steps = session.stats[2:]
        read, written = steps["bytes_in"].median(), steps["bytes_out"].median()
    assert written <= read / 100, f"{written / read:.1%}"
    assert steps["bytes_out"].sum() <= steps["bytes_in"].sum() / 25
    assert found == losses(plain, torch.optim.AdamW(trained(plain), lr=1e-2), 6)
