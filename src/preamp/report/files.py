"""Files written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8 to `path`; what UTF-8 cannot hold (a lone surrogate) becomes "?"."""
    content = text.encode("utf-8", errors="replace")
    return write_with(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: str | Path, content: Any) -> Path:
    """Write `content` as strict JSON; what JSON has no types for is an error."""
    return write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_with(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file beside `path`, then move it there in one step; an error leaves no trace."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target
