"""What the kernel does to a page on its way: halves of it, a moment's refusal, a move it denies.

A library between the pager and the kernel makes these happen at will. It is compiled here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from devices import HUGE, SMALL, needs_pager, script

from dynoffload.experiments.baselines import cgroup
from dynoffload.units import MiB

pytestmark = [
    needs_pager,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here"),
]

_BETWEEN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOVE 0xc028aa05ul
struct move { uint64_t dst, src, len, mode; int64_t moved; };
static uint64_t refused_dst, refused_src; /* a page on its way that goes no further */
static double refused_until;
static unsigned long turn;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int answer(struct move *m, int error, int64_t moved)
{
    m->moved = moved;
    errno = error;
    return -1;
}

int ioctl(int fd, unsigned long request, ...)
{
    static int (*real)(int, unsigned long, void *);
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "ioctl");
    const char *mode = getenv("MOVES");
    if (request != MOVE || !mode)
        return real(fd, request, argument);
    struct move *m = argument;
    unsigned long n = __atomic_add_fetch(&turn, 1, __ATOMIC_SEQ_CST);
    uint64_t whole = m->len;
    if (!strcmp(mode, "denied") && n % 3 == 0) { /* moved, nobody woken, and denied */
        m->mode = 1;
        if (!real(fd, request, m))
            return answer(m, EEXIST, -EEXIST);
        m->mode = 0;
    } else if (!strcmp(mode, "halves") && n % 2 && whole > 4096) {
        m->len = whole / 2 / 4096 * 4096;
        if (!real(fd, request, m))
            return answer(m, EAGAIN, (int64_t)m->len);
        m->len = whole;
    } else if (!strcmp(mode, "moments") && n % 200) {
        return answer(m, n % 2 ? EBUSY : EAGAIN, n % 2 ? -EBUSY : -EAGAIN);
    } else if (!strcmp(mode, "refused")) {
        if (refused_until && now() < refused_until && m->src / (2 << 20) == refused_src &&
            m->dst / (2 << 20) == refused_dst)
            return answer(m, EBUSY, -EBUSY);
        if (n % 7 == 0 && whole == 2 << 20 && now() > refused_until) {
            refused_src = m->src / (2 << 20);
            refused_dst = m->dst / (2 << 20);
            refused_until = now() + 0.2;
            m->len = 4096 * 17;
            if (!real(fd, request, m))
                return answer(m, EAGAIN, (int64_t)m->len);
            m->len = whole;
        }
    }
    return real(fd, request, m);
}
"""

_CHURN = """
import threading
page, directory = int(sys.argv[1]), Path(sys.argv[2])
device = Pager(8 * page, page, directory, threads=2)
regions = [device.allocate((1 + i % 3) * page - i) for i in range(8)]
filled(device, regions)
wrong = []
def read(turn):
    for i in range(30):
        region = regions[(i * turn) % 8]
        if not holds(device, region):
            wrong.append(region)
threads = [threading.Thread(target=read, args=(t,), daemon=True) for t in (1, 3, 5)]
for t in threads: t.start()
for turn in range(20):
    pair = [regions[turn % 8], regions[(turn + 3) % 8]]
    device.lock(pair[:1])
    device.show(pair[:1])
    device.hide(pair[:1])
    device.unlock(pair[:1])
    device.acquire(pair, pin=True)
    assert all(holds(device, region) for region in pair)
    device.unpin(pair)
for t in threads: t.join()
assert wrong == []
assert all(holds(device, region) for region in regions)
assert device.counters().peak_bytes <= device.capacity
device.close()
"""


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library."""
    directory = tmp_path_factory.mktemp("between")
    (directory / "between.c").write_text(_BETWEEN)
    library = directory / "between.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, directory / "between.c", "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


@pytest.mark.parametrize(
    ("moves", "page"),
    [
        ("denied", SMALL),
        ("halves", HUGE),
        ("moments", SMALL),
        ("refused", SMALL),
        pytest.param("denied", HUGE, marks=pytest.mark.slow),
        pytest.param("halves", SMALL, marks=pytest.mark.slow),
        pytest.param("moments", HUGE, marks=pytest.mark.slow),
        pytest.param("refused", HUGE, marks=pytest.mark.slow),
    ],
)
def test_bytes_survive_their_way(
    moves: str, page: int, between: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were moved and denied, in parts, late, or half and then not."""
    monkeypatch.setenv("LD_PRELOAD", str(between))
    monkeypatch.setenv("MOVES", moves)
    found = script(_CHURN, page, tmp_path, fresh=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    bool(cgroup.why_unavailable(swap=True)), reason=cgroup.why_unavailable(swap=True) or "never"
)
@pytest.mark.parametrize("page", [SMALL, HUGE])
def test_a_pool_that_is_swapped_out(page: int, tmp_path: Path) -> None:
    """The system takes the pool's pages while they circulate: huge pages fall apart, too."""
    here = str(Path(__file__).parent)
    body = f"""
import sys
sys.path.append({here!r})
from devices import *
import random, threading, time, torch
page, directory, pool = int(sys.argv[1]), Path(sys.argv[2]), 192 * MiB
device = Pager(pool, page, directory, threads=2)
regions = [device.allocate(4 * MiB - 5) for _ in range(80)]
for region in regions:
    filled(device, [region])
other = torch.empty(64 * MiB, dtype=torch.uint8)
until = time.monotonic() + 20
def press():
    while time.monotonic() < until:
        other[::4096] += 1
thread = threading.Thread(target=press)
thread.start()
while time.monotonic() < until:
    region = random.choice(regions)
    if random.random() < 0.5:
        device.acquire([region])
    assert holds(device, region)
thread.join()
device.close()
"""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-c", body]
    with (
        cgroup.swap_file(Path("/var/tmp"), 1024 * MiB),
        cgroup.memory_group(420 * MiB, swap=True) as group,
    ):
        found = subprocess.run(
            group.command([*command, str(page), str(tmp_path)]),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert group.usage().limit_hits > 0
    assert found.returncode == 0, found.stderr
