"""What the reference shows of the code: examples as code, and bases by the names that they have on its pages."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)

_EXCEPTIONS = {n for n, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"


class Reference(griffe.Extension):
    """Fences every example, up to the next empty line: Markdown would take the prompts `>>>` for quotations.

    Bases are those that a reader can look up: exceptions of Python's, classes of torch's, and those on a page of the
    reference. A class between is left out, and its own bases stand for it.
    """

    def __init__(self) -> None:
        told = "".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
        self._shown = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (preamp\.\S+)", told, re.MULTILINE)}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change a docstring once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Leave out what stands for an argument that was not given: it has no default."""
        for parameter in func.parameters:
            if str(parameter.default) == "_NOT_GIVEN":
                parameter.default = None

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Name the bases once all classes are read."""
        classes = {each.path: each for each in _classes(pkg)}
        named = {path: list(dict.fromkeys(self._named(each, classes))) for path, each in classes.items()}
        for path, each in classes.items():
            each.bases = [*named[path]]

    def _named(self, cls: griffe.Class, classes: dict[str, griffe.Class]) -> Iterator[str]:
        for base in cls.bases:
            path = base if isinstance(base, str) else base.canonical_path
            own = classes.get(path)
            if own is None:
                if path.startswith("torch.") or path in _EXCEPTIONS:
                    yield path
            elif own.name in self._shown:
                yield self._shown[own.name]
            else:
                yield from self._named(own, classes)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member
