"""The kernels compile for a GPU of today although there is none here: wide accesses, few registers, nothing spilled.

With the Triton that is installed, and with the release that many machines with a GPU have.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

READING = {"read_kernel", "finish"}
"""What adds up numbers of several warps."""

WIDE = {  # 16-byte loads and stores of four float32 numbers a thread, where both are float32
    "adam_kernel": (2, 2),
    "simple_kernel": (1, 1),
    "read_kernel": (1, 0),
}
REGISTERS = 64
"""Of a thread, with which 32 warps have room on a processor."""

OTHER = Path(sys.prefix) / "triton-3.6" / "bin" / "python"
"""Made by `./dev setup` beside `.venv`; a machine with its own Python has one Triton."""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton's compiler comes with Linux wheels")
@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["installed", "3.6"])
def test_kernels_compile_and_vectorise(other: bool, tmp_path: Path) -> None:
    if other and not OTHER.exists():
        pytest.skip(f"no {OTHER}: ./dev setup makes it, unless PREAMP_PYTHON says which Python to use")
    script = Path(__file__).with_name("compile_kernels.py")
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": source}
    environment.pop("TRITON_INTERPRET", None)
    python = str(OTHER) if other else sys.executable
    done = subprocess.run([python, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 30
    assert {one["name"] for one in rows} >= WIDE.keys() | READING
    for one in rows:
        name, counts = one["name"], one["accesses"]
        float32 = one["constants"].get("RULE") not in ("0", "1") or one["constants"]["KIND"] == "0"
        loads, stores = WIDE.get(name, (0, 0)) if float32 else (0, 0)
        assert counts.get("ld.global.v4.b32", 0) >= loads, one
        assert counts.get("st.global.v4.b32", 0) >= stores, one
        assert "ld.global.b16" not in counts and "st.global.b16" not in counts, one
        assert one["reg"] <= REGISTERS and one["stack"] == one["local"] == 0, one
        assert name in READING or one["barriers"] == one["shared"] == 0, one
        assert one["shared"] <= 64, one  # a number a warp: nothing exchanges elements
