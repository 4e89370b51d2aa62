"""Gradients that leave the accelerator as backward makes them.

Each is copied to pinned host memory, and the parameter lets go of it. So the accelerator holds no
more gradients than are being copied, which is bounded.

[Note: accumulation]  Over several backwards a gradient is added up on the host, in its own dtype
and in the order of the backwards. That is the addition that autograd makes in ``p.grad``, so the
bits are the same. Each addend passes through slots of fixed size.

[Note: norms]  A gradient's 2-norm is computed where it was made, before it leaves. That of one that
was added up, and any other norm, is computed on the host.

[Note: order]  Without a scaler a gradient is clipped in its own dtype, as
`torch.nn.utils.clip_grad_norm_` does, and then read as float32. With one it is read as float32,
unscaled, and clipped then: nothing is lost to half precision.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer.link import Link
from dynoffload.host_optimizer.states import ParameterState, flat, shaped
from dynoffload.memory.accelerator.streams import StreamEvent

_SLOTS = 3  # for gradients that are added to others
_IN_FLIGHT = 4  # slots' sizes of gradients that may be on their way


@dataclass(frozen=True)
class GradientTransform:
    """Factors of all gradients of a step.

    Attributes:
        inverse: of the loss scale, float32 of no dimension; None where there is none.
        coefficients: of one clipping after the other, of no dimension.
    """

    inverse: torch.Tensor | None = None
    coefficients: tuple[torch.Tensor, ...] = ()

    def clipped(self, coefficient: torch.Tensor) -> GradientTransform:
        """Return the same with one more clipping."""
        return replace(self, coefficients=(*self.coefficients, coefficient))

    @property
    def is_identity(self) -> bool:
        """Whether gradients are read as they are."""
        return self.inverse is None and not self.coefficients

    def to_host(self) -> GradientTransform:
        """Return the same, for gradients on the CPU."""
        inverse = None if self.inverse is None else self.inverse.cpu()
        return GradientTransform(inverse, tuple(one.cpu() for one in self.coefficients))

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a transformed gradient of any shape, for its norm; it is not changed."""
        if self.inverse is not None:
            gradient = gradient.float() * self.inverse.to(gradient.device)
        for coefficient in self.coefficients:
            gradient = gradient * coefficient.to(gradient.device)
        return gradient

    def read(self, gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return a transformed flat gradient as float32; float32 and clipped ones change in place.

        Args:
            gradient: of any floating dtype; what it holds may be lost.
            scratch: float32, at least as large; for a gradient that is not float32.
        """
        if self.inverse is None:
            for coefficient in self.coefficients:
                gradient.mul_(coefficient)
        wide = gradient
        if gradient.dtype != torch.float32:
            wide = scratch[: len(gradient)].copy_(gradient)
        if self.inverse is not None:
            wide.mul_(self.inverse)
            for coefficient in self.coefficients:
                wide.mul_(coefficient)
        return wide


@dataclass(eq=False)
class HostGradient:
    """A gradient that is, or will be, on the host.

    Attributes:
        memory: flat, in the parameter's dtype, pinned.
        copied: the moment at which its first copy is there.
        norm: 2-norm, where it was made; None where that is not known of the whole.
        additions: of later backwards.
    """

    memory: torch.Tensor
    copied: StreamEvent
    norm: torch.Tensor | None
    additions: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Hold the calling thread until it is all there."""
        self.copied.wait()
        for addition in self.additions:
            addition.result()

    def is_finite(self) -> bool:
        """Return whether every element is a finite number, as the host finds out."""
        self.wait()
        largest = torch.linalg.vector_norm(self.memory, torch.inf) if len(self.memory) else None
        return largest is None or bool(largest.isfinite())


class GradientOffload:
    """Copies gradients to the host.

    Args:
        link: to the accelerator.
        slot_bytes: of each slot for gradients that are added to others. Backward waits while more
            than four times as many bytes are on their way.

    Attributes:
        gradients: since the last `take`.
        transform: that the next step makes of them as it reads them.
    """

    def __init__(self, link: Link, slot_bytes: int) -> None:
        self._link, self._slot_bytes = link, slot_bytes
        self.gradients: dict[ParameterState, HostGradient] = {}
        self.transform = GradientTransform()
        self._bank = 0
        self._flight: deque[tuple[StreamEvent, torch.Tensor]] = deque()
        self._flight_bytes = 0
        self._mutex = threading.RLock()
        self._slots: queue.SimpleQueue[torch.Tensor] | None = None
        self._slot_memory: list[torch.Tensor] = []
        self._adder = ThreadPoolExecutor(1, "dynoffload-gradients")

    @torch.no_grad()
    def send(self, state: ParameterState) -> None:
        """Send a parameter's gradient to the host, and let go of it.

        Raises:
            ConfigError: it is sparse, or of another dtype than the parameter.
        """
        gradient = state.parameter.grad
        if gradient is None:
            return
        dense = _like(check_gradient(state, gradient).detach(), state.parameter)
        state.parameter.grad = None
        with self._mutex, torch.inference_mode(False):
            before = self.gradients.get(state)
            if before is None:
                norm = torch.linalg.vector_norm(dense, 2.0)
                memory = state.gradient_memory[self._bank]
                self.gradients[state] = HostGradient(memory, self._copy(memory, flat(dense)), norm)
            else:
                self._add(before, flat(dense))
            self._free_sent()

    def _add(self, gradient: HostGradient, elements: torch.Tensor) -> None:
        """See [Note: accumulation]."""
        gradient.norm = None
        step = self._slot_bytes // elements.element_size()
        for begin in range(0, len(elements), step):
            part = elements[begin : begin + step]
            slot = self._free_slots().get()
            content = slot[: part.nbytes].view(part.dtype)
            copied = self._copy(content, part)
            target = gradient.memory[begin : begin + len(part)]
            added = self._adder.submit(self._add_part, target, content, copied, slot)
            gradient.additions.append(added)

    def _add_part(
        self, target: torch.Tensor, content: torch.Tensor, copied: StreamEvent, slot: torch.Tensor
    ) -> None:
        try:
            copied.wait()  # the gradient's first copy was queued before this one
            with torch.no_grad():
                target.add_(content)
        finally:
            self._free_slots().put(slot)

    def _free_slots(self) -> queue.SimpleQueue[torch.Tensor]:
        if self._slots is None:
            self._slots = queue.SimpleQueue()
            for _ in range(_SLOTS):
                self._slot_memory.append(self._link.host(self._slot_bytes))
                self._slots.put(self._slot_memory[-1])
        return self._slots

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> StreamEvent:
        """Queue a copy, and hold its source until it is over."""
        copied = self._link.copy_out(
            target.view(torch.uint8), source.view(torch.uint8), [self._link.now()]
        )
        self._flight.append((copied, source))
        self._flight_bytes += source.nbytes
        return copied

    def _free_sent(self) -> None:
        """Let go of what has been copied, and wait while too much is on its way."""
        while self._flight:
            copied, source = self._flight[0]
            if not copied.reached():
                if self._flight_bytes <= _IN_FLIGHT * self._slot_bytes:
                    return
                copied.wait()
            self._flight.popleft()
            self._flight_bytes -= source.nbytes

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        with self._mutex:
            while self._flight:
                copied, _ = self._flight.popleft()
                copied.wait()
            self._flight_bytes = 0
            for gradient in self.gradients.values():
                gradient.wait()

    def take(self) -> tuple[dict[ParameterState, HostGradient], GradientTransform]:
        """Return the gradients so far, and their transform. Later ones use the other memory, where
        there are two."""
        with self._mutex:
            taken, transform = self.gradients, self.transform
            self.gradients, self.transform = {}, GradientTransform()
            if any(len(state.gradient_memory) > 1 for state in taken):
                self._bank = 1 - self._bank
            return taken, transform

    @torch.no_grad()
    def zero(self, *, set_to_none: bool) -> None:
        """Forget the gradients so far, or make them zero."""
        self.settle()
        self.transform = GradientTransform()
        if set_to_none:
            self.gradients = {}
        for gradient in self.gradients.values():
            gradient.memory.zero_()
            gradient.norm = None
            gradient.additions.clear()

    def unscale(self, inverse: torch.Tensor) -> bool:
        """Have gradients read times ``inverse``; return whether all are finite as they are."""
        self.transform = replace(self.transform, inverse=inverse)
        gradients = list(self.gradients.values())
        known = [(one, one.norm.float()) for one in gradients if one.norm is not None]
        finite = torch.stack([norm for _, norm in known]).isfinite().tolist() if known else ()
        # In half precision the norm of finite elements may be infinite.
        sure = {one for (one, _), is_finite in zip(known, finite, strict=True) if is_finite}
        return all(one.is_finite() for one in gradients if one not in sure)

    def clip(
        self,
        states: Sequence[ParameterState],
        max_norm: float,
        order: float,
        *,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """Have gradients read as clipped by their common norm, which is returned.

        Args:
            states: of all parameters, in the order in which their norms are put together.
            max_norm: of all gradients.
            order: of the norm.
            error_if_nonfinite: raise if the norm is no finite number.

        Raises:
            RuntimeError: the norm is not finite, and was to be.
        """
        present = [state for state in states if state in self.gradients]
        if not present:  # what comes later is not clipped
            return torch.tensor(0.0)
        total = _total_norm([self._norm(state, order) for state in present], order)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {order} of the gradients is {total.item()}: pass "
                "error_if_nonfinite=False to scale them by it"
            )
        self.transform = self.transform.clipped(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def _norm(self, state: ParameterState, order: float) -> torch.Tensor:
        """See [Note: norms]."""
        gradient = self.gradients[state]
        if self.transform.is_identity and order == 2.0 and gradient.norm is not None:
            return gradient.norm
        gradient.wait()
        memory = self.transform.of(shaped(gradient.memory, state.parameter))
        norm: torch.Tensor = torch.linalg.vector_norm(memory, order)
        return norm.to(self._link.device)

    def close(self) -> None:
        """Give memory back; no gradient is sent any more."""
        self.zero(set_to_none=True)
        self._adder.shutdown()
        while self._slot_memory:
            self._link.release(self._slot_memory.pop(), held=False)


def check_gradient(state: ParameterState, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient by which a master can be updated.

    Raises:
        ConfigError: it is sparse, or of another dtype than the parameter.
    """
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {state.name} is {gradient.layout}, and HostOptimizer takes dense "
            "ones: pass sparse=False to the embedding, or leave its weight to another optimizer"
        )
    if gradient.dtype != state.parameter.dtype:
        raise ConfigError(
            f"the gradient of {state.name} is {gradient.dtype}, and the parameter "
            f"{state.parameter.dtype}: leave grad_dtype as it is"
        )
    return gradient


def _like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that lies in memory as its parameter does."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


def _total_norm(norms: list[torch.Tensor | None], order: float) -> torch.Tensor:
    """Return the norm of all gradients, from each one's.

    They are stacked as `torch.nn.utils.get_total_norm` does with ``foreach=False``: by dtype, in
    the order in which torch groups them.
    """
    grouped = _group_tensors_by_device_and_dtype([norms])
    ordered = [norm for (some,), _ in grouped.values() for norm in some if norm is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), order)
    return total
