"""Imports a client package, with a clear error if it is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dynoffload.errors import ClientError


@contextlib.contextmanager
def importing(client: str, extra: str) -> Iterator[None]:
    """Wrap the import of ``client``; if it is not installed, name the remedy.

    Args:
        client: the package's import name.
        extra: the extra of dynoffload that installs it.

    Raises:
        ClientError: it is not installed, or fails to import.
    """
    try:
        yield
    except ImportError as error:
        raise ClientError(
            f"{client} cannot be imported ({error}): in a checkout of dynoffload, "
            f"pip install '.[{extra}]'"
        ) from error
