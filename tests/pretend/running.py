"""Runs tests and scripts in processes of their own, so that the fake CUDA device does not disturb other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, python: str = sys.executable, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python at the root, with two devices and without Triton unless `more`, the environment, says otherwise."""
    environment = {
        **os.environ, "PREAMP_NO_TRITON": "1", "PRETEND_CUDA_DEVICES": "2", "PYTEST_ADDOPTS": "",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **more,
    }  # fmt: skip
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def run_tests(*arguments: str, plugin: str | None = None, python: str = sys.executable, **more: str) -> None:
    """Run tests with a plugin and the settings of `./dev gpu`; all must pass, and none may be skipped."""
    settings = ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    settings += [] if plugin is None else ["-p", plugin]
    done = run("-m", "pytest", *settings, *arguments, python=python, **more)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1]
