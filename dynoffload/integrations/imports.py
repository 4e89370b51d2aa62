"""Importing a client, and saying clearly what to install where it is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dynoffload.errors import ClientError


@contextlib.contextmanager
def importing(client: str, extra: str) -> Iterator[None]:
    """Around the import of ``client``: name the remedy if it is not installed.

    Args:
        client: the package as it is imported.
        extra: the extra of dynoffload that installs it.

    Raises:
        ClientError: it is not installed, or lacks something that it needs.
    """
    try:
        yield
    except ImportError as error:
        raise ClientError(
            f"{client} cannot be imported ({error}): in a checkout of dynoffload, "
            f"pip install '.[{extra}]'"
        ) from error
