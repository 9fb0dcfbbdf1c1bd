"""`subprocess.run` for Python programs, begun by forking a process that has torch imported: seconds sooner.

For tests of what a program does. How programs start and end is tested on ones that are started as users start them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

METHOD = "forkserver"
_FORKS = multiprocessing.get_context(METHOD)
_FORKS.set_forkserver_preload(["torch._dynamo", "preamp.session", "preamp.optim"])


def run(
    arguments: Sequence[str], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`python ARGUMENTS` with one thread for computing: a file, or -m and a module, and what is for it."""
    return _together(arguments, [{}], cwd, env, timeout)


def ranks(
    number: int, arguments: Sequence[str], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 400,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`torchrun --nproc-per-node NUMBER ARGUMENTS`; where one of the ranks fails, the others are ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "forks",
    }  # fmt: skip
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return _together(arguments, places, cwd, env, timeout)


def _together(
    arguments: Sequence[str], places: Sequence[Mapping[str, str]], cwd: Path | str | None,
    env: Mapping[str, str] | None, timeout: float,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A process for each of the places, which are environments; what they print, one after the other."""
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        paths = [[Path(folder, f"{name}{i}") for name in ("out", "err")] for i in range(len(places))]
        processes = []
        for place, files in zip(places, paths, strict=True):
            given = (list(arguments), os.fspath(cwd or os.getcwd()), {**environment, **place}, *map(str, files))
            processes.append(_FORKS.Process(target=_work, args=given))
        status: int | None = 0
        try:
            for process in processes:
                process.start()
            waited, limit = {process.sentinel: process for process in processes}, time.monotonic() + timeout
            while waited and status == 0:
                ended = multiprocessing.connection.wait(list(waited), max(limit - time.monotonic(), 0))
                exits = [waited.pop(each).exitcode for each in ended]  # type: ignore[call-overload]
                status = next(filter(None, exits), 0) if exits else None
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        out, err = (
            "".join(files[i].read_text(errors="replace") for files in paths if files[i].exists()) for i in (0, 1)
        )
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
