"""Trains adapters on a checkpoint in a process of its own, for the experiment `lora`."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dynoffload.experiments.processes import NEVER_LEFT

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
_RANK = 8
_SPREAD = 0.02  # standard deviation of the adapters' values at first
_CHUNK = 8 << 20
_THREADS = 4


class Training:
    """One training; see `begin`."""

    def __init__(
        self, path: Path, budget: int | None, spill_dir: Path, tokens: int, checkpointing: bool
    ) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        import dynoffload
        from dynoffload.datasets.text import batches
        from dynoffload.experiments.moe_checkpoint import on_meta
        from dynoffload.integrations.transformers import materialize

        adapters = LoraConfig(r=_RANK, target_modules=list(ADAPTED))
        if budget is None:
            base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            self._model = get_peft_model(base, adapters)
        else:
            self._model = get_peft_model(on_meta(AutoConfig.from_pretrained(path)), adapters)
            materialize(self._model, path)
        if checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self._session = None
        if budget is not None:
            self._session = NEVER_LEFT.enter_context(
                dynoffload.offload(
                    self._model, self._optimizer, budget=budget, spill_dir=str(spill_dir)
                )
            )
        # Adapters from the meta device begin with other random numbers than those in memory.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in trained:
                values = torch.empty(parameter.shape).normal_(0, _SPREAD, generator=generator)
                parameter.copy_(values)
        self._batches = batches("train", length=tokens)
        self._model.train()

    def step(self) -> dict[str, Any]:
        """Make a step; return its seconds, loss, and the bytes that the process moved."""
        before, start = moved(), time.perf_counter()
        tokens = next(self._batches).tokens
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        value = float(loss.detach())
        seconds, after = time.perf_counter() - start, moved()
        return {
            "seconds": seconds,
            "loss": value.hex(),
            "bytes_in": after[0] - before[0],
            "bytes_out": after[1] - before[1],
            "spill_bytes": 0 if self._session is None else self._session.spill_bytes,
        }


_RUNNING: list[Training] = []


def begin(
    path: Path, budget: int | None, spill_dir: Path, tokens: int, checkpointing: bool
) -> float:
    """Build the network, and enter the block; return the time at which the first step can begin.

    Args:
        path: of the checkpoint.
        budget: of dynoffload; None: by ``from_pretrained``, without it.
        spill_dir: of the spill file.
        tokens: of a step.
        checkpointing: each layer's activations are computed again in backward.
    """
    _RUNNING.append(Training(path, budget, spill_dir, tokens, checkpointing))
    return time.time()


def step() -> dict[str, Any]:
    """See `Training.step`."""
    return _RUNNING[-1].step()


def moved() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def read_all(path: Path, direct: bool) -> float:
    """Read the shards once, with four threads; return the seconds.

    Args:
        path: of the checkpoint.
        direct: past the page cache.
    """
    import mmap

    chunks = [
        (file, at)
        for file in sorted(path.glob("*.safetensors"))
        for at in range(0, file.stat().st_size, _CHUNK)
    ]
    local = threading.local()

    def read(chunk: tuple[Path, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, _CHUNK)  # aligned
        fd = os.open(chunk[0], os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            os.preadv(fd, [local.buffer], chunk[1])
        finally:
            os.close(fd)

    start = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(read, chunks):
            pass
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drop the shards from the page cache."""
    for file in path.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
