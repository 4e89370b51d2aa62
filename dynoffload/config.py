"""What a user may set: `OffloadConfig` for one session, and the process-wide defaults of `run`.

`OffloadConfig` validates options when it is created, so no other code checks them again. The
defaults carry the options of ``dynoffload run --budget … script.py`` to a script that only calls
``offload(model, optimizer)``: they fill what the call leaves open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.units import KiB, MiB, parse_bytes

ACCELERATOR = "accelerator"
BACKENDS = ("auto", "pager", "mapped", ACCELERATOR)
POLICIES = ("pilot", "repeat", "on-demand")
DEFERRALS = ("auto", "never")
LEAST_PAGE = 4 * KiB


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}={value!r} in the environment is not 0 or 1")
    return value == "1"


@dataclass(frozen=True)
class OffloadConfig:
    """Options of one session beyond the budget and the pilot.

    Sizes in bytes are read as ``budget`` is: an int, or a text such as ``"512MiB"``. Each option
    says when to change it.

    Attributes:
        backend: for models on the CPU: ``"pager"`` (userfaultfd), ``"mapped"`` (mapped spill file)
            or ``"auto"``: the pager if the system has it, else the mapped file. The plan line,
            logged at INFO, names the choice. On an accelerator: ``"accelerator"``, which ``"auto"``
            selects. Name one to have a system without it refused.
        policy: ``"auto"`` is the choice of ``dynoffload run --policy``, else ``"pilot"``.
            ``"pilot"`` prefetches by the pilot's prediction while that has recently been better
            than the last order, else by the last order. ``"repeat"`` prefetches by the last order,
            and a step finds its place again after a visit out of order. If prefetching by these
            is slower than on-demand, it is switched off, and this is logged. ``"on-demand"`` does
            not prefetch, and evicts the least recently used first.
        defer_updates: ``"auto"`` defers each paged parameter's optimizer update to just before its
            next use if the backend can guard it; ``"never"`` updates inside ``step()``. Pass that
            if an error says so: a thread that the pager cannot interrupt reads pending updates.
        rollback: undo a step of a `torch.optim` optimizer that fails half way, by an error of the
            optimizer or of the disk. Parameters and optimizer state are then those of the last
            finished step. Changes of the loop itself are not undone: hyperparameters, buffers that
            forward writes, counts of schedulers and scalers. What a step changes is written once
            more, to a second file in the spill directory. All updates of a step, also of experts
            that are not hit, are made before the next step's. Resident mode is off. Pass True if a
            lost step must not need a checkpoint. Optimizers that are not of `torch.optim`,
            subclasses included, fail as in plain training.
        optimizer_in_backward: make each update as soon as its gradient is complete. The gradient is
            then freed and never moved: fewer bytes, and a shorter next forward. Pass True if the
            loop calls ``backward()`` once for each ``step()``, then ``zero_grad()``, does not read,
            clip or scale gradients, and between the two neither uses the model nor changes options.
            Another loop gets a `ConfigError` in its first step, before anything is changed; later,
            the step is lost. What goes unnoticed is in the guide.
            For one process and optimizers of `torch.optim`; not with ``rollback``.
        page_bytes: bytes of one page of the pool, a power of two from 4 KiB to 2 MiB; ``None``
            takes the largest that pads the parameters little and leaves the pool 40 pages. Pass
            what a `BudgetError` names.
        min_paged_bytes: tensors below this stay resident (and are counted); ``None``: the lesser
            of 1 MiB and 1/256 of the budget. With ``None``, adapters and whatever else trains
            beside frozen weights stay too, if they take at most 1/4 of the budget with gradients
            and state; so do routers that are asked early, if they take at most 1/8. Lower it if
            small parameters alone fill the budget, or if a larger weight is thawed in mid-run.
        slices: page fused parameters, with one matrix per expert, by expert, if the optimizer is
            elementwise. Pass False to measure what that is worth.
        page_activations: page what autograd saves in the model's forward. Pass False, so that it
            stays in memory, uncounted, where saved-tensor hooks are refused, as by
            `torch.func.grad` in forward.
        step_aside: switch paging off while the budget holds a step's measured peak, and what no
            step has used yet: untouched tensors, with their gradients and optimizer state. Pass
            False to measure paging under a budget that needs none.
        heap_slack_bytes: bytes beyond the budget, such as operators' temporaries and freed heap, at
            which the C library is asked to return its free pages. Lower it if the process must not
            grow as far; that takes time.
        rank_timeout: in a run of several processes: seconds that a rank may keep the others waiting
            before they end with a `RankError`. It is the process groups' timeout during the block.
            A process whose wait no timeout ends, ends itself with code 70. ``None``: as long as the
            groups allow, 30 minutes by default; a longer wait logs a warning. Set it if a hung run
            costs more than one that is ended.
        features: called with the root module's inputs, returns `InputFeatures` or a mapping of
            floats; ``None``: the model's ``sample_features`` if it has one, else shapes and tokens.
            Pass what a pilot's traces were recorded with.
        routing_probes: a list of `dynoffload.profiler.RoutingProbe`, which say ahead which modules
            or experts run; ``None``: the model's ``routing_probes()`` if it has one, else those
            found at the routers of fused experts. Pass your own for other routers, and ``()`` for
            none.
        debug: checksum all bytes of a region when it is evicted, and compare them when it is
            fetched. The pager always does so with a word of each 512 bytes; the mapped file skips
            what was touched meanwhile. On the pager, also fill the pool's free pages with NaNs. On
            by default if ``DYNOFFLOAD_DEBUG=1`` is set. It costs time, and no memory. Pass True if
            wrong values are suspected.
    """

    backend: str = "auto"
    policy: str = "auto"
    defer_updates: str = "auto"
    rollback: bool = False
    optimizer_in_backward: bool = False
    page_bytes: int | None = None
    min_paged_bytes: int | None = None
    slices: bool = True
    page_activations: bool = True
    step_aside: bool = True
    heap_slack_bytes: int = 512 * MiB
    rank_timeout: float | None = None
    features: Callable[..., Any] | None = None
    routing_probes: Sequence[Any] | None = None
    debug: bool = dataclasses.field(default_factory=lambda: _flag("DYNOFFLOAD_DEBUG"))

    def __post_init__(self) -> None:
        for name, known in (
            ("backend", BACKENDS),
            ("policy", ("auto", *POLICIES)),
            ("defer_updates", DEFERRALS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name}={value!r} is not an option: known are {', '.join(known)}"
                )
        for name in [field.name for field in dataclasses.fields(self) if field.type == "bool"]:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} is neither True nor False: pass one of them")
        if self.rollback and self.optimizer_in_backward:
            raise ConfigError(
                "rollback undoes whole steps, and optimizer_in_backward makes updates before them: "
                "pass one of the two"
            )
        for name in ("page_bytes", "min_paged_bytes", "heap_slack_bytes"):
            value = getattr(self, name)
            if value is not None or name == "heap_slack_bytes":
                object.__setattr__(self, name, parse_bytes(value, name))
        page = self.page_bytes
        if page is not None and (page & (page - 1) or not LEAST_PAGE <= page <= 2 * MiB):
            raise ConfigError(f"page_bytes={page} is not a power of two between 4096 and {2 * MiB}")
        if self.min_paged_bytes is not None and self.min_paged_bytes < 1:
            raise ConfigError(f"min_paged_bytes={self.min_paged_bytes} must be at least 1")
        wait = self.rank_timeout
        if wait is not None and (not _is_number(wait) or not 0 < wait < 1e6):
            raise ConfigError(f"rank_timeout={wait!r} is not a number of seconds: pass one above 0")
        if self.features is not None and not callable(self.features):
            raise ConfigError(f"features={self.features!r} is not callable")

    def with_policy(self, default: str | None = None) -> OffloadConfig:
        """Return these options; ``"auto"`` as the policy becomes ``default``, else ``"pilot"``."""
        if self.policy != "auto":
            return self
        return dataclasses.replace(self, policy=default or "pilot")

    @classmethod
    def of(cls, options: OffloadConfig | Mapping[str, Any] | None) -> OffloadConfig:
        """Return ``options`` as a config; a mapping may hold only known keys.

        Raises:
            ConfigError: names the unknown key and the known ones.
        """
        if options is None:
            return cls()
        if isinstance(options, OffloadConfig):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(
                "config is an OffloadConfig or a mapping such as {'policy': 'repeat'}, not "
                f"{options!r}"
            )
        known = tuple(field.name for field in dataclasses.fields(cls))
        for key in options:
            if key not in known:
                raise ConfigError(f"unknown option {key!r} in config: known are {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True)
class Defaults:
    """What ``offload()`` uses where its caller passes nothing; set by the command line.

    Quantities are read as ``offload`` reads them, and paths may be strings.

    Attributes:
        budget: bytes, or ``None``.
        pilot: path of a ``.pilot`` file, or ``None`` for the call's own default.
        policy: one of ``POLICIES``, or ``None``.
        spill_dir: directory of the spill file, or ``None``.
        host_budget: bytes of host memory below an accelerator, or ``None``.
        device: where to train, or ``None`` for where the model is.
        report: where the session writes its HTML page when the block ends.
        profile_dir: if set, ``offload()`` records traces there and pages nothing.
        profile_steps: steps to record before the script is stopped.
        on_end: called as a block ends, with its `Session` and the `ReportFiles` or ``None``.
    """

    budget: int | None = None
    pilot: Path | None = None
    policy: str | None = None
    spill_dir: Path | None = None
    host_budget: int | None = None
    device: str | None = None
    report: Path | None = None
    profile_dir: Path | None = None
    profile_steps: int | None = None
    on_end: Callable[[Any, Any], None] | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"policy={self.policy!r} is not an option: known are {known}")
        for name in ("budget", "host_budget"):
            if (value := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                object.__setattr__(self, name, parse_bytes(value, option))
        for name in ("pilot", "spill_dir", "report", "profile_dir"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(value))


_defaults = Defaults()


def no_budget(call: str) -> ConfigError:
    """Return the error if neither ``call`` nor the command line names a budget."""
    return ConfigError(
        f"no budget: pass {call}, or run the script with 'dynoffload run --budget 8GiB'"
    )


def defaults() -> Defaults:
    """Return the process-wide defaults."""
    return _defaults


def set_defaults(**options: Any) -> None:
    """Replace the process-wide defaults by those of `Defaults`; options not given are unset.

    Raises:
        ConfigError: if a value cannot be read or is not an option.
    """
    global _defaults
    _defaults = Defaults(**options)


@contextlib.contextmanager
def without_defaults() -> Iterator[None]:
    """Ignore the process-wide defaults in blocks that the library itself opens."""
    global _defaults
    before, _defaults = _defaults, Defaults()
    try:
        yield
    finally:
        _defaults = before


def clear_defaults() -> None:
    """Reset the process-wide defaults."""
    set_defaults()
