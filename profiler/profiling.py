"""A minimal training loop around a `Recorder`, for profiling without a user loop."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import TraceError
from dynoffload.profiler.input_features import Features
from dynoffload.profiler.network import fingerprint
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.routing import RoutingProbe
from dynoffload.profiler.storage import SUFFIX, load_trace, save_trace
from dynoffload.profiler.trace import Trace

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"step-(\d{{6,}}){re.escape(SUFFIX)}")


def profile(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    out: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    features: Features | None = None,
    routing_probes: Sequence[RoutingProbe] | None = None,
    source: Callable[[Any], str] | None = None,
    progress: bool = True,
) -> list[Path]:
    """Train ``model`` on ``batches``, one step each, and write one trace per step.

    Each step is forward, backward and, with an optimizer, ``step()``; its gradients are then set
    to None. Without an optimizer the parameters do not change. Step numbers continue after the
    traces already in ``out``.

    Args:
        model: the network, in the mode (train or eval) to profile.
        batches: its inputs. A mapping is passed by name, a tuple or list by position, an object
            with a tuple ``args`` (and perhaps a dict ``kwargs``) by those, anything else as the
            only argument. If ``loss`` is given, forward gets only as many items of a tuple or
            list as it has positional parameters: of ``(x, y)`` only ``x``, if it has one.
        out: directory for the traces; created if missing.
        optimizer: the optimizer to step.
        loss: computes a scalar from (output, batch). The default is the output's ``loss``
            attribute or item, the first item of a tuple or list, or the output itself.
        features: featurizer for samples, as in `describe_input`.
        routing_probes: the user's own, as in `OffloadConfig`.
        source: returns the file or document a batch is from, so that a pilot can be scored on
            unseen sources. By default the batch's own ``source``, if it has one.
        progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        The files, in order.

    Raises:
        TraceError: if ``out`` cannot be written, no loss can be found, or ``batches`` is empty.
    """
    from rich.console import Console
    from rich.progress import Progress

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            f"{folder}: cannot be made a directory of traces ({error.strerror or error})"
        ) from error
    if beside := of_another(folder, model):
        raise TraceError(
            f"{folder} holds traces of another network, such as {beside.name}: name another "
            "directory for each network"
        )
    number = next_number(folder)
    paths: list[Path] = []
    current: Any = None

    def write(trace: Trace) -> None:
        trace.step = number + len(paths)
        path = file_of_step(folder, trace.step)
        save_trace(trace, path)
        paths.append(path)

    recorder = Recorder(
        model,
        optimizer,
        features=features,
        routing_probes=routing_probes,
        on_step=write,
        source=lambda: (source or _source_of)(current),
    )
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    with recorder, Progress(console=console, transient=True, disable=hidden) as bar:
        for batch in bar.track(batches, description="profile"):
            current = batch
            output = call_model(model, batch, some=loss is not None)
            torch.autograd.backward(loss_of(output, batch, loss))
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
    if not paths:
        raise TraceError(f"nothing to profile: `batches` gave no batch, {folder} has no new trace")
    logger.info("profiled %d steps into %s", len(paths), folder)
    return paths


def call_model(model: torch.nn.Module, batch: Any, *, some: bool = False) -> Any:
    """Return the model's output for ``batch``, passed as `profile` says. With ``some``, pass only
    as many items of a tuple or list as forward takes."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch[: _most_arguments(model)] if some else batch)
    if isinstance(getattr(batch, "args", None), tuple):
        return model(*batch.args, **getattr(batch, "kwargs", {}))
    return model(batch)


def _most_arguments(model: torch.nn.Module) -> int | None:
    """Return how many positional arguments forward takes; None if unlimited or unknown."""
    try:
        kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):  # forward is not a Python function
        return None
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for kind in kinds
    )


def _source_of(batch: Any) -> str:
    source = getattr(batch, "source", "")
    return source if isinstance(source, str) else ""


def loss_of(
    output: Any, batch: Any, loss: Callable[[Any, Any], torch.Tensor] | None
) -> torch.Tensor:
    """Return the loss of an output, found as `profile` says.

    Raises:
        TraceError: no scalar with a gradient was found.
    """
    found: Any
    if loss is not None:
        found = loss(output, batch)
    elif isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    elif isinstance(output, list | tuple) and output and not hasattr(output, "loss"):
        found = output[0]
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"the model returned {type(output).__name__}; pass loss=lambda output, batch: ..."
        if loss is not None and isinstance(found, torch.Tensor):
            kind = "" if found.requires_grad else " without a gradient"
            what = f"the loss function returned a tensor of shape {tuple(found.shape)}{kind}"
        elif loss is not None:
            what = f"the loss function returned {type(found).__name__}"
        raise TraceError(
            f"no loss to run backward from: {what}. A loss is a scalar with a gradient"
        )
    return found


def of_another(folder: Path, model: torch.nn.Module) -> Path | None:
    """Return the last trace in ``folder`` if it is of another network than ``model``, else None.

    Raises:
        TraceError: the trace cannot be read.
    """
    last = max((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), default=None)
    if last is None or load_trace(last).network == fingerprint(model):
        return None
    return last


def file_of_step(folder: Path, number: int) -> Path:
    """Return the path of a step's trace in a directory of traces."""
    return folder / f"step-{number:06d}{SUFFIX}"


def next_number(folder: Path) -> int:
    """Return the next free step number in a directory of traces."""
    taken = [int(m.group(1)) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return max(taken, default=-1) + 1
