"""Scripts that several processes run together, and what their tests read of them.

On CPUs over gloo. With PREAMP_TESTS_DEVICE=cuda each rank has a GPU, and the group is NCCL's; where torch is built
without CUDA it is the fake CUDA device, and its process group (`tests/pretend`).
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import preamp

from .. import forks

ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("PREAMP_TESTS_DEVICE", "cpu")


BOUNDS = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 3e-2, "O4": 3e-2, "O5": 3e-2}
"""How far the end may be from that of one process, over the way trained: a few units in the last place of a level."""


def put_infinity(gradient: Any, rank: int) -> None:
    """Into this rank's part of a gradient; or into the gradient, where there are no parts."""
    if not hasattr(gradient, "to_local"):
        gradient[0, 0] = torch.inf
    elif dist.get_rank() == rank:
        gradient.to_local()[0, 0] = torch.inf


def clipped_steps(
    session: preamp.Session, model: Any, steps: int, spoil: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Norms, skips and names of the sick, in steps on the same data in every rank; `spoil` changes gradients."""
    told: dict[str, Any] = {"norms": [], "skips": [], "names": []}
    for step in range(steps):
        torch.manual_seed(step)
        with session.autocast():
            loss = model(torch.randn(4, 8)).float().square().mean()
        session.backward(loss)
        if spoil is not None:
            spoil(step)
        if step == 2:
            session.unscale_()
        if step == 2 and dist.get_rank() == 0:
            session.unscale_()  # true ones are left alone: no rank waits for this one
        told["norms"].append(float(session.clip_grad_norm_(0.5)))
        report = session.step()
        told["skips"].append(report.skipped)
        told["names"].append(list(report.nonfinite))
        session.zero_grad()
    return told


def told_by(script: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a module of this package on so many ranks; what each of them told (`tell`). `folder`: for its files."""
    out = folder / "told.json"
    ran = forks.ranks(ranks, ["-m", f"tests.distributed.{script}", str(out), *arguments], cwd=ROOT, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(out.read_text())


def told_once(script: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """`told_by`, once for all workers of a test run, which have folders side by side."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return told_by(script, ranks, folder)
    shared = folder.parent.parent / f"{script}-told"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = shared / "told.json"
        every: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else told_by(script, ranks, shared)
    return every


def begin() -> None:
    """Join the group; tensors are made on this rank's device from now on."""
    if DEVICE == "cuda":
        if torch.version.cuda is None:
            from ..pretend.device import pretend

            pretend(int(os.environ["LOCAL_WORLD_SIZE"]))
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        torch.set_default_device(here)
    backend = "gloo" if DEVICE == "cpu" else "nccl" if dist.is_nccl_available() else "pretend"
    dist.init_process_group(backend)


def tell(act: Callable[[Path], dict[str, Any]]) -> None:
    """The whole of such a script: `act` gets the folder, and what it returns on each rank goes to the test."""
    begin()
    out = Path(sys.argv[1])
    told = act(out.parent)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive their group where a mesh holds it, and now and then abort an exit
