"""The findings, a file for each code: thresholds, judgement from events, message and fix.

What a code means stands on its page in `docs/findings`, which ships with the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import PreampError
from .check import Check

_HERE = Path(__file__).parent
_PAGES = (_HERE.parent / "pages", _HERE.parents[3] / "docs" / "findings")
"""Of an installed package, and of the repository."""
_MEANING = ("**What it is.**", "**Why it hurts.**")
_AT_END = ("PA107", "PA108", "PA201", "PA203")
"""What the report judges, from records: a process that does so loads no others, as they want torch."""


def codes() -> list[str]:
    """All of them, in order."""
    return sorted(path.stem.upper() for path in _HERE.glob("pa*.py"))


def checks() -> list[Check]:
    """A new one of each kind."""
    return [kind() for code in codes() for kind in _kinds(code, Check)]


def checks_at_end() -> list[Check]:
    """A new one of each kind that looks at a whole run."""
    return [kind() for code in _AT_END for kind in _kinds(code, Check)]


def kinds_of(base: type[Any]) -> list[type[Any]]:
    """Subclasses of `base` that the files of this folder define."""
    return [kind for code in codes() for kind in _kinds(code, base)]


def _kinds(code: str, base: type[Any]) -> Iterator[type[Any]]:
    module: ModuleType = import_module(f".{code.lower()}", __name__)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
            yield value


def page(code: str) -> str:
    """The page of a code, in Markdown. Raises `PreampError` naming the codes there are."""
    pages = _pages()
    wanted = f"PA{code.strip().upper().removeprefix('PA')}"
    if wanted not in pages:
        known = ", ".join(sorted(pages)) or "none: the pages are not installed"
        raise PreampError(f"there is no finding {code!r}; the codes are {known}")
    return pages[wanted].read_text(encoding="utf-8")


def glossary(wanted: Iterable[str]) -> dict[str, str]:
    """What codes mean and why it hurts, in plain paragraphs, as their pages have it."""
    found = {}
    for code in sorted({*wanted} & {*_pages()}):
        parts = [" ".join(part.split()) for part in page(code).split("\n\n")]
        meaning = [part.replace("**", "") for part in parts if part.startswith(_MEANING)]
        found[code] = "\n\n".join([*meaning, f"With a script that has it, and its cure: `preamp explain {code}`."])
    return found


def _pages() -> dict[str, Path]:
    folder = next((folder for folder in _PAGES if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob("PA*.md")}
