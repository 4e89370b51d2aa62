"""The package as it is shipped: its wings, its pins, its compiled part, its refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINGS = ("pilot", "profiler", "datasets", "experiments")
GENERAL = "dynoffload/pilot/general.safetensors"

needs_checkout = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a checkout")
pytestmark = needs_checkout


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the checkout, without what was built."""
    names = ("*.so", "__pycache__", ".*", "build", "dist", "*.egg-info", "docs", "tests")
    target = tmp_path / "copy"
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*names))
    return target


def _run(
    *command: str, cwd: Path, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and check how it ended."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def _build(kind: str, copy: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Build a wheel or an sdist of a copy; return it and what the build said."""
    pytest.importorskip("setuptools")
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
    done = _run(sys.executable, "-P", "-c", code, cwd=copy, **environment)
    return out / done.stdout.splitlines()[-1], done.stdout + done.stderr


def _modules(folder: Path) -> set[str]:
    """Return every module of the checkout as a path below the installed package."""
    trunk = list((folder / "dynoffload").rglob("*.py"))
    found = {path.relative_to(folder).as_posix() for path in trunk}
    for wing in WINGS:
        for path in (folder / wing).rglob("*.py"):
            found.add(f"dynoffload/{path.relative_to(folder).as_posix()}")
    return found


def test_a_wheel_holds_every_module_once_and_nothing_else_at_the_top(
    copy: Path, tmp_path: Path
) -> None:
    """With its templates. Without a compiler the build goes on, and says what is lost."""
    (copy / "dynoffload" / "reporting" / "probe.html.j2").touch()
    wheel, said = _build("wheel", copy, tmp_path / "out", CC=str(tmp_path / "no-compiler"))
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"dynoffload", f"dynoffload-{wheel.name.split('-')[1]}.dist-info"}
    assert {name for name in names if name.endswith(".py")} == _modules(copy)
    beside = {"dynoffload/py.typed", "dynoffload/reporting/probe.html.j2", GENERAL}
    assert beside <= set(names)
    assert "dynoffload/datasets/__init__.py" not in names
    assert not [name for name in names if name.endswith(".so")]
    if sys.platform.startswith("linux"):
        (line,) = [line for line in said.splitlines() if line.startswith("dynoffload: ")]
        assert "C compiler" in line
        assert "mapped-file" in line


def test_a_wheel_can_be_built_from_an_sdist_which_has_no_links(copy: Path, tmp_path: Path) -> None:
    """With its pager where there is a compiler."""
    sdist, _ = _build("sdist", copy, tmp_path / "out")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "dynoffload" / "pilot").exists()
    wheel, said = _build("wheel", unpacked, tmp_path / "out")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == _modules(copy)
    assert GENERAL in names
    if sys.platform.startswith("linux") and shutil.which("cc") is not None:
        built = [name for name in names if re.fullmatch(r"dynoffload/memory/_pager\..*so", name)]
        assert len(built) == 1
        assert not re.search(r"\.[ch]:\d+.*warning", said)
    # Without links and without installation the wings are found beside the package.
    code = "import dynoffload.pilot as p, dynoffload.datasets.text; print(p.__file__)"
    done = _run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert Path(done.stdout.strip()) == unpacked / "pilot" / "__init__.py"


def test_setup_refuses_an_old_python_in_one_line() -> None:
    code = "import runpy, sys; sys.version_info = (3, 10, 9); runpy.run_path('setup.py')"
    said = _run(sys.executable, "-c", code, cwd=ROOT, code=1).stderr
    assert re.fullmatch(r"dynoffload needs Python 3\.11 or newer; this is .*\n", said)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_refuses_an_old_python_in_one_line(copy: Path, tmp_path: Path) -> None:
    old = tmp_path / "oldpython"
    old.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 9, 2); $2"\n'
    )
    old.chmod(0o755)
    done = _run("make", "test", f"PY={old}", "VENV=none", cwd=copy, code=2)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert lines == [
        f"dynoffload needs Python 3.11 or newer; {old} is Python 3.9. "
        "Name another: make PY=python3.11"
    ]
    assert not (copy / "none").exists()


def test_every_dependency_is_a_range_whose_pin_is_inside(project: dict[str, Any]) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pinned = requirements.Requirement(line)
        (exact,) = pinned.specifier
        assert exact.operator == "==", line
        assert pinned.url is None, line
        pins.setdefault(pinned.name.lower(), []).append(exact.version)
    groups = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(text for group in groups for text in group)]
    for text in wanted:
        requirement = requirements.Requirement(text)
        assert all(part.operator != "==" for part in requirement.specifier), text
        assert pins[requirement.name.lower()], text
        assert all(requirement.specifier.contains(pin) for pin in pins[requirement.name]), text
    assert pins["torch"] == ["2.13.0"]


def test_no_datasets_of_ours_hides_that_of_hugging_face() -> None:
    code = (
        "import importlib.util as u, json\n"
        "s = u.find_spec('datasets')\n"
        "print(json.dumps(list(s.submodule_search_locations) if s else []))"
    )
    child = _run(sys.executable, "-c", code, cwd=ROOT)
    here = importlib.util.find_spec("datasets")
    places = [*json.loads(child.stdout), *(here.submodule_search_locations or [] if here else [])]
    assert all(Path(place).resolve() != ROOT / "datasets" for place in places)


def test_importing_dynoffload_is_light() -> None:
    heavy = "{'transformers', 'matplotlib', 'safetensors', 'sklearn', 'pandas', 'scipy'}"
    code = f"import sys, dynoffload; print(sorted({heavy} & set(sys.modules)))"
    assert _run(sys.executable, "-P", "-c", code, cwd=ROOT).stdout.strip() == "[]"
