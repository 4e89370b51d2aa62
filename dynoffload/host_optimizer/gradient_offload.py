"""Copies gradients to the host as backward produces them, and frees them on the accelerator.

Each is copied to pinned host memory, and the parameter's ``grad`` is set to None. So the
accelerator holds only the gradients that are being copied; their bytes are bounded.

[Note: accumulation]  Over several backwards a gradient is accumulated on the host, in its own dtype
and in the order of the backwards. Autograd does the same addition in ``p.grad``, so the bits are
equal. Each addend passes through slots of fixed size.

[Note: norms]  A gradient's 2-norm is computed on its device, before it is copied. The norm of an
accumulated gradient, and any other norm, is computed on the host.

[Note: order]  Without a scaler a gradient is clipped in its own dtype, as in
`torch.nn.utils.clip_grad_norm_`, and then converted to float32. With a scaler it is converted
first, then unscaled and clipped, so no precision is lost to the half type.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

_SLOTS = 3  # for gradients that are added to earlier ones
_IN_FLIGHT = 4  # limit of bytes being copied, as a multiple of the slot size


@dataclass(frozen=True)
class GradientTransform:
    """Factors applied to all gradients of a step.

    Attributes:
        inverse: of the loss scale, a float32 scalar; None without a scaler.
        coefficients: scalars, one per clipping, in order.
    """

    inverse: torch.Tensor | None = None
    coefficients: tuple[torch.Tensor, ...] = ()

    def clipped(self, coefficient: torch.Tensor) -> GradientTransform:
        """Return a transform with one more clipping."""
        return replace(self, coefficients=(*self.coefficients, coefficient))

    @property
    def is_identity(self) -> bool:
        """Whether gradients are used unchanged."""
        return self.inverse is None and not self.coefficients

    def to_host(self) -> GradientTransform:
        """Return the same transform with its scalars on the CPU."""
        inverse = None if self.inverse is None else self.inverse.cpu()
        return GradientTransform(inverse, tuple(one.cpu() for one in self.coefficients))

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a transformed gradient of any shape, for its norm; does not change the input."""
        if self.inverse is not None:
            gradient = gradient.float() * self.inverse.to(gradient.device)
        for coefficient in self.coefficients:
            gradient = gradient * coefficient.to(gradient.device)
        return gradient

    def read(self, gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return a transformed flat gradient as float32; may overwrite its input.

        Args:
            gradient: of any floating dtype; float32 and clipped ones change in place.
            scratch: float32, at least as large; used for a gradient that is not float32.
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
    """A gradient on the host, or on its way there.

    Attributes:
        memory: flat, in the parameter's dtype, pinned.
        copied: event of its first copy.
        norm: 2-norm, computed on its device; None if unknown, as after an addition.
        additions: of later backwards.
    """

    memory: torch.Tensor
    copied: StreamEvent
    norm: torch.Tensor | None
    additions: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Block the calling thread until the copy and all additions are complete."""
        self.copied.wait()
        for addition in self.additions:
            addition.result()

    def is_finite(self) -> bool:
        """Return whether all elements are finite, computed on the host."""
        self.wait()
        largest = torch.linalg.vector_norm(self.memory, torch.inf) if len(self.memory) else None
        return largest is None or bool(largest.isfinite())


class GradientOffload:
    """Copies gradients to the host.

    Args:
        link: to the accelerator.
        slot_bytes: of each slot for gradients that are added to earlier ones. Backward waits while
            more than four times as many bytes are being copied.

    Attributes:
        gradients: since the last `take`.
        transform: applied by the next step when it reads the gradients.
    """

    def __init__(self, link: Link, slot_bytes: int) -> None:
        self._link, self._slot_bytes = link, slot_bytes
        self.gradients: dict[ParameterState, HostGradient] = {}
        self.transform = GradientTransform()
        self._bank = 0
        self._in_flight: deque[tuple[StreamEvent, torch.Tensor]] = deque()
        self._in_flight_bytes = 0
        self._mutex = threading.RLock()
        self._slots: queue.SimpleQueue[torch.Tensor] | None = None
        self._slot_memory: list[torch.Tensor] = []
        self._adder = ThreadPoolExecutor(1, "dynoffload-gradients")

    @torch.no_grad()
    def send(self, state: ParameterState) -> None:
        """Copy a parameter's gradient to the host, and set its ``grad`` to None.

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
            self._release_copied()

    def _add(self, gradient: HostGradient, elements: torch.Tensor) -> None:
        """Add to an earlier gradient; see [Note: accumulation]."""
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
        """Queue a copy, and keep its source alive until it is complete."""
        copied = self._link.copy_out(
            target.view(torch.uint8), source.view(torch.uint8), [self._link.now()]
        )
        self._in_flight.append((copied, source))
        self._in_flight_bytes += source.nbytes
        return copied

    def _release_copied(self) -> None:
        """Release sources whose copies are complete; wait while too many bytes are in flight."""
        while self._in_flight:
            copied, source = self._in_flight[0]
            if not copied.reached():
                if self._in_flight_bytes <= _IN_FLIGHT * self._slot_bytes:
                    return
                copied.wait()
            self._in_flight.popleft()
            self._in_flight_bytes -= source.nbytes

    def settle(self) -> None:
        """Wait until all copies and additions are complete."""
        with self._mutex:
            while self._in_flight:
                copied, _ = self._in_flight.popleft()
                copied.wait()
            self._in_flight_bytes = 0
            for gradient in self.gradients.values():
                gradient.wait()

    def take(self) -> tuple[dict[ParameterState, HostGradient], GradientTransform]:
        """Return the gradients so far, and their transform. Later gradients use the other memory
        bank, if there are two."""
        with self._mutex:
            taken, transform = self.gradients, self.transform
            self.gradients, self.transform = {}, GradientTransform()
            if any(len(state.gradient_memory) > 1 for state in taken):
                self._bank = 1 - self._bank
            return taken, transform

    @torch.no_grad()
    def zero(self, *, set_to_none: bool) -> None:
        """Discard the gradients so far, or fill them with zeros."""
        self.settle()
        self.transform = GradientTransform()
        if set_to_none:
            self.gradients = {}
        for gradient in self.gradients.values():
            gradient.memory.zero_()
            gradient.norm = None
            gradient.additions.clear()

    def unscale(self, inverse: torch.Tensor) -> bool:
        """Multiply gradients by ``inverse`` when read; return whether all were finite."""
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
        """Clip gradients when read, by their total norm; return that norm.

        Args:
            states: of all parameters, in the order in which norms are combined.
            max_norm: of all gradients.
            order: of the norm.
            error_if_nonfinite: whether to raise if the norm is not finite.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        present = [state for state in states if state in self.gradients]
        if not present:  # later gradients are not clipped
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
        """Return one gradient's norm; see [Note: norms]."""
        gradient = self.gradients[state]
        if self.transform.is_identity and order == 2.0 and gradient.norm is not None:
            return gradient.norm
        gradient.wait()
        memory = self.transform.of(shaped(gradient.memory, state.parameter))
        norm: torch.Tensor = torch.linalg.vector_norm(memory, order)
        return norm.to(self._link.device)

    def warn_of_lost(self, what: str) -> None:
        """Warn of gradients that no step has used, as ``what`` discards them."""
        self.settle()
        lost = next((state.name for state, one in self.gradients.items() if one.memory.any()), "")
        if lost:
            logger.warning(
                "HostOptimizer %s before step(): the gradients that it had taken, as of %s, are "
                "lost: call step() or zero_grad() first, or repeat backward",
                what,
                lost,
            )

    def close(self) -> None:
        """Release all memory; no gradient can be sent afterwards. Warn of gradients not used."""
        self.warn_of_lost("was closed or dropped")
        self.zero(set_to_none=True)
        self._adder.shutdown()
        while self._slot_memory:
            self._link.release(self._slot_memory.pop(), held=False)


def check_gradient(state: ParameterState, gradient: torch.Tensor) -> torch.Tensor:
    """Check that a master can be updated by ``gradient``, and return it.

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
    """Return a gradient with the strides of its parameter."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


def _total_norm(norms: list[torch.Tensor | None], order: float) -> torch.Tensor:
    """Return the norm of all gradients from their individual norms.

    They are stacked as in `torch.nn.utils.get_total_norm` with ``foreach=False``: by dtype, in
    torch's grouping order.
    """
    grouped = _group_tensors_by_device_and_dtype([norms])
    ordered = [norm for (some,), _ in grouped.values() for norm in some if norm is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), order)
    return total
