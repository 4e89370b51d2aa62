"""The session: what the user holds while a model trains under a budget."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig, defaults
from dynoffload.errors import ConfigError
from dynoffload.memory.device import Counters, Device
from dynoffload.memory.pager import Pager, probe
from dynoffload.memory.spill import default_spill_dir
from dynoffload.runtime.activations import Activations
from dynoffload.runtime.hooks import Hooks
from dynoffload.runtime.migrator import Migrator
from dynoffload.runtime.sizing import Sizing, sizing_of
from dynoffload.runtime.store import Slot, Store, view_of
from dynoffload.runtime.units import Unit, units_of
from dynoffload.runtime.updates import Updates
from dynoffload.units import format_bytes, parse_bytes

logger = logging.getLogger("dynoffload")


class Session:
    """A model and its optimizer under a budget; made by `offload`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sizing: Sizing,
        config: OffloadConfig,
        spill_dir: Path,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.config, self.sizing = config, sizing
        self._device: Device = Pager(
            sizing.pool_bytes,
            sizing.page_bytes,
            spill_dir,
            need=sizing.spill_bytes,
            threads=config.io_threads,
            record=config.record_events,
        )
        self.store = Store(self._device, sizing.min_paged_bytes)
        self.activations = Activations(
            self._device,
            sizing.chunk_bytes,
            sizing.min_moved_bytes,
            sizing.kept_bytes,
            on_borrowed=lambda region: self.migrator.backward_use(region),
            on_chunk=lambda region: self._device.touch([region]),
            on_open=lambda chunk: self.migrator.open_chunk(chunk),
            names=self.store.names,
        )
        self._device.reserve(sizing.reserve_bytes)
        for name, parameter in model.named_parameters():
            if self.store.pages(parameter):
                self.store.adopt_parameter(name, parameter)
        self.store.forget_sources()
        self.updates = (
            Updates(
                optimizer,
                self.store,
                self._device,
                defer=config.defer_updates == "auto",
                on_step=self._end_step,
            )
            if optimizer is not None
            else None
        )
        if self.updates is not None:
            self.updates.adopt_all()
        for slot in self.store.slots.values():
            self.store.adopt_gradient(slot)
        self.migrator = Migrator(
            self._device,
            self.updates,
            self.activations,
            reserve_bytes=sizing.reserve_bytes,
            prefetch=config.policy != "on-demand",
        )
        self._hooks = Hooks(
            model,
            units_of(model, self.store.slots),
            list(self.store.slots.values()),
            self.activations,
            on_begin=self._begin_forward,
            on_end=self._end_forward,
            on_visit=self._visit,
            on_gradient=self.store.adopt_gradient,
        )
        self._closing = threading.Event()
        self._guard: threading.Thread | None = None
        if self._device.guarded and self.updates is not None:
            self._guard = threading.Thread(
                target=self._serve, name="dynoffload-guard", daemon=True
            )
            self._guard.start()
        self._started = time.perf_counter()

    # What the hooks call

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.migrator.begin_forward(None)

    def _end_forward(self) -> None:
        self.activations.end_forward()
        self.migrator.end_forward()

    def _visit(self, unit: Unit) -> None:
        self.migrator.visit(unit)
        if self.updates is not None and self.updates.pending:
            for slot in unit.slots:
                self.updates.flush(slot)
        self._device.touch(unit.regions)

    def _end_step(self) -> None:
        self.migrator.end_step()

    def _serve(self) -> None:
        updates = self.updates
        assert updates is not None
        while not self._closing.is_set():
            region = self._device.handed(0.2)
            if region >= 0:
                updates.serve(region)
            elif region == -2:
                return

    # What the user calls

    def flush(self) -> None:
        """Make every update that was put off."""
        if self.updates is not None:
            self.updates.flush_all()

    def close(self) -> None:
        """Make all tensors ordinary again and give the pool and the spill file back."""
        if self.updates is not None:
            self.updates.close()
        self._hooks.remove()
        self._closing.set()
        if self._guard is not None:
            self._guard.join()
        self._restore()
        self._device.close()

    def _restore(self) -> None:
        moved: dict[int, torch.UntypedStorage] = {}

        def ordinary(region: int, tensor: torch.Tensor) -> torch.Tensor:
            storage = moved.get(region)
            if storage is None:
                ours = self._device.storage(region)
                self._device.acquire([region])
                storage = moved[region] = ours.clone()
                self._device.discard(region)
            return view_of(storage, tensor, tensor.storage_offset())

        with torch.no_grad():
            for parameter, slot in self.store.slots.items():
                if slot.gradient is not None and parameter.grad is not None:
                    held = parameter.grad
                    if self._device.owner(held.untyped_storage().data_ptr()) == slot.gradient:
                        parameter.grad = ordinary(slot.gradient, held)
                parameter.data = ordinary(slot.region, parameter.data)
                if self.optimizer is not None:
                    state = self.optimizer.state.get(parameter, {})
                    for key, region in slot.states.items():
                        if key in state:
                            state[key] = ordinary(region, state[key])
