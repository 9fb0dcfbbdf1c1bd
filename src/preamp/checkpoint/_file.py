"""Files that are complete or absent, and in which a changed byte is detected.

A file is written to a temporary file beside its target, synced to the disk, and renamed over the target. A seal at its
end, in the comment of the zip archive that `torch.save` writes, is the SHA-256 of all bytes before it. `torch.load`
can still read the archive.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from ..errors import CheckpointError, kind_of
from ._arguments import AnyPath

FORMAT = "preamp-checkpoint/2"

_SEAL = b"preamp sha256 "
_SEALED = len(_SEAL) + 64
_END, _END_SIZE = b"PK\x05\x06", 22
"""The record that ends a zip archive: its first bytes, and its size before the comment, whose length ends it."""

_HOST = re.sub(r"\W", "", platform.node())
_under_way: set[str] = set()
"""Temporary files that this process is writing now."""


def write(path: AnyPath, content: Mapping[str, Any]) -> None:
    """Write `content` with a seal, to a temporary file that is renamed over `path` when it is complete.

    Links stay, and their targets are replaced. A file keeps its permissions and, if possible, its owner. An `OSError`
    names `path` and keeps its errno; `CheckpointError` for what is no file. Files of killed processes are removed.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _under_way.add(str(temporary))
    try:
        before = _replaceable(path)
        _clear_leftovers(target)
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600 if before else 0o666), "r+b") as file:
            sealing = _Sealing(file)
            torch.save({**content, "format": FORMAT}, cast("IO[bytes]", sealing))
            sealing.seal()
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            with suppress(OSError, AttributeError):  # Windows has no owners
                os.chown(temporary, before.st_uid, before.st_gid)
            os.chmod(temporary, stat.S_IMODE(before.st_mode))
        os.replace(temporary, target)
        with suppress(OSError):  # the rename itself survives a power cut, where the system allows it
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        reason = f"{error.strerror or error}: nothing was written, and what was there before is as it was"
        raise OSError(error.errno or errno.EIO, reason, os.fspath(path)) from error
    finally:
        _under_way.discard(str(temporary))
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _replaceable(path: AnyPath) -> os.stat_result | None:
    """The present file, which may be replaced, or None; `CheckpointError` if it is something else."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # of a directory the system says so
        raise CheckpointError(
            f"{os.fspath(path)!r} is a device, a pipe or a socket: a checkpoint is moved to its place when it is "
            "complete, which would put a file where that is. Nothing was written; give the path of a file"
        )
    return found


def read(path: AnyPath) -> dict[str, Any]:
    """The content of a file, proven to be what was written; `CheckpointError`, or an `OSError` if it does not open."""
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: what save_sharded wrote to one is read by load_sharded")
    with open(path, "rb") as file:
        _check_seal(file, path)
        file.seek(0)
        try:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint: its parts are not as torch.save writes them, or would have to "
                f"run code to load ({type(error).__name__}: {str(error)[:200]})"
            ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        seen = repr(content.get("format")) if isinstance(content, dict) else f"of {kind_of(content)}"
        raise CheckpointError(f"{path} is no checkpoint of this preamp: its format is {seen:.60}, not {FORMAT!r}")
    return dict(content)


def sha256_of(path: AnyPath) -> str:
    """Of a whole file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return str(_hash_of_first(file, os.path.getsize(path)).hexdigest())


class _Sealing:
    """What `torch.save` writes to: passes bytes on, hashes them, keeps the system's first error, which torch drops."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes; after an error, drop them."""
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        self._hash.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: `seal` comes after the last byte."""

    def seal(self) -> None:
        """Add the seal, or raise the first error so far."""
        if self._error is not None:
            raise self._error
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_SEALED.to_bytes(2, "little") + _SEAL + self._hash.hexdigest().encode())


def _check_seal(file: IO[bytes], path: Any) -> None:
    """`CheckpointError` for a file without a seal, or whose bytes are not those that were sealed."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE - _SEALED))
    tail = file.read()
    end, length, comment = tail[:4], tail[_END_SIZE - 2 : _END_SIZE], tail[_END_SIZE:]
    if end != _END or length != _SEALED.to_bytes(2, "little") or not comment.startswith(_SEAL):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it does not end with the seal of preamp.checkpoint.save, so it is "
            "truncated, damaged, or something else. What torch.save has written, torch.load(path, weights_only=True) "
            "reads"
        )
    hashed = _hash_of_first(file, size - _SEALED - 2)
    hashed.update(b"\0\0")  # the length of no comment, as it was when the seal was made
    if comment[len(_SEAL) :] != hashed.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its bytes do not match the seal they were saved with")


def _hash_of_first(file: IO[bytes], count: int) -> Any:
    hashed = hashlib.sha256()
    file.seek(0)
    while count > 0 and (block := file.read(min(count, 1 << 20))):
        hashed.update(block)
        count -= len(block)
    return hashed


def _clear_leftovers(target: Path) -> None:
    """Remove temporary files of this target whose process, on this machine, has ended."""
    if os.name != "posix":
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{_HOST}-(\d+)-[0-9a-f]{{8}}\.tmp")
    for entry in os.listdir(target.parent):
        found = pattern.fullmatch(entry)
        left = target.with_name(entry)
        if found and str(left) not in _under_way and not _runs(int(found[1])):
            with suppress(OSError):
                left.unlink()


def _runs(process: int) -> bool:
    """Whether another process of this number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
