"""The accelerator for tests, on torch's PrivateUse1 device: built, loaded and set; no tests here.

`device.h` says what it is. Importing this makes it the accelerator of the process, so its tests
run in processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
NAME = "rig"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
if COMPILER is None:
    raise ImportError("no C++ compiler")


def _built() -> Path:
    """Return the library, compiled if its sources, this file or torch have changed."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "accelerator.py"])
    text = b"".join(source.read_bytes() for source in sources) + torch.__version__.encode()
    folder = HERE.parent.parent / "build" / "backend"
    library = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes compiles
        if not library.exists():
            objects = [folder / f"{name.stem}.o" for name in sources if name.suffix == ".cpp"]
            include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
            flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", *include]
            compilers = [
                subprocess.Popen([COMPILER, *flags, "-c", HERE / f"{one.stem}.cpp", "-o", one])
                for one in objects
            ]
            codes = [one.wait() for one in compilers]
            assert not any(codes), "the backend does not compile"
            torch_is = [f"-L{path}" for path in cpp_extension.library_paths()]
            link = [COMPILER, "-shared", *objects, *torch_is, "-ltorch", "-ltorch_cpu", "-lc10"]
            made = library.with_suffix(".part")
            subprocess.run([*link, "-o", made], check=True)
            made.rename(library)
    return library


class _Module(ModuleType):
    """What `torch.cuda` is for CUDA. Random numbers are those of the CPU's generator."""

    _initialized = True
    default_generators = (torch.default_generator,)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=NAME, total_memory=torch.accelerator.get_memory_info()[1])

    def set_per_process_memory_fraction(self, share: float, device: Any = None) -> None:
        _set(0, 0, int(share * torch.accelerator.get_memory_info()[1]))

    def device(self, index: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()


_path = str(_built())
torch.ops.load_library(_path)
_library = ctypes.CDLL(_path)
_library.backend_kernels.restype = ctypes.c_int64
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
DEVICE = torch.device(NAME, 0)


def kernels() -> int:
    """Return how many kernels and copies were enqueued."""
    return int(_library.backend_kernels())


def inherited(folder: Path) -> dict[str, str]:
    """Return an environment in which ``import torch`` loads the backend, as torch does with what is
    installed for it.

    Args:
        folder: an empty one.
    """
    about = folder / f"{NAME}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = {NAME}_backend:load\n")
    path = f"import sys\ndef load():\n    sys.path.append({str(HERE)!r})\n    import accelerator\n"
    (folder / f"{NAME}_backend.py").write_text(path)
    return {**os.environ, "PYTHONPATH": str(folder)}


@contextlib.contextmanager
def late(seed: int = 0, *, delay_us: int = 500, memory: int = 0) -> Iterator[None]:
    """Make the streams late by chance, and limit the device's memory.

    Args:
        seed: of the delays.
        delay_us: the longest; one of eight pieces of work is late.
        memory: bytes of the device; 0: all that it has.
    """
    torch.accelerator.empty_cache()
    _set(seed, delay_us, memory)
    try:
        yield
    finally:
        try:
            torch.accelerator.synchronize()
        finally:
            _set(0, 0, 0)


def _set(seed: int, delay_us: int, memory: int) -> None:
    _library.backend_set(ctypes.c_uint64(seed), delay_us, ctypes.c_size_t(memory))
