"""The site is built without a warning, no link in it is dead, and it has a place for every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import preamp

ROOT = Path(__file__).resolve().parents[2]


PUBLIC = [
    preamp, preamp.checkpoint, preamp.doctor, preamp.errors, preamp.lr_finder, preamp.optim, preamp.parallel,
    preamp.plan, preamp.report, preamp.zoo,
]  # fmt: skip


def public(module: ModuleType) -> Iterator[str]:
    """Names of classes, functions and constants; modules have pages, and no entry."""
    for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
        made = getattr(module, name)
        own = hasattr(module, "__all__") or getattr(made, "__module__", None) == module.__name__
        if own and not isinstance(made, ModuleType) and not name.startswith("__"):
            yield f"{module.__name__}.{name}"


class Page(HTMLParser):
    """The links of a page, what can be linked to in it, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "src" in given or (tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect")):
            self.loaded.append(given.get("src") or given.get("href") or "")
        self.links += [given[name] or "" for name in ("href", "src") if name in given]
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_no_link_is_dead(site: Path) -> None:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("#__"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 70
    assert dead == []


def test_no_request_leaves_the_site(site: Path) -> None:
    """The theme's script asks the host of a repository that a link names as its source, and loads mermaid."""
    for path in site.rglob("*.html"):
        if "gallery" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        assert not [each for each in Page(text).loaded if urlsplit(each).netloc], path
        assert 'data-md-component="source"' not in text and 'class="mermaid"' not in text, path


def test_a_page_that_is_not_there_leads_home(site: Path) -> None:
    page = Page((site / "404.html").read_text(encoding="utf-8"))
    assert {"/preamp/index.html", "/preamp/get-started/"} <= set(page.links)
    assert (site / "get-started" / "index.html").exists() and (site / "pictures" / "favicon.svg").exists()


def test_findings_have_their_names_in_the_sidebar(site: Path) -> None:
    text = (site / "findings" / "index.html").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "findings").glob("PA*.md")):
        name = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert re.search(rf"<span[^>]*>\s*{re.escape(name)}", text), name


def test_classes_show_how_they_are_made_and_from_what(site: Path) -> None:
    def told(page: str) -> str:
        text = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
        return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))

    assert re.search(r"DynamicScale\( ?init_scale: float = 2.0\*\*16, growth_factor: float = 2.0", told("scaling"))
    assert "Bases: torch.amp.GradScaler" in told("scaling") and "[2^-126, 2^127]" in told("scaling")
    assert "Bases: preamp.optim.FusedOptimizer" in told("optim") and "names_for" not in told("optim")
    session = told("session")
    assert re.search(r"level \( ?str \| None, default: None ?\)", session) and "_NOT_GIVEN" not in session


def test_examples_in_the_reference_are_code(site: Path) -> None:
    """Markdown takes `>>>` for quotations."""
    pages = [path.read_text(encoding="utf-8") for path in (site / "reference").rglob("*.html")]
    assert not [page for page in pages if "<blockquote>" in page]
    assert sum('class="gp"' in page for page in pages) > 3


def test_links_of_the_readme_lead_to_pages(site: Path) -> None:
    """They are absolute, for the package index, and go to the newest version of the site, main until there is a tag."""
    assert "mike deploy --push --update-aliases dev latest" in (ROOT / ".github/workflows/docs.yml").read_text("utf-8")
    start = "https://preamp-amp.github.io/preamp/latest/"
    links = re.findall(rf"\]\({re.escape(start)}([^)\s]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        page = site / path / "index.html"
        assert page.exists(), link
        assert not anchor or anchor in Page(page.read_text(encoding="utf-8")).anchors, link


def test_links_to_the_repository_lead_to_files_of_it(site: Path) -> None:
    start = "https://github.com/preamp-amp/preamp/"
    links = {link for path in site.rglob("*.html") for link in Page(path.read_text(encoding="utf-8")).links}
    inside = [link.removeprefix(start).split("/", 2) for link in links if link.startswith(start)]
    named = {rest[2].partition("#")[0] for rest in inside if rest[0] in ("blob", "tree")}
    assert named and {name for name in named if not (ROOT / name).exists()} == set()


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    """By the inventory, a file of Sphinx's format: a name is the first word of a line, after four lines of comment."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    known = {line.split()[0] for line in lines}
    wanted = {name for module in PUBLIC for name in public(module)}
    assert len(wanted) > 90
    # two are called as the module that they are in
    known |= {name for name in ("preamp.autocast", "preamp.policy") if f"{name}.{name.split('.')[1]}" in known}
    assert wanted - known == {"preamp.errors.kind_of"}, "a helper of preamp's own"
