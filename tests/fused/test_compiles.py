"""The kernels compile for a GPU of today although there is none here, and read and write 16 bytes at a time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

WIDE = {  # 16-byte loads and stores of eight elements a thread: two for float32, one for 16 bits
    "adam": (6, 6), "simple": (3, 3), "chunk_norms": (1, 0), "novograd": (5, 5), "lamb_moments": (7, 4),
    "lamb_apply": (6, 3), "read": (8, 0), "adam_8bit": (2, 1),
}  # fmt: skip


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton's compiler comes with Linux wheels")
def test_kernels_compile_and_vectorise(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 25
    for name, counts in results:
        loads, stores = WIDE.get(name, (0, 0))
        assert counts.get("ld.global.v4.b32", 0) >= loads, (name, counts)
        assert counts.get("st.global.v4.b32", 0) >= stores, (name, counts)
        assert "ld.global.b16" not in counts and "st.global.b16" not in counts, (name, counts)
