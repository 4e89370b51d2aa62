"""A put-off update is made while autocast casts its weight, which holds the lock of its cache."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from exactness import needs_pager

SCRIPT = """
    import copy
    import torch
    from torch import nn
    import dynoffload

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

        def forward(self, x):
            for layer in self.inner:  # whose own forward, and so its hook, is never called
                x = nn.functional.linear(x, layer.weight, layer.bias).sin()
            return x

    torch.manual_seed(0)
    mine = Net()
    plain = copy.deepcopy(mine)

    def train(model, optimizer):
        losses = []
        for step in range(5):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(16, 256)).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    adam = [torch.optim.AdamW(model.parameters()) for model in (mine, plain)]
    config = {"step_aside": False, "page_bytes": 4096}
    with dynoffload.offload(mine, adam[0], budget="3MiB", pilot=None, config=config) as session:
        found = train(mine, adam[0])
        assert session.stats["bytes_in"].iloc[-1] > 0
    assert found == train(plain, adam[1])
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters()))
"""


@needs_pager
def test_it_does_not_wait_for_that_lock() -> None:
    """The access that the cast makes is served, and the numbers are those of plain training."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
