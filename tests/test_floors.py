"""Imports run down only: between the packages of docs/design.md's list, and inside each of them."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("profiler", "pilot", "datasets", "experiments")
FLOORS = """
    errors version units config termination launch numerics around below_modes managed telemetry
    profiler planning pilot memory host_optimizer distributed checkpoint
    reporting runtime moe tiling dynoffload
    datasets simulation doctor integrations estimation experiments cli __main__
""".split()
"""Packages and single modules, ground first; ``dynoffload`` is the surface, its ``__init__``."""


def modules() -> dict[str, Path]:
    """Return the files of the package by their full names, the wings' too."""
    found = {}
    for folder in ("dynoffload", *WINGS):
        for path in (ROOT / folder).rglob("*.py"):  # which follows no links
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name if folder == "dynoffload" else f"dynoffload.{name}"
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield what a file imports at any place, the names that it takes from modules included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """By module of the package the others that it imports, also in functions and for types."""
    known = modules()
    return {
        name: {
            one if one in known else one.rpartition(".")[0]
            for one in imported(path)
            if one in known or one.rpartition(".")[0] in known
        }
        for name, path in known.items()
    }


def floor_of(name: str) -> str:
    """Return the package, or the single module, that a module belongs to."""
    return (*name.split("."), "dynoffload")[1]


def test_no_import_climbs(imports: dict[str, set[str]]) -> None:
    """A floor imports only from those below."""
    height = {floor: number for number, floor in enumerate(FLOORS)}
    climbing = [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in sorted(others)
        if height[floor_of(other)] > height[floor_of(name)]
    ]
    assert not climbing


def test_tiling_stands_by_itself(imports: dict[str, set[str]]) -> None:
    """Tiled modules need nothing of the engine."""
    used = {floor_of(o) for n, others in imports.items() if floor_of(n) == "tiling" for o in others}
    assert used <= {"tiling", "errors", "units", "managed"}


def test_no_modules_import_each_other(imports: dict[str, set[str]]) -> None:
    """Not by others in between either."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
