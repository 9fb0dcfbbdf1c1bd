"""`subprocess.run` for Python programs, begun by forking a process that has torch imported: seconds sooner.

For tests of what a program does. How programs start and end is tested on ones that are started as users start them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch._dynamo", "preamp.session", "preamp.optim"])


def run(
    arguments: Sequence[str], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`python ARGUMENTS` with one thread for computing: a file, or -m and a module, and what is for it."""
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("out", "err")]
        given = (list(arguments), os.fspath(cwd or os.getcwd()), environment, *map(str, paths))
        process = _FORKS.Process(target=_work, args=given)
        try:
            process.start()
            process.join(timeout)
            status = process.exitcode
        finally:
            process.kill()
            process.join()
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
    if status is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, out, err)
    return subprocess.CompletedProcess(list(arguments), status, out, err)


def _work(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read long ago
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = arguments
    try:
        if first == "-m":
            sys.path.insert(0, cwd)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            sys.argv = arguments
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
