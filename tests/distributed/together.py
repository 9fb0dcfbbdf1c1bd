"""Scripts that several processes run together, and what their tests read of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def told_by(script: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a module of this package on so many ranks; what each of them told (`tell`). `folder`: for its files."""
    out = folder / "told.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    line += ["-m", f"tests.distributed.{script}", str(out), *arguments]
    ran = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]
    every: list[dict[str, Any]] = json.loads(out.read_text())
    return every


def tell(act: Callable[[Path], dict[str, Any]]) -> None:
    """The whole of such a script: `act` gets the folder, and what it returns on each rank goes to the test."""
    dist.init_process_group("gloo")
    out = Path(sys.argv[1])
    told = act(out.parent)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive their group where a mesh holds it, and now and then abort an exit
