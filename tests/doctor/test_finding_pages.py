"""The pages of docs/findings: one for each code, with a script in which the doctor finds it and a cure in which not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.docs_results import FINDINGS

from preamp.doctor.findings import glossary, page
from preamp.errors import PreampError
from preamp.report import Finding, Report, Section

from .finding_pages import CODES, PAGES, alike, run, said, script, shown, text_of

ROOT = Path(__file__).resolve().parents[2]

EVERY_TIME = frozenset({"PA201"})
"""The others take minutes together and run with `./dev test --all`."""


def test_every_code_has_a_page() -> None:
    sources = (ROOT / "src" / "preamp").rglob("*.py")
    made = set(re.findall(r'(?:"|class )(PA\d{3})\b', "".join(path.read_text(encoding="utf-8") for path in sources)))
    assert set(CODES) == set(FINDINGS)
    assert made - set(FINDINGS) == set(), "codes without a page"
    assert set(FINDINGS) == made, "pages of codes that nothing makes"


@pytest.mark.parametrize("code", CODES)
def test_a_page_is_whole(code: str) -> None:
    text = text_of(code)
    assert text.startswith(f"# {code}: {FINDINGS[code]}\n")
    assert f"[{code}]({code}.md) | {FINDINGS[code]} |" in (PAGES / "README.md").read_text(encoding="utf-8")
    for words in ("**What it is.**", "**Why it hurts.**", "## How to see it", "## When it is harmless", "See also:"):
        assert words in text
    for kind in ("sick", "cure"):
        compile(script(code, kind), f"{code} {kind}", "exec")


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).is_file(), target


def _by_doctor() -> list[object]:
    return [pytest.param(code, marks=[] if code in EVERY_TIME else [pytest.mark.slow]) for code in CODES]


@pytest.mark.slow
@pytest.mark.parametrize("code", _by_doctor())
def test_the_sick_script_has_it_and_the_cure_has_not(code: str, tmp_path: Path) -> None:
    report, ran = run(code, "sick", tmp_path)
    assert code in {finding["code"] for finding in report["findings"]}, ran.stderr
    told = said(ran)
    assert alike(shown(code), told), f"python -m tests.doctor.finding_pages {code} writes into the page:\n{told}"

    report, ran = run(code, "cure", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert report.get("steps", len(report.get("runs", ()))) > 0
    left = [finding for finding in report["findings"] if finding["code"] == code or finding["severity"] != "info"]
    assert left == []


def test_what_a_page_shows_is_compared_whole() -> None:
    page = "warning PA202: 12% of it\n  seen:  scale 1, size 1.788e-6, a bound 2**12\n"
    assert alike(page, "warning PA202: 12% of\nit\n  seen: scale 1, size 1.79e-6, a bound 2**12")
    for old, new in (("scale 1,", "scale 2,"), ("1.788e-6", "1.4e-6"), ("2**12", "2**13"), ("of it", "of her")):
        changed = page.replace(old, new)
        assert changed != page and not alike(page, changed)
    assert not alike(page, page + "info PA105: more")


def test_the_report_says_what_its_findings_mean() -> None:
    told = glossary(CODES)
    assert set(told) == set(CODES)
    for text in told.values():
        assert text.startswith("What it is. ")
        assert "Why it hurts. " in text
    report = Report("t", "v", [Section("s", "", [Finding("PA202", "warning", "m")])], glossary=glossary(["PA202"]))
    assert "<summary>What PA202 means</summary>" in report.to_html()
    with pytest.raises(PreampError, match=r"no finding 'PA999'; the codes are PA101, "):
        page("PA999")
    assert page(" pa202 ") == text_of("PA202")
