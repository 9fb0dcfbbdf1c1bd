"""What a measurement ran on, its clock, and the random state that it leaves as it was."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._version import __version__
from .errors import PreampError
from .formats import LOW_DTYPES, cpu_multiplies, name_of


def environment(device: torch.device) -> dict[str, Any]:
    """Machine, versions and commit, in types that JSON takes."""
    found: dict[str, Any] = {
        "preamp": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu 16-bit arithmetic": ", ".join(sorted(map(name_of, filter(cpu_multiplies, LOW_DTYPES)))) or "none",
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return found


def device_named(name: str | None) -> torch.device:
    """The device asked for, by default the GPU if there is one; `PreampError` if it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PreampError(f"--device {name}: torch knows no such device. Write cpu, cuda, or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() > 0:
        raise PreampError(f"--device {name}: the last GPU of this machine is cuda:{torch.cuda.device_count() - 1}")
    built = device.type != "cuda" or torch.backends.cuda.is_built()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = f"cannot use it here: {error}".splitlines()[0].partition(". ")[0]
        why = f"torch {torch.__version__} {first if built else 'is built without CUDA'}"
        raise PreampError(f"--device {name}: {why}. Leave it out to use what this machine has: preamp env") from None
    return device


def seconds_now(device: torch.device | None) -> float:
    """The host's clock when a device has done everything asked of it so far."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} cores" if names else "unknown"


def commit() -> str | None:
    """The commit of the source tree that preamp runs from, "+" behind it when that has changes; None elsewhere.

    PREAMP_COMMIT says it where the tree was copied without its history.
    """
    if given := os.environ.get("PREAMP_COMMIT"):
        return given
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=10", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


RandomState = tuple[Any, ...]


def random_state() -> RandomState:
    """That of Python, of numpy where it is in use, and of torch on the CPU and every GPU in use."""
    numpy: Any = np.random.get_state() if "numpy.random" in sys.modules else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy, torch.get_rng_state(), cuda


def set_random_state(state: RandomState) -> None:
    """Put back what `random_state` returned."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    if numpy is not None:
        np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def random_kept() -> Iterator[None]:
    """Draws inside are not missed by what comes after."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
