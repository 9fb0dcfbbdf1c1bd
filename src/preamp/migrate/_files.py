"""Scripts, files and folders: read, rewrite, print or replace."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from ..errors import MissingExtra, PreampError
from ..report.files import write_with
from ._notes import CannotParse, Migration

_SKIPPED = {".git", ".hg", ".tox", ".venv", "venv", "__pycache__", "node_modules", "site-packages", "build", "dist"}


def migrate_source(source: str, filename: str = "script.py", beside: Iterable[tuple[str, str]] = ()) -> Migration:
    """A script for Apex as one that runs without it, formatting and comments kept.

    `filename` is what the difference and the notes call it; nothing is read or written. `beside`: names and texts of
    the project's other files; calls are translated only where none of them has to do with Apex. Raises `CannotParse`
    for what is not Python, and `MissingExtra` without libcst.
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise MissingExtra("libcst", "migrate", "rewriting a script") from error
    from ._migrate import migrate_text

    return migrate_text(source, filename, beside)


def run(paths: Sequence[Path], write: bool = False) -> tuple[str, int]:
    """Rewrite files and all `*.py` in folders; the text to print and an exit status.

    `write`: replace the files, else only show the difference. Status 0: they run without Apex; 1: a note says what
    they need that preamp's Apex does not have; 2: a file could not be read, and was left alone. `PreampError` for one
    that is not there, `MissingExtra` without libcst.
    """
    parts, status, given = list[str](), 0, list(files(paths))
    for path in given:
        try:
            text, encoding = read(path)
            others = (each for each in chain(given, files([_outside(path)])) if each.resolve() != path.resolve())
            beside = ((str(each), each.read_text("utf-8", "replace")) for each in others)
            found = migrate_source(text, str(path), beside)
        except CannotParse as error:
            parts.append(f"error: {error}\n")
            status = 2
            continue
        own = _own_apex(path, paths) if found.uses_apex else None
        if own is not None:
            parts.append(f"{path}: left as it is, since apex is {own} here\n")
        elif found.uses_apex:
            if write and found.after != text:
                replace(path, found.after, encoding)
            parts.append(report(found, write))
            status = max(status, int(any(note.by_hand for note in found.notes)))
    return "".join(parts) or "nothing of Apex is used there\n", status


def report(found: Migration, written: bool) -> str:
    """The difference and the notes of one file; after writing, notes have the lines of the new text."""
    name = found.filename
    lines = [f"{name}: rewritten\n" if written and found.diff() else found.diff() or f"{name}: nothing to change\n"]
    for note in found.notes:
        line = found.line_after(note.line) if written else note.line
        lines.append(f"{name}:{line}: {'by hand' if note.by_hand else 'note'}: {note.text}\n")
    return "".join(lines)


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
            raise PreampError(f"there is no file or folder {str(path)!r}: name a Python script, or a folder of them")


def _own_apex(path: Path, roots: Sequence[Path]) -> Path | None:
    """A module of the project's own that is called apex, and that Python finds first."""
    folders = (path.parent, _outside(path), *(root for root in roots if root.is_dir()))
    places = (folder / name for folder in folders for name in ("apex.py", "apex/__init__.py"))
    return next((place for place in places if place.exists()), None)


def _outside(path: Path) -> Path:
    """The folder that a file's imports begin in: its own, or that of the package it is in."""
    return next(folder for folder in path.absolute().parents if not (folder / "__init__.py").exists())


def read(path: Path) -> tuple[str, str]:
    """The text of a Python file, line ends as they are, and its encoding."""
    if path.suffix == ".ipynb":
        raise CannotParse(f"{path}:1: a notebook: export it first (jupyter nbconvert --to script), and migrate that")
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise CannotParse(f"{path}:1: not text that Python reads ({error}): save it as UTF-8") from error


def replace(path: Path, text: str, encoding: str) -> None:
    """Put a new text in the place of a file's, at once or not at all; its permissions stay."""
    target = path.resolve()  # through a link, so that it stays one
    mode = target.stat().st_mode & 0o7777
    write_with(target, lambda temporary: temporary.write_bytes(text.encode(encoding)))
    target.chmod(mode)
