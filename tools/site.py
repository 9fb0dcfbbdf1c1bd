"""MkDocs' hooks: what the site has beside the pages in `docs`.

Changelog and contributing page come from the root of the tree, a tutorial is the notebook among the examples. Links
that leave `docs` (an example, a result) lead to the file in the repository, as they do for a reader of the source.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

FROM_THE_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site, by the file of the root that they are."""

NOTEBOOK = {"tutorials/notebook.md": "examples/tour.ipynb"}

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie in the root."""
    from mkdocs.structure.files import File

    for uri, name in FROM_THE_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for uri, name in NOTEBOOK.items():
        files.append(File.generated(config, uri, content="\n\n".join(cells(name))))
    return files


def cells(name: str) -> Iterator[str]:
    """A notebook as Markdown, with what its cells have printed."""
    for cell in json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        printed = "".join("".join(output.get("text", ())) for output in cell.get("outputs", ()))
        if printed:
            yield f"```text\n{printed}```"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of `docs` to the repository."""
    at_root = page.file.src_uri in FROM_THE_ROOT
    folder = ROOT if at_root else (ROOT / "docs" / page.file.src_uri).parent

    def led(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        inside = Path(os.path.relpath(folder / target, ROOT / "docs")).as_posix()
        if not inside.startswith(".."):
            return f"{link[1]}{inside}{'#' + anchor if anchor else ''}{link[3]}" if at_root else link[0]
        path = Path(os.path.relpath(folder / target, ROOT))
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{link[1]}{config.repo_url}/{kind}/main/{path.as_posix()}{link[3]}"

    return _LINK.sub(led, markdown)
