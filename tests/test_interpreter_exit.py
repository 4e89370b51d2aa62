"""A block that is still open as the interpreter exits is left, and the script keeps its status."""

from __future__ import annotations

import textwrap

import pytest
from devices import needs_pager, script

SCRIPT = """
import atexit, contextlib, os
import dynoffload
from emulated import DEVICE, accelerated
from exactness import SMALL_PAGES, Loop, assert_ordinary, assert_same, footprint_of
from exactness import small, small_loss, small_samples

backend = sys.argv[1]
model, reference = small(), small()
reference.load_state_dict(model.state_dict())
optimizer, its = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
samples = small_samples(40)
if backend == "emulated":
    stack = contextlib.ExitStack()
    stack.enter_context(accelerated())
    atexit.register(stack.close)
    options, place = SMALL_PAGES, {"device": DEVICE}
else:
    options, place = {**SMALL_PAGES, "backend": backend}, {}

def train(one, optimizer):
    Loop(steps=4, seeded=True).run(one, optimizer, samples, small_loss)

def block():
    return dynoffload.offload(
        model, optimizer, budget=footprint_of(model) // 3, config=options, **place
    )

@atexit.register
def look():
    train(reference, its)
    if "seen" not in globals():  # which keeps the memory that it shows
        assert_ordinary(model, optimizer)
    assert_same(model.state_dict(), reference.state_dict(), "model")
    assert_same(optimizer.state_dict(), its.state_dict(), "optimizer")
    print("the same")

"""

ENDS = {
    "exit stack": (
        """
        ends = contextlib.ExitStack()
        ends.enter_context(block())
        train(model, optimizer)
        """,
        0,
    ),
    "error": (
        """
        session = block().start()
        train(model, optimizer)
        output = model(samples[0][0])
        raise ValueError("the script's own")
        """,
        1,
    ),
    "in forward": (
        """
        session = block().start()
        train(model, optimizer)
        model.head.register_forward_hook(lambda *given: sys.exit(4))
        train(model, optimizer)
        """,
        4,
    ),
    "held": (
        """
        session = block().start()
        train(model, optimizer)
        seen, graph = model.head.weight.view(-1), small_loss(model, samples[0])
        """,
        0,
    ),
    "forked": (
        """
        session = block().start()
        train(model, optimizer)
        child = os.fork()
        if child == 0:
            sys.stdout = None
            atexit.unregister(look)
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        """,
        0,
    ),
}


QUICK = (
    ("pager", "exit stack"),
    ("pager", "error"),
    ("pager", "forked"),
    ("mapped", "held"),
    ("emulated", "in forward"),
)


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        pytest.param(
            backend,
            how,
            marks=[needs_pager] * (backend == "pager")
            + [pytest.mark.slow] * ((backend, how) not in QUICK),
        )
        for backend in ("pager", "mapped", "emulated")
        for how in ENDS
        if (backend, how) != ("emulated", "forked")  # its queues' threads are not in a child
    ],
)
def test_a_block_that_is_open_at_exit(backend: str, how: str) -> None:
    """What else runs at exit meets ordinary tensors, of the bits of plain PyTorch."""
    body, status = ENDS[how]
    ended = script(SCRIPT + textwrap.dedent(body), backend, seconds=120, fresh=True)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "the same\n", ended.stderr
    assert ("the script's own" in ended.stderr) == (how == "error")
