"""What the documents say holds: examples run, generated parts are current, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from markdown.extensions.toc import slugify
from tools import docs, docs_results, docs_site

import preamp

from ..session.toys import batch, mlp

ROOT = Path(__file__).resolve().parents[2]


def code_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_readme_example_runs_as_written(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = code_blocks("README.md")[0].replace('level="O4"', f'level="{level}"')
    model = mlp()
    evaluated = []
    namespace = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), eps=1e-4),
        "loader": [batch(i) for i in range(5)],
        "loss_fn": F.cross_entropy,
        "evaluate": lambda m: evaluated.append({p.dtype for p in m.parameters()}),
    }
    exec(example, namespace)
    assert evaluated == [{torch.float32}]
    saved = torch.load("ckpt.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "amp"} and saved["amp"]["steps"] == 5
    namespace["session"].close()


def test_other_examples_compile() -> None:
    for name in ("README.md", "docs/rules.md", "docs/reliability.md"):
        for block in code_blocks(name):
            compile(block, name, "exec")


@pytest.mark.parametrize("name", docs.DOCUMENTS)
def test_generated_parts_are_current(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert docs.renewed(ROOT, text) == text, "run ./dev docs"
    assert text.count("<!-- begin:") == text.count("<!-- end:") > 0


def section(page: str) -> list[str]:
    """The lines below a heading: `page.md#anchor`."""
    name, _, anchor = page.partition("#")
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    heads = {at: len(line.split()[0]) for at, line in enumerate(lines) if re.match(r"#+ ", line)}
    start = next(at for at in heads if slugify(lines[at].lstrip("# "), "-") == anchor)
    end = next((at for at, depth in heads.items() if at > start and depth <= heads[start]), len(lines))
    return lines[start:end]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize("figure", docs_site.measured(ROOT), ids=lambda figure: figure.what)
def test_a_figure_is_in_the_lines_that_its_link_leads_to(figure: docs_site.Figure) -> None:
    """And what stands there names the command that measures it anew."""
    told = section(figure.page)
    for words in figure.lines:
        assert any(all(word in (cells(line) if line[:1] == "|" else line) for word in words) for line in told), words
    named = {word for words in figure.lines for word in words}
    assert all(figure.what in named or number in named for number in re.findall(r"[\d.]+", figure.what))
    assert any("made by `" in line for line in told)
    page, _, anchor = figure.page.partition("#")
    for first, link in (("README.md", f"{docs_site.SITE}{page[:-3]}/#{anchor}"), ("docs/index.md", figure.page)):
        lines = (ROOT / first).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if figure.what in line and f"]({link})" in line], (
            f"{first} has no link beside it"
        )


@pytest.mark.parametrize("first", ["README.md", "docs/index.md"])
def test_first_pages_have_no_figure_but_generated_ones(first: str) -> None:
    text = (ROOT / first).read_text(encoding="utf-8")
    boxes = re.search(r"<!-- begin: figures.*?<!-- end: figures", text, re.DOTALL)
    assert boxes is not None
    strong = re.findall(r"^\* \*\*(.+?)\*\*|<strong>(.+?)</strong>", boxes[0], re.MULTILINE)
    assert ["".join(each) for each in strong] == [figure.what for figure in docs_site.measured(ROOT)]
    own = re.sub(r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->|```.*?```|\]\(.*?\)|`.*?`", "", text, flags=re.DOTALL)
    own = re.sub(r"(Python|torch) \d\.\d+", "", own)
    assert re.findall(r"\d+\.\d+|\d+ (?:of|to) \d+|\d+ ?(?:%|times)", own) == []


def test_figures_of_the_story_about_cpus_are_cells_of_its_page() -> None:
    story = docs_results.cpu_story(ROOT).partition(" Both with torch ")[0]
    known = {cell for line in section("cpu.md#what-it-costs-and-what-it-saves") for cell in cells(line)}
    assert len(numbers := re.findall(r"\d+\.\d+", story)) > 10
    assert set(numbers) <= known


def test_figures_that_begin_the_page_of_the_step_are_cells_of_its_tables() -> None:
    """Perhaps rounded: 10.48 is told as 10.5."""
    bullets = re.findall(
        r"^\* \*\*.*?(?=\n\n|\n\*)", (ROOT / "docs/step.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    known = {cell for line in section("step.md#measured") for cell in cells(line) if re.fullmatch(r"\d+\.\d+", cell)}
    told = {number for bullet in bullets[:3] for number in re.findall(r"\d+\.\d+", bullet)}
    assert len(told) > 7
    assert not {n for n in told if not any(f"{float(cell):.{len(n.partition('.')[2])}f}" == n for cell in known)}


def test_the_doctors_report_in_the_gallery_has_the_overflow() -> None:
    """The picture on the first pages is of it; on another processor the script's numbers are others."""
    report = (ROOT / "docs" / "gallery" / "doctor.html").read_text(encoding="utf-8")
    assert "PA201" in report and "made inf out of finite values" in report


def test_links_lead_somewhere() -> None:
    dead = [
        f"{path.name} links to {target}"
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"))
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not dead


def test_the_sidebar_calls_pages_what_they_call_themselves() -> None:
    told = re.findall(r"^ +- ([^:\n]+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {ROOT / "docs" / page: name for name, page in told if name != "Home"}
    own = {path: path.read_text(encoding="utf-8").splitlines()[0] for path in pages if path.exists()}
    assert len(own) > 50
    assert {path: name for path, name in own.items() if name != f"# {pages[path]}"} == {}


def test_the_citation_names_what_is_published() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert told["cff-version"] == "1.2.0" and {"message", "title"} <= told.keys()
    assert told["version"] == preamp.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.search(rf"^## \[{re.escape(preamp.__version__)}\] - (\S+)", changelog, re.MULTILINE)
    assert str(told.get("date-released")) == (released[1] if released else "None")
    assert all(f'"{author["name"]}"' in project for author in told["authors"])
    for key, name in (("url", "Homepage"), ("repository-code", "Repository")):
        assert f'{name} = "{told[key]}"' in project
    assert f'license = "{told["license"]}"' in project


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.name)
def test_templates_of_issues_are_forms(path: Path) -> None:
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in told["contact_links"])
        return
    assert told["name"] and told["description"]
    assert all(each["type"] in ("input", "textarea") and each["attributes"]["label"] for each in told["body"])
    assert len({each["id"] for each in told["body"]}) == len(told["body"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.name)
def test_workflows_run_what_is_there(path: Path) -> None:
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert told["name"] == path.stem and told[True]  # YAML takes the word on for a truth value
    assert "permissions" in told, "else a job may do everything"
    for job in told["jobs"].values():
        assert job["runs-on"] and all(("run" in step) != ("uses" in step) for step in job["steps"])
        for word in " ".join(step.get("run", "") for step in job["steps"]).split():
            if word.startswith(("tests/", ".ci/", "./")):
                assert (ROOT / word).exists(), word
