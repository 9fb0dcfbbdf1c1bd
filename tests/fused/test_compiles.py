"""The kernels compile for a GPU of today although there is none here, and read and write 16 bytes at a time.

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

WIDE = {  # 16-byte loads and stores of eight elements a thread: two for float32, one for 16 bits
    "adam": (6, 6), "simple": (3, 3), "chunk_norms": (1, 0), "novograd": (5, 5), "lamb_moments": (7, 4),
    "lamb_apply": (6, 3), "read": (8, 0), "adam_8bit": (2, 1),
}  # fmt: skip


OTHER = Path(sys.prefix) / "triton-3.6" / "bin" / "python"
"""Made by `./dev setup` beside `.venv`; a machine with its own Python has one Triton."""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton's compiler comes with Linux wheels")
@pytest.mark.parametrize("other", [False, True], ids=["installed", "3.6"])
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
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 25
    for name, counts in results:
        loads, stores = WIDE.get(name, (0, 0))
        assert counts.get("ld.global.v4.b32", 0) >= loads, (name, counts)
        assert counts.get("st.global.v4.b32", 0) >= stores, (name, counts)
        assert "ld.global.b16" not in counts and "st.global.b16" not in counts, (name, counts)
