"""A budget that is larger than memory: lowered with a warning, refused where that is too little."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import SMALL, opened, pattern, view
from exactness import SMALL_PAGES, Loop, footprint_of, small, small_loss, small_samples
from torch import nn

import dynoffload
from dynoffload.errors import BudgetError
from dynoffload.experiments.baselines.cgroup import memory_group, why_unavailable
from dynoffload.memory import limits
from dynoffload.memory.pager import probe
from dynoffload.runtime import host
from dynoffload.runtime.target import Target
from dynoffload.units import GiB, MiB

PIB = 1 << 50


def most_of(have: int, slack: int = 512 * MiB) -> int:
    """Return the most that a budget can be where there are ``have`` bytes."""
    return have - min(slack, have // 4) - have // 16


def in_system() -> int:
    """Return what the kernel says is available."""
    (line,) = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    return int(line) * 1024


def group_in(directory: Path, limit: int | str, usage: int, cache: int) -> tuple[Path, str, str]:
    """Make the files of a control group, and return it as `cgroup_directories` does."""
    directory.mkdir()
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(
        f"anon 17\ninactive_file {cache - 4096}\nactive_file 4096\n"
    )
    return directory, "memory.max", "memory.current"


def lowered(budget: int | str = PIB, **options: Any) -> tuple[int, int]:
    """Return what a budget is lowered to, and the bytes of the tensors that are there already."""
    model = small()
    config = {**SMALL_PAGES, **options}
    with dynoffload.offload(model, budget=budget, config=config) as session:
        return session.sizing.budget, sum(p.nbytes for p in model.parameters())


def test_a_budget_larger_than_memory_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    """The model fits, so it trains, and the message says what there is."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.WARNING),
        dynoffload.offload(model, optimizer, budget=PIB, config=SMALL_PAGES) as session,
    ):
        Loop(steps=2).run(model, optimizer, small_samples(2), small_loss)
        assert footprint_of(model) < session.sizing.budget
    assert "control group, can give" in caplog.text


