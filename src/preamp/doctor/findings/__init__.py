"""The findings, a file for each code: thresholds, judgement from events, message and fix.

What a code means stands on its page in `docs/findings`, which ships with the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import PreampError

_HERE = Path(__file__).parent
_PAGES = (_HERE.parent / "pages", _HERE.parents[3] / "docs" / "findings")
"""Of an installed package, and of the repository."""
_MEANING = ("**What it is.**", "**Why it hurts.**")
AT_END = ("PA107", "PA108", "PA201", "PA203")
"""What the report judges, from records: a process that does so loads no others, as they want torch."""


def codes() -> list[str]:
    """All of them, in order."""
    return sorted(path.stem.upper() for path in _HERE.glob("pa*.py"))


def one_of_each(base: type[Any], among: Iterable[str] | None = None) -> list[Any]:
    """A new one of each subclass of `base` that the files of this folder define, or those of some codes."""
    modules = [import_module(f".{code.lower()}", __name__) for code in (codes() if among is None else among)]
    named = [(module.__name__, value) for module in modules for value in vars(module).values()]
    kinds = [value for name, value in named if isinstance(value, type) and value.__module__ == name]
    return [kind() for kind in kinds if issubclass(kind, base)]


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
