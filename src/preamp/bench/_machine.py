"""What a measurement ran on: read once, printed with every number."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import PreampError
from ..formats import LOW_DTYPES, cpu_multiplies, name_of


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


class DeviceLost(PreampError):
    """The device answers no more in this process, as after an illegal access to its memory."""

    exit_status = 75  # of sysexits.h: what failed may work when it is tried again, in a new process


def check_device(device: torch.device, after: str) -> None:
    """Raises `DeviceLost` when `device` does nothing any more; `after` is what was seen last."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise DeviceLost(
            f"{after}; since then the device fails at whatever it is asked ({error}), so nothing further can be "
            "measured in this process: begin another one for what is missing"
        ) from error


def seconds_now(device: torch.device | None) -> float:
    """The host's clock when a device has done everything asked of it so far."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def keep_heap() -> bool:
    """Have the C library keep freed memory for this process, if it is glibc; returns whether it will.

    By default glibc gives the large blocks of activations back to the system and faults them in again, step after
    step, or not, depending on which small block happens to lie on top of the heap: several percent of a step, awarded
    to contenders at random.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 1 << 30))  # 32 MiB: the most it takes


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
