"""``dynoffload profile`` and ``run``: record or offload a user's training script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dynoffload.cli.app import app, say_note, say_wrote, stderr, stdout
from dynoffload.cli.scripts import log_lines, run_script
from dynoffload.config import POLICIES, clear_defaults, set_defaults
from dynoffload.errors import ConfigError, ProfilingDone
from dynoffload.launch import own_folder, said_by
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dynoffload.integrations.wrap import Wrap
    from dynoffload.reporting import ReportFiles
    from dynoffload.runtime.session import Session

# Everything after SCRIPT belongs to the script, even what looks like a dynoffload option.
_SCRIPT_LAST = {"allow_interspersed_args": False}
# If a script offloaded nothing: what it lacked, and the remedy; without and with --wrap.
_MISSING = {
    False: (
        "an offload() block",
        "it must train inside 'with dynoffload.offload(model, optimizer):', or be run with --wrap",
    ),
    True: (
        "a training call that --wrap could see",
        "it must make an optimizer, then call a module that holds its parameters"
        " with gradients enabled",
    ),
}

Script = Annotated[
    Path,
    typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="The training script."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="The script's own arguments.", show_default=False),
]
Wrapped = Annotated[
    bool,
    typer.Option("--wrap", help="Put offload() around a script that does not call it."),
]


@app.command(context_settings=_SCRIPT_LAST)
def run(
    script: Script,
    arguments: Arguments = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes of fast memory, e.g. 8GiB or 500MB.", show_default=False),
    ] = None,
    pilot: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A .pilot file that says what comes next."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"What is prefetched: by {', '.join(POLICIES)}.")
    ] = None,
    spill_dir: Annotated[
        Path | None, typer.Option(help="Directory on a disk for what does not fit.")
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            help="Host memory below an accelerator; what it does not hold goes to the disk.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to train, e.g. cuda; without it where the model is."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the HTML page here, trace and run log beside it.")
    ] = None,
    wrap: Wrapped = False,
) -> None:
    """Run a script that calls `dynoffload.offload(model, optimizer)`.

    These options apply where that call leaves arguments out. They precede SCRIPT; everything after
    SCRIPT belongs to the script. A summary line of the steps is printed at the end.

    In a run of several processes (torchrun), each process applies the options to itself. Page,
    trace and log of each process have its rank in their names.

    With `--wrap` the script need not use dynoffload. The block is entered before the first
    training call of the module that holds its optimizer's parameters, and left at the end.

    Examples:

    ```
    $ dynoffload run --budget 8GiB train.py --epochs 3
    $ dynoffload run --budget 8GiB --pilot moe.pilot --report out/run.html train.py
    $ dynoffload run --wrap --budget 8GiB plain.py
    $ torchrun --nproc-per-node 2 -m dynoffload run --budget 8GiB train.py
    ```
    """
    if wrap and budget is None:
        raise typer.BadParameter(
            "--wrap needs one before the script, such as --budget 8GiB", param_hint="'--budget'"
        )
    from dynoffload.reporting.summary import in_a_line

    summaries: list[str] = []
    written: list[Path] = []

    def note(session: Session, files: ReportFiles | None) -> None:
        summaries.append(said_by() + in_a_line(session.log))
        if files is not None:
            written[:] = files.page, files.perfetto, files.log  # the last block wins

    set_defaults(
        budget=budget,
        pilot=pilot,
        policy=policy,
        spill_dir=spill_dir,
        host_budget=host_budget,
        device=device,
        report=report,
        on_end=note,
    )
    code: object = 1
    try:
        with log_lines(), _wrapped(wrap), _leaving_open_blocks():
            run_script(script, arguments or [])
        code = 0
    except SystemExit as end:
        code = end.code
        raise
    finally:
        clear_defaults()
        for line in summaries:
            say_note(line)
        say_wrote(*written)
        if not summaries and code in (None, 0):
            what, remedy = _MISSING[wrap]
            say_note(f"{script} ended without {what}, so nothing was offloaded: {remedy}")
            if budget is None:
                raise SystemExit(2)


@app.command(context_settings=_SCRIPT_LAST)
def profile(
    script: Script,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Directory for the traces.")
    ],
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record, then stop the script.")] = 20,
    wrap: Wrapped = False,
) -> None:
    """Record each step of a training script as a trace for the pilot.

    The script calls `dynoffload.offload(model, optimizer)`; here that call records and moves
    nothing. With `--wrap` it need not call it; see `dynoffload run`.

    Options precede SCRIPT; everything after SCRIPT belongs to the script.

    Example:

    ```
    $ dynoffload profile -o traces/ --steps 50 train.py --steps 1000
    ```
    """
    out = own_folder(out)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    before = _traces(out)
    begin = time.perf_counter()
    code: object = None
    set_defaults(profile_dir=out, profile_steps=steps)
    try:
        with log_lines(), _wrapped(wrap), _leaving_open_blocks():
            run_script(script, arguments or [])
    except ProfilingDone:
        pass
    except SystemExit as end:
        code = end.code
    finally:
        clear_defaults()
        if is_new:
            with contextlib.suppress(OSError):  # not empty if anything was recorded
                out.rmdir()
    made = {path: size for path, size in _traces(out).items() if before.get(path) != size}
    if code not in (None, 0):
        raise SystemExit(code)  # the script failed and reported why
    if not made:
        raise ConfigError(f"{script} finished without one recorded step: {_MISSING[wrap][1]}")
    table = Table(show_header=False, box=None)
    beside = f", beside {len(before)} that were there" if before else ""
    table.add_row("traces", f"{len(made)} in {out}{beside}")
    table.add_row("size", format_bytes(sum(made.values())))
    table.add_row("time", format_seconds(time.perf_counter() - begin))
    stdout().print(table)
    stderr().print(
        f"next: dynoffload pilot train {out} -o model.pilot",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def _wrapped(wanted: bool) -> contextlib.AbstractContextManager[Wrap | None]:
    """Return a context that wraps the script's training in offload(), or a null context."""
    if not wanted:
        return contextlib.nullcontext()
    from dynoffload.integrations.wrap import Wrap

    return Wrap()


@contextlib.contextmanager
def _leaving_open_blocks() -> Iterator[None]:
    """Leave the blocks that a script has left open, as the exit of its own process would."""
    from dynoffload.runtime.block import leave_all

    try:
        yield
    finally:
        leave_all()


def _traces(directory: Path) -> dict[Path, int]:
    """Return the trace files in ``directory`` with their sizes."""
    from dynoffload.profiler.storage import SUFFIX

    sizes: dict[Path, int] = {}
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # renamed when it was completed
            sizes[path] = path.stat().st_size
    return sizes
