"""The page of each finding's code: `docs/findings`, which an installed package has beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import PreampError

_FOLDERS = (Path(__file__).parent / "findings", Path(__file__).parents[3] / "docs" / "findings")
_TOLD = ("**What it is.**", "**Why it hurts.**")


def page(code: str) -> str:
    """The page of a code, in Markdown. Raises `PreampError` naming the codes there are."""
    pages = _pages()
    wanted = code.strip().upper()
    if wanted not in pages:
        known = ", ".join(sorted(pages)) or "none: the pages are not installed"
        raise PreampError(f"there is no finding {code!r}; the codes are {known}")
    return pages[wanted].read_text(encoding="utf-8")


def glossary(codes: Iterable[str]) -> dict[str, str]:
    """What the codes mean and why it hurts, in plain paragraphs, for those that have a page."""
    pages = _pages()
    found = {}
    for code in sorted({*codes} & pages.keys()):
        parts = [" ".join(part.split()) for part in page(code).split("\n\n")]
        told = [part for part in parts if part.startswith(_TOLD)]
        more = f"With a script that has it, and its cure: `preamp explain {code}`."
        found[code] = "\n\n".join([*(part.replace("**", "") for part in told), more])
    return found


def _pages() -> dict[str, Path]:
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob("PA*.md")}
