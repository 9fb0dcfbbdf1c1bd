"""Scripts, files and folders: read, translate, print or replace."""

from __future__ import annotations

import io
import os
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import MissingExtra, PreampError
from ._notes import CannotParse, Migration

_SKIPPED = {".git", ".hg", ".tox", ".venv", "venv", "__pycache__", "node_modules", "site-packages", "build", "dist"}


class NoSuchFile(PreampError, FileNotFoundError):
    """A file or folder that is not there."""


def migrate_source(source: str, filename: str = "script.py") -> Migration:
    """A script for `apex.amp` as one for preamp, formatting and comments kept.

    `filename` is what the difference and the notes call it; nothing is read or written. What cannot be translated is
    left as it is, with a `Note` of what to write. Raises `CannotParse` for what is not Python, and `MissingExtra`
    without libcst.

    >>> found = migrate_source(source, "train.py")
    >>> print(found.diff(), *(note.text("train.py") for note in found.notes), sep="\\n")
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise MissingExtra("libcst", "migrate", "rewriting a script") from error
    from ._migrate import migrate_text

    return migrate_text(source, filename)


def run(paths: Sequence[Path], write: bool = False) -> tuple[str, int]:
    """Translate files and all `*.py` in folders; the text to print and an exit status.

    `write`: replace the files, else only show the difference. Status 0: nothing is left to do by hand; 1: notes say
    what is; 2: a file could not be read, and was left alone. Raises `NoSuchFile`, and `MissingExtra` without libcst.
    """
    parts: list[str] = []
    status, silent = 0, 0
    single = len(paths) == 1 and paths[0].is_file()
    for path in files(paths):
        try:
            text, encoding = read(path)
            found = migrate_source(text, str(path))
        except CannotParse as error:
            parts.append(f"error: {error}\n")
            status = 2
            continue
        if not found.uses_apex and not single:
            silent += 1
            continue
        if write and found.changed:
            replace(path, found.after, encoding)
        parts.append(report(found, write))
        status = max(status, 1 if found.left else 0)
    if silent:
        parts.append(f"{silent} {'file uses' if silent == 1 else 'files use'} nothing of Apex\n")
    return "".join(parts), status


def report(found: Migration, written: bool) -> str:
    """The difference and the notes of one file; after writing, notes have the lines of the new text."""
    name = found.filename
    if not found.uses_apex:
        return f"{name}: uses nothing of Apex, nothing to translate\n"
    same = "left as it is" if found.left else "nothing to translate"
    head = f"{name}: rewritten\n" if written and found.changed else found.diff() or f"{name}: {same}\n"
    lines = [n.text(name, found.line_after(n.line) if written else None) for n in found.notes]
    return head + "".join(f"{line}\n" for line in lines)


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """Files as given, and every `*.py` in folders, but not in hidden or installed ones."""
    for path in paths:
        if path.is_dir():
            for each in sorted(path.rglob("*.py")):
                if each.is_file() and not _SKIPPED & set(each.relative_to(path).parts[:-1]):
                    yield each
        elif path.exists():
            yield path
        else:
            raise NoSuchFile(f"there is no file or folder {str(path)!r}: name a Python script, or a folder of them")


def read(path: Path) -> tuple[str, str]:
    """The text of a Python file, line ends as they are, and its encoding."""
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise CannotParse(f"{path}:1: not text that Python reads ({error}): save it as UTF-8") from error


def replace(path: Path, text: str, encoding: str) -> None:
    """Put a new text in the place of a file's, at once or not at all; its permissions stay."""
    target = path.resolve()  # through a link, so that it stays one
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode(encoding))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, target.stat().st_mode & 0o7777)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
