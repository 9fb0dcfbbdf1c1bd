"""DistributedDataParallel before and after `prepare`: ranks stay equal with any optimizer, after `close()` too."""

from __future__ import annotations

import pytest

from .together import launch


@pytest.mark.slow
def test_ranks_stay_equal_at_every_level() -> None:
    levels = ("O0", "O1", "O2", "O3", "O4", "O5")
    ran = launch("ddp_levels", 2, *levels, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = {tuple(line.split()[:2]): line.split(maxsplit=2)[2] for line in ran.stdout.splitlines()}
    kinds = [
        "torch",
        "preamp",
        "zero-torch",
        "zero-preamp",
        "torch-first",
        "preamp-first",
        "hook-first",
        "builtin-first",
    ]
    wanted = {(level, kind) for level in levels for kind in kinds}
    wanted |= {("O5", kind) for kind in ("split", "refused", "frozen")}
    assert told == dict.fromkeys(wanted, "same")
