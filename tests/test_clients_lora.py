"""The example of adapters on a checkpoint larger than its budget, at a small size."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged

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
