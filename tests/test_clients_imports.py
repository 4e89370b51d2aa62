"""Only a client's own module imports it, and says what to install where it is missing."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import dynoffload.runtime.offload, dynoffload.integrations.wrap, dynoffload.cli
clients = {"transformers", "lightning", "accelerate"}
assert not clients & set(sys.modules), clients & set(sys.modules)
from dynoffload import ClientError
for client in ("transformers", "lightning"):
    sys.modules[client] = None  # as if it were not installed
    try:
        __import__(f"dynoffload.integrations.{client}")
    except ClientError as error:
        assert isinstance(error, ImportError)
        print(error)
"""


def test_a_missing_client_is_named_with_its_remedy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["transformers", "lightning"]
    assert lines[0].endswith("pip install '.[transformers]'")
    assert lines[1].endswith("pip install '.[lightning]'")
