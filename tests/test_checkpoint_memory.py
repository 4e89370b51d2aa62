"""A checkpoint is never in memory as a whole: the budget holds, by ledger and by process.

The expected peak is computed from the budget: the process before, without what the device has of
it, the budget, and a slack for buffers and freed heap that is far below the size of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import script
from exactness import needs_pager

from dynoffload.units import MiB

LAYERS, WIDTH, BUDGET, SLACK = 10, 1024, 19 * MiB, 4 * MiB
MODEL = LAYERS * WIDTH * WIDTH * 4

MEASURE = f"""
import gc, json, warnings
from torch import nn
import dynoffload
from dynoffload.memory import heap
from dynoffload.memory.limits import resident_bytes

def peak():
    status = Path("/proc/self/status").read_text()
    return next(int(l.split()[1]) * 1024 for l in status.splitlines() if l.startswith("VmHWM"))

def measured(session, work):
    heap.give_back()
    others = resident_bytes() - session._paging.device.resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    session._paging.device.counters()
    work()
    return {{"rss": peak() - others, "ledger": session._paging.device.counters().peak_bytes}}

found = {{}}
for step in ("save", "load"):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {{"backend": sys.argv[1], "step_aside": False}}
    with dynoffload.offload(model, optimizer, budget={BUDGET}, config=config) as session:
        if step == "save":
            for _ in range(2):
                model(torch.ones(1, {WIDTH})).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[step] = measured(session, lambda: session.save(sys.argv[2]))
        else:
            found[step] = measured(session, lambda: session.load(sys.argv[2]))
            model(torch.ones(1, {WIDTH})).sum().backward()
            optimizer.step()
        peaks = [step.peak_fast_bytes for step in session.log.steps]
        assert max(peaks) <= {BUDGET}, peaks
    del model, optimizer, session
    gc.collect()
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
def test_saving_and_loading_stay_within_the_budget(backend: str, tmp_path: Path) -> None:
    """A model and state of five times the budget; loading makes state that was not there."""
    assert MODEL > 2 * BUDGET
    assert SLACK < MODEL // 3
    done = script(MEASURE, backend, tmp_path / "run", seconds=200, fresh=True)
    assert done.returncode == 0, done.stderr[-3000:]
    written = sum(entry.stat().st_size for entry in (tmp_path / "run").iterdir())
    assert written > 2 * MODEL
    for step, peak in json.loads(done.stdout).items():
        assert peak["ledger"] <= BUDGET, step
        assert peak["rss"] <= BUDGET + SLACK, (step, peak["rss"] / MiB)
