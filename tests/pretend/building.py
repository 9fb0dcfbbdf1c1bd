"""Compiles the tests' own C++, once for each version of its text."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths


def cache() -> Path:
    """The folder where the tests cache what takes long to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "preamp-tests"


def loaded(file: Path, name: str) -> Any:
    """The module `name` in a compiled file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def built(name: str, folder: Path, sources: Sequence[str], header: str, *, flags: Sequence[str] = ()) -> Path:
    """The module `name` built from C++ files in `folder`, cached under a hash of its sources and flags."""
    made_from = hashlib.sha256(b"".join((folder / source).read_bytes() for source in (*sources, header)))
    made_from.update(f"{torch.__version__} {torch.__path__[0]} {sys.version}{' '.join(flags)}".encode())
    file = cache() / f"{name}-{made_from.hexdigest()[:16]}.so"
    if file.exists():
        return file
    cache().mkdir(parents=True, exist_ok=True)
    options = ["-O0", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    options += [*(f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])), *flags]
    libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    with tempfile.TemporaryDirectory() as temporary:
        objects = [Path(temporary) / f"{source}.o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        compiling = [subprocess.Popen(["c++", *options, "-c", folder / source, "-o", to]) for source, to in pairs]
        statuses = [process.wait() for process in compiling]
        if any(statuses):
            raise RuntimeError(f"the C++ in {folder.parent.name}/{folder.name} does not compile")
        linked = Path(temporary) / file.name
        subprocess.run(["c++", "-shared", *objects, *libraries, "-o", linked], check=True)
        shutil.copy(linked, partial := file.with_suffix(f".{os.getpid()}"))
        partial.rename(file)  # atomically, so that no other process loads half a file
    return file
