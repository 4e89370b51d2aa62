"""A training process that steps on request: the child side of the comparisons.

`dynoffload.experiments.contest` calls `build`, `enter` and `ask` in a child process. Each variant
of a comparison has its own, so none shares memory, allocator or caches, and two can take turns. All
make the same steps on the same samples, so their losses can be compared bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
import time
from collections.abc import Iterator
from typing import Any

from dynoffload.experiments.clock import Clock, operators_seconds
from dynoffload.experiments.processes import NEVER_LEFT
from dynoffload.experiments.ways import WAYS, Ready, Spec, network, place_of, samples
from dynoffload.experiments.zoo.building import moved


class Trainer:
    """One network, its optimizer and its samples."""

    def __init__(self, spec: Spec) -> None:
        import torch

        from dynoffload.experiments.predictors import Clairvoyant, watching
        from dynoffload.numerics import settle_kernels

        settle_kernels()
        self.spec = spec
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self.model = network(spec)
        self.samples = samples(spec)
        self.ready: Ready
        self._transfers = 0  # of the log, seen so far
        self.session: Any = None
        self.clairvoyant = Clairvoyant(self.model) if spec.clairvoyant else None
        self.visited = watching(self.model) if spec.watched else None
        self.clock = Clock() if spec.timed else None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Enter the block of the mode."""
        import torch

        spec = self.spec
        torch.manual_seed(spec.seed)  # reset_parameters() runs in construction order
        with WAYS[spec.mode](spec, self.model, self.clairvoyant or spec.pilot) as self.ready:
            self.session = self.ready.session
            if self.ready.model is not None:
                self.model = self.ready.model
            torch.manual_seed(spec.seed)  # for random operators in steps
            yield

    def _wait(self) -> None:
        """Wait until the accelerator has computed; copies for the next step may still run."""
        if self.spec.device and place_of(self.spec).type != "cpu":
            import torch

            torch.accelerator.current_stream(place_of(self.spec)).synchronize()

    def step(self, order: str = "") -> dict[str, Any]:
        """Make one training step and return its times, its loss and the session's statistics.

        Args:
            order: the module paths for the clairvoyant, as JSON.
        """
        if self.clairvoyant is not None:
            self.clairvoyant.tell(json.loads(order))
        sample = next(self.samples)
        if self.spec.device:
            sample = moved(sample, place_of(self.spec))
        self._wait()
        before = _moved()
        begin = time.perf_counter()
        with self.ready.around():
            loss = sample.call(self.model)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.ready.optimizer.step()
        self.ready.optimizer.zero_grad()
        self._wait()
        end = time.perf_counter()
        reply: dict[str, Any] = {
            "seconds": end - begin,
            "forward_s": forward - begin,
            "backward_s": backward - forward,
            "optimizer_s": end - backward,
            "loss": float(loss.item()).hex(),
        }
        if self.visited is not None:
            reply["visited"] = self.visited.copy()
            self.visited.clear()
        if self.session is not None:
            stats = dataclasses.asdict(self.session.log.steps[-1])
            reply["stats"] = {key: finite(value) for key, value in stats.items()}
        if self.ready.model is not None:
            pairs = zip(("bytes_in", "bytes_out"), _moved(), before, strict=True)
            reply["stats"] = {name: now - was for name, now, was in pairs}
        if self.clock is not None:
            log = [] if self.session is None else self.session.log.transfers
            timed = self.clock.take(log[self._transfers :])
            self._transfers = len(log)
            reply["stats"] = reply.get("stats", {}) | timed
        return reply

    def operators(self) -> dict[str, Any]:
        """Make one step and return its result with ``operators_s``, the time of torch's operators
        in forward and backward. A profiler would have updates made in ``step()``."""
        sample = next(self.samples)
        losses: list[Any] = []

        def run() -> None:
            with self.ready.around():
                losses.append(sample.call(self.model))
            losses[0].backward()

        begin = time.perf_counter()
        seconds = operators_seconds(run)
        self.ready.optimizer.step()
        self.ready.optimizer.zero_grad()
        return {
            "seconds": time.perf_counter() - begin,
            **dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), 0.0),
            "loss": float(losses[0].item()).hex(),
            "operators_s": seconds,
        }

    def describe(self) -> dict[str, Any]:
        """Make one step and return its visits.

        Returns:
            The result of `step`, and ``visits``: for each call of a module with parameters, in
            order, the parameter names, and the bytes that autograd saved until the next call.
        """
        import torch

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        visits: list[list[Any]] = []
        seen: dict[int, torch.Tensor] = {}  # kept alive, so that no address is reused

        def visit(module: torch.nn.Module, args: Any) -> None:
            mine = [names[id(p)] for p in module._parameters.values() if p is not None]
            visits.append([mine, 0])

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in own and address not in seen and visits:
                seen[address] = tensor.detach()
                visits[-1][1] += storage.nbytes()
            return tensor

        handles = [
            module.register_forward_pre_hook(visit)
            for module in self.model.modules()
            if any(p is not None for p in module._parameters.values())
        ]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            reply = self.step()
        seen.clear()
        for handle in handles:
            handle.remove()
        sizes = {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in self.model.named_parameters()
        }
        return {**reply, "visits": visits, "parameters": sizes}

    def state(self) -> dict[str, Any]:
        """Return the state of the block so far; {} for plain training."""
        if self.session is None:
            return {}
        return {
            "paging": self.session.paging,
            "sizing": self.session.sizing and dataclasses.asdict(self.session.sizing),
            "peak_fast_bytes": max((s.peak_fast_bytes for s in self.session.log.steps), default=0),
        }


def _moved() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 512 * usage.ru_inblock, 512 * usage.ru_oublock


def finite(value: Any) -> Any:
    """Return ``value``, or None for a float that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_RUNNING: list[Trainer] = []
"""The trainer of this process."""


def build(spec: Spec) -> int:
    """Build the trainer; return the bytes charged to this process's cgroup, -1 without one."""
    from dynoffload.memory.limits import cgroup_directories

    _RUNNING.append(Trainer(spec))
    for directory, _, usage in cgroup_directories()[:1]:
        return int((directory / usage).read_text(encoding="ascii"))
    return -1


def enter() -> None:
    """Enter the block, where weights are materialized."""
    NEVER_LEFT.enter_context(_RUNNING[-1].training())


def ask(do: str, *args: str) -> dict[str, Any]:
    """Return the result of the trainer's method ``do``."""
    answer: dict[str, Any] = getattr(_RUNNING[-1], do)(*args)
    return answer
