"""Routing probes and hints: a running network's estimates of its coming routing decisions.

The user gives probes, or the network's method ``routing_probes()``, or those of its routers are
found (`dynoffload.profiler.routers`). When the module of a given probe is called, that probe and
the next one are evaluated on its arguments. A router applied to its own input gives the experts
before any of them runs; the next layer's router, applied to this layer's input, is mostly right.
Each costs one small product. The recorder stores hints in traces (`Trace.hints`), from which pilots
learn how reliable they are.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynoffload.errors import TraceError
from dynoffload.profiler.experts import slices_in, split_path, unit_path
from dynoffload.profiler.input_features import advising
from dynoffload.profiler.routers import mixtures_in

logger = logging.getLogger(__name__)

_logged: set[str] = set()  # probes whose first problem was logged since the last `probes_of`

_SLACK = 1e-3  # rounding error allowed outside 0 to 1
MAX_HINTED = 4096
"""The most blocks that one probe decides about."""


@dataclass(frozen=True)
class RoutingProbe:
    """A place where a network decides which blocks run.

    Attributes:
        path: path of the module whose call decides.
        blocks: paths of the units it decides about: modules, or experts ``path[number]`` of a layer
            with fused ones.
        predict: given the positional arguments of its own module, or of the previous probe's,
            returns the probability that each of ``blocks`` runs, ``[blocks]``; None if it cannot
            estimate it. It is called without gradients and must change nothing; torch's CPU random
            state is restored after it.
        reads: paths of the modules whose weights ``predict`` reads, if it is to be asked only while
            none of these is paged; None: what it may read is fetched.
    """

    path: str
    blocks: tuple[str, ...]
    predict: Callable[..., Tensor | None]
    reads: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RoutingHint:
    """One estimate, made when a probe's module is called, by that probe or the next one.

    Attributes:
        call: index into `Trace.calls` of the call at whose start it was made.
        blocks: paths of the modules it is about.
        values: probability that each runs, 0 to 1.
    """

    call: int
    blocks: tuple[str, ...]
    values: tuple[float, ...]


def probes_of(
    model: nn.Module, given: Sequence[RoutingProbe] | None = None
) -> dict[str, tuple[RoutingProbe, ...]]:
    """Return the probes evaluated at the call of each module, by its path.

    Args:
        model: the network.
        given: the user's probes; None: those of ``model.routing_probes()``, or, without this
            method, those found.

    Raises:
        TraceError: if what is given are no probes of the model's units.
    """
    _logged.clear()
    method, made, name = getattr(model, "routing_probes", None), given, "routing_probes="
    if given is None and callable(method) and not isinstance(method, nn.Module):
        name, made = f"{type(model).__name__}.routing_probes()", method()
    if made is None:
        return _found(model)
    if not isinstance(made, list | tuple) or not all(isinstance(one, RoutingProbe) for one in made):
        raise TraceError(f"{name} must return a list of dynoffload.profiler.RoutingProbe")
    found: Sequence[RoutingProbe] = made
    if len({probe.path for probe in found}) != len(found):
        raise TraceError(f"{name} names one probe twice: each decides in one place")
    modules = dict(model.named_modules())
    paths = modules.keys() | {
        unit_path(path, number)
        for path in {split_path(block)[0] for probe in found for block in probe.blocks}
        for number in range(max(slices_in(modules.get(path, nn.Module())).values(), default=0))
    }
    for probe in found:
        strangers = {probe.path, *probe.blocks} - paths
        if strangers or not 0 < len(probe.blocks) <= MAX_HINTED:
            raise TraceError(
                f"{name} names {sorted(strangers)[:3]}, which are none of its units"
                if strangers
                else f"{name}: {probe.path!r} decides about "
                f"{len(probe.blocks)} blocks; it must be between 1 and {MAX_HINTED}"
            )
    return {here.path: tuple(found[place : place + 2]) for place, here in enumerate(found)}


def _found(model: nn.Module) -> dict[str, tuple[RoutingProbe, ...]]:
    table: dict[str, list[RoutingProbe]] = defaultdict(list)
    before = None
    for mixture in mixtures_in(model):
        for path, reads, predict in mixture.probes(before):
            table[path].append(RoutingProbe(path, mixture.blocks, predict, reads))
        before = mixture
    return {path: tuple(probes) for path, probes in table.items()}


def read_early(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that must be in memory for the probes that are found to be asked."""
    try:
        method = getattr(model, "routing_probes", None)
        if callable(method) and not isinstance(method, nn.Module):
            return set()  # they are not looked for
        probes = [one for probes in _found(model).values() for one in probes]
    except Exception:  # in user code; who asks the probes tells of it
        return set()
    modules = [model.get_submodule(path) for one in probes for path in one.reads or ()]
    return {p for module in modules for p in module._parameters.values() if p is not None}


def hinted(
    table: Mapping[str, Sequence[RoutingProbe]], path: str, args: Sequence[Any], call: int
) -> list[RoutingHint]:
    """Return the hints that the call at ``path`` gives, none if it is not a probe's.

    A probe is given the arguments of its module or of the previous probe's. Its errors are logged
    and give no hint, since hints are optional.

    Raises:
        TraceError: it wrote into an argument, which would change the values forward sees.
    """
    made = []
    for probe in table.get(path, ()):
        with advising(f"the probe of {probe.path!r}", args):
            try:
                values = _values(probe, args)
            except Exception as error:
                _warn_once(probe.path, f"{type(error).__name__}: {error}")
                continue
        if values is not None:
            made.append(RoutingHint(call, probe.blocks, values))
    return made


def _values(probe: RoutingProbe, args: Sequence[Any]) -> tuple[float, ...] | None:
    """Return a probe's estimate, None if it has none."""
    values = probe.predict(*args)
    if values is None:
        return None
    flat = torch.as_tensor(values).detach().float().cpu().reshape(-1).numpy()
    if len(flat) != len(probe.blocks):
        raise ValueError(f"{len(flat)} values for {len(probe.blocks)} blocks")
    if not (flat.min() >= -_SLACK and flat.max() <= 1 + _SLACK):
        _warn_once(probe.path, "values that are no chances, 0 to 1; they are cut off")
    return tuple(np.clip(np.nan_to_num(flat, nan=0.5), 0, 1).tolist())


def _warn_once(path: str, what: str) -> None:
    if path not in _logged:
        _logged.add(path)
        logger.warning("hints for %s: %s", path, what)
