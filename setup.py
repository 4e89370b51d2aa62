"""Build of dynoffload: the list of its packages, and the optional C pager of Linux.

The wings (``pilot/``, ``profiler/``, ``datasets/``, ``experiments/``) lie at the top level of the
repository and are installed below ``dynoffload``. In a checkout there are links to them inside
``dynoffload/``; a package is listed once, from the place where its files lie.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "dynoffload needs Python 3.11 or newer; this is Python " + sys.version.split()[0] + "."
    )

from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
WINGS = ("pilot", "profiler", "datasets", "experiments")
PAGER_SOURCES = "dynoffload/memory/native/*.c"  # beside their header, pager.h


def packages() -> list[str]:
    """Return every package by the name it is imported by, each once."""
    linked = tuple(f"dynoffload.{wing}" for wing in WINGS)
    trunk = find_namespace_packages(str(ROOT), include=["dynoffload", "dynoffload.*"])
    names = [name for name in trunk if not name.startswith(linked)]
    for wing in WINGS:
        below = find_namespace_packages(str(ROOT / wing))
        names += [f"dynoffload.{wing}", *(f"dynoffload.{wing}.{name}" for name in below)]
    return [name for name in names if "__pycache__" not in name.split(".")]


def extensions() -> list[Extension]:
    """Return the pager, where the system can have one. It is plain C, loaded through ctypes."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(PAGER_SOURCES))
    if not sys.platform.startswith("linux") or not sources:
        return []
    pager = Extension(
        "dynoffload.memory._pager",
        sources,
        depends=["dynoffload/memory/native/pager.h"],
        optional=True,
        extra_compile_args=["-O3", "-std=gnu11", "-pthread", "-Wall", "-fvisibility=hidden"],
        extra_link_args=["-pthread"],
    )
    return [pager]


class BuildPager(build_ext):
    """Compile the pager where that works; say in one line what is lost where it does not."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension; the caller goes on after a failure, as it is optional."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError):
            print(
                "dynoffload: the C pager was not built (is a C compiler installed?); "
                "dynoffload works without it, on the slower mapped-file backend.",
                file=sys.stderr,
            )
            raise


setup(packages=packages(), ext_modules=extensions(), cmdclass={"build_ext": BuildPager})
