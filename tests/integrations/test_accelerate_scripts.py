"""The test programs that Accelerate's package ships, run with `attach`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

RUN = """
import importlib, sys
from accelerate import Accelerator
from preamp.integrations.accelerate import attach

made, init = [], Accelerator.__init__

def attached(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if self.mixed_precision == "no":
        made.append(attach(self, sys.argv[1]))

Accelerator.__init__ = attached
importlib.import_module("accelerate.test_utils.scripts." + sys.argv[2]).main()
assert made
"""

# At O2 and O5 `test_sync` compares 16-bit gradients with float32 ones, and `test_script` weights with trained ones.
RUNS = [
    *((script, level, ranks) for script in ("test_sync", "test_script") for level in ("O0", "O4") for ranks in (1, 2)),
    ("test_sync", "O5", 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("script", "level", "ranks"), RUNS)
def test_a_script_of_accelerate(script: str, level: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(f"accelerate.test_utils.scripts.{script}") is None:
        pytest.skip("this release does not ship it")
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*command, "run.py", level, script], capture_output=True, text=True, timeout=250, cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
