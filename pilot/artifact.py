"""The `.pilot` file: a safetensors file of arrays and JSON (`dynoffload.profiler.safefile`).

What its parts mean is `dynoffload.pilot.pilot`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.profiler.safefile import Arrays, BadFileError, pack, read_file, write_whole

FORMAT = "dynoffload.pilot"
VERSION = 4


def write_artifact(path: Path, document: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a pilot file, by way of a temporary file beside it.

    Raises:
        PilotError: if the file cannot be written, or would be too large to be read again.
    """
    try:
        write_whole(path, pack(document, arrays, FORMAT, VERSION))
    except BadFileError as error:
        raise PilotError(f"{path}: {error}; train it on fewer kinds of block") from error
    except OSError as error:
        raise PilotError(
            f"{path}: cannot be written ({error.strerror or error}); name another place"
        ) from error


def read_artifact(path: Path) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Return the JSON document and the arrays of a pilot file.

    Raises:
        PilotError: if there is no such file, or it is not an undamaged pilot file of this version.
    """
    if not path.is_file():
        raise PilotError(
            f"{path}: there is no such pilot file; train one with 'dynoffload pilot train', or "
            "let the session learn one: pilot='auto'"
        )
    try:
        return read_file(path, FORMAT, VERSION)
    except OSError as error:
        raise PilotError(f"{path}: cannot be read ({error.strerror or error})") from error
    except BadFileError as error:
        raise refusal(path, error) from error


def refusal(path: Path, reason: object) -> PilotError:
    """Return the error for a file that is no pilot of this release."""
    return PilotError(
        f"{path}: cannot be used as a pilot: {reason}. Train the pilot again: dynoffload pilot "
        f"train TRACES -o {path.name}"
    )
