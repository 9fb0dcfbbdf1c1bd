"""DistributedDataParallel before and after `prepare`: ranks stay equal with any optimizer, after `close()` too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ddp_levels.py")


def test_ranks_stay_equal_at_every_level(tmp_path: Path) -> None:
    levels = ("O0", "O1", "O2", "O3", "O4", "O5")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run([*line, *levels], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = {tuple(line.split()[:2]): line.split(maxsplit=2)[2] for line in ran.stdout.splitlines()}
    kinds = (
        "torch",
        "preamp",
        "zero-torch",
        "zero-preamp",
        "torch-first",
        "preamp-first",
        "hook-first",
        "builtin-first",
    )
    wanted = {(level, kind) for level in levels for kind in kinds}
    wanted |= {("O5", kind) for kind in ("split", "refused", "frozen")}
    assert told == dict.fromkeys(wanted, "same")