def test_it_is_lowered_to_what_the_group_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: the narrowest group's limit, less what it has taken, but for files' pages."""
    limit = min(GiB, in_system() // 4)
    usage, cache = limit // 2, limit // 4
    groups = [
        group_in(tmp_path / "wide", 2 * limit, usage, cache),
        group_in(tmp_path / "narrow", limit, usage, cache),
        group_in(tmp_path / "boundless", "max", usage, cache),
    ]
    monkeypatch.setattr(limits, "cgroup_directories", lambda: groups)
    for slack in (0, GiB):
        budget, tensors = lowered(heap_slack_bytes=slack)
        assert budget == most_of(limit - usage + cache + tensors, slack)
    for asked in (budget, budget - 1):
        assert lowered(asked, heap_slack_bytes=GiB)[0] == asked, (
            "the user's counts where it is less"
        )
    assert lowered(budget + 1, heap_slack_bytes=GiB)[0] == budget


def test_mapped_code_is_kept_of_what_a_group_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both versions: of the file cache, which is there to be had, as much as is mapped."""
    directory, *names = group_in(tmp_path / "group", 1000 * MiB, 700 * MiB, 300 * MiB)
    monkeypatch.setattr(limits, "cgroup_directories", lambda: [(directory, *names)])
    stat = (directory / "memory.stat").read_text()
    for name in ("file_mapped", "mapped_file", "total_mapped_file"):
        (directory / "memory.stat").write_text(f"{stat}{name} {100 * MiB}\n")
        groups = limits.MemoryGroups()
        lefts = [groups.room(code * MiB).left // MiB for code in (0, 40, 200)]
        assert lefts == [600, 560, 500]
        assert groups.may_lack(301 * MiB), "as long as nobody has looked at the cache"
        assert not groups.may_lack(300 * MiB)


def test_where_memory_is_little_less_freed_heap_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more beside the budget than there is, although the budget itself fits."""
    model = nn.Linear(4, 4)  # 80 bytes
    for have, budget, kept in (
        (256 * MiB, 96 * MiB, 52 * MiB),  # half of a quarter, and a quarter of what is besides
        (256 * MiB, 200 * MiB, 32 * MiB),  # lowered to 176 MiB
        (64 * GiB, 8 * GiB, 512 * MiB),  # as the user wants it
    ):
        monkeypatch.setattr(host, "available_bytes", lambda have=have: have - 80)
        with host.within(Target(), budget, 512 * MiB, model, None) as possible:
            assert possible.slack == kept
            assert possible.budget == min(budget, most_of(have))


def test_what_does_not_fit_in_memory_is_refused() -> None:
    """By the name of what is too large, although the user allows more than enough."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1 << 22, 1 << 22, bias=False))
    with (
        pytest.raises(BudgetError, match=r"more than the .* control group, can give") as caught,
        dynoffload.offload(model, budget=PIB),
    ):
        pytest.fail("the block must not begin")
    told = str(caught.value)
    assert re.search(r"at least [0-9.]+ [GT]iB", told), told
    assert "1.weight needs" in told
    assert "end other programs" in told


SCRIPT = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING)
    import torch
    import dynoffload
    from dynoffload.memory.limits import available_bytes
    from pathlib import Path
    def said(name, file):
        (line,) = [line for line in Path(file).read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024
    model = torch.nn.Linear(256, 256)
    cache = open(sys.argv[1], "wb")
    for _ in range(400):  # the page cache is charged to the group, and given up for others
        cache.write(bytes(1 << 20))
    cache.flush()
    print(said("RssAnon:", "/proc/self/status"), said("MemAvailable:", "/proc/meminfo"))
    print(available_bytes())
    with dynoffload.offload(model, budget="64GiB") as session:
        model(torch.ones(1, 256)).sum().backward()
        print(session.sizing.budget)
"""


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "never")
def test_the_limit_of_the_control_group_counts(tmp_path: Path) -> None:
    """And what files take of it does not."""
    limit = GiB  # the process itself takes some 300 MiB with torch
    with memory_group(limit) as group:
        command = group.command(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "file")]
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    anonymous, in_all, available, budget = map(int, done.stdout.split())
    expected = min(limit - anonymous, in_all)  # but for what the kernel takes for itself
    assert expected - 64 * MiB < available < limit
    assert abs(budget - most_of(available)) < 64 * MiB
    assert "control group, can give" in done.stderr


LIBRARY = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING)
    import torch
    import dynoffload
    steps, kept_in_all = int(sys.argv[1]), 4 * int(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(90)))
    model[:-1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    def keep(*_):  # as a library does: memory that is neither the model's nor freed
        if len(kept) < kept_in_all:
            kept.append(torch.ones(1 << 16))
    for layer in model:
        layer.register_forward_hook(keep)
    def train():
        for _ in range(steps):
            loss = model(torch.ones(64, 1024)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex(), flush=True)
    if len(sys.argv) > 3:
        train()
    else:
        with dynoffload.offload(model, optimizer, budget="64GiB", pilot=None):
            train()
"""


def keeping(steps: int, mebibytes: int, *, plain: bool = False) -> list[str]:
    """Return a command that trains while something keeps 22 MiB more in each step."""
    code = textwrap.dedent(LIBRARY)
    return [sys.executable, "-c", code, str(steps), str(mebibytes), *(["plain"] if plain else [])]


@pytest.mark.skipif(bool(why_unavailable() or probe()), reason=why_unavailable() or probe())
@pytest.mark.parametrize(
    ("steps", "mebibytes"), [pytest.param(10, 200, marks=pytest.mark.slow), (30, 10_000)]
)
def test_what_libraries_keep_is_taken_from_the_pool(steps: int, mebibytes: int) -> None:
    """It grows beyond all that was left free: the pool shrinks, to the least, and then training
    ends in words. The group kills nobody, and the numbers are those of plain PyTorch."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    plain = run(keeping(steps, mebibytes, plain=True)).stdout.split()
    assert len(set(plain)) == steps
    with memory_group(700 * MiB) as group:
        done = run(group.command(keeping(steps, mebibytes)))
        assert group.usage().oom_kills == 0
    losses = done.stdout.split()
    assert "shrinks" in done.stderr
    if mebibytes < 1000:
        assert done.returncode == 0, done.stderr
        assert losses == plain
    else:
        assert losses == plain[: len(losses)]
        assert re.search(
            r"BudgetError: .* cannot be smaller: .* raise the group's limit", done.stderr
        )


IN_BACKWARD = """
    import torch
    import dynoffload
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(90)))
    model[1:].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    def keep(*_):
        kept.append(torch.ones(3 << 19))
    for layer in model:
        layer.register_forward_hook(lambda layer, args, output: output.register_hook(keep) and None)
    with dynoffload.offload(model, optimizer, budget="200MB", pilot=None):
        for _ in range(20):
            model(torch.ones(64, 1024)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.skipif(bool(why_unavailable() or probe()), reason=why_unavailable() or probe())
def test_what_grows_within_one_backward_ends_in_words() -> None:
    """The group kills nobody, and the error says what takes the memory, and what would do."""
    with memory_group(700 * MiB) as group:
        command = group.command([sys.executable, "-c", textwrap.dedent(IN_BACKWARD)])
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert group.usage().oom_kills == 0
    assert "shrinks" in done.stderr
    (told,) = re.findall(r"BudgetError: (.*)", done.stderr)
    parts = r"the control group of 700\.00 MiB.* of the pool, .* before the block, .* since"
    assert re.search(parts, told), told
    assert re.search(r"largest update \(.*, of 1\.weight\), two chunks .*\) and a reserve", told)
    (needed,) = re.findall(r"raise the group's limit to at least ([0-9.]+) MiB", told)
    assert 700 < float(needed) < 1400
    ((pool, lowest, least),) = re.findall(
        r"The pool of ([0-9.]+) .* lower the budget, .*: ([0-9.]+) MiB .* least pool of ([0-9.]+)",
        told,
    )
    assert float(lowest) < 200
    assert float(least) < float(pool)


@pytest.mark.skipif(bool(probe()), reason=probe())
def test_a_pool_does_not_shrink_below_its_largest_region(tmp_path: Path) -> None:
    with opened("pager", 256 * SMALL, SMALL, tmp_path) as device:
        region = device.allocate(100 * SMALL)
        view(device, region).copy_(pattern(100 * SMALL, 1))
        assert device.limit(48 * SMALL)
        assert device.capacity == 100 * SMALL
        assert torch.equal(view(device, region), pattern(100 * SMALL, 1))


MAPPED_DATA = """
    import sys
    import numpy as np
    import torch
    import dynoffload
    data = np.memmap(sys.argv[1], dtype=np.float32, mode="r").reshape(-1, 64, 1024)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(90)))
    model[:-1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with dynoffload.offload(model, optimizer, budget="64GiB", pilot=None) as session:
        first = session._paging.device.capacity
        for step in range(8):
            for number in range(len(data)):
                x = torch.from_numpy(np.array(data[number]))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(session._paging.device.capacity / first)
"""


@pytest.mark.skipif(bool(why_unavailable() or probe()), reason=why_unavailable() or probe())
def test_mapped_data_take_nothing_from_the_pool(tmp_path: Path) -> None:
    """A dataset that is read through a mapped file, and larger than what the group has left."""
    data = tmp_path / "data"
    data.write_bytes(bytes(600 * MiB))
    with memory_group(700 * MiB) as group:
        command = [sys.executable, "-c", textwrap.dedent(MAPPED_DATA), str(data)]
        done = subprocess.run(
            group.command(command), capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.8
