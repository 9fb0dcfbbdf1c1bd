"""The doctor on scripts with one planted disease each, and on healthy ones: run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .expect import command, disease, doctor, scripts

EVERY_TIME = frozenset({
    "arc_margin", "clip_after_unscale", "clip_while_scaled", "cuda_region_on_cpu", "log1p_of_clamped", "scale_collapse",
    "tiny_gradients",
})  # fmt: skip
"""A few; the others take minutes together and run with `./dev test --all`."""

_FRAMEWORKS = ("lightning", "accelerate", "transformers")


def _parameters(kind: str) -> list[object]:
    found = []
    for path in scripts(kind):
        marks = [] if path.stem in EVERY_TIME else [pytest.mark.slow]
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


def _needs(path: Path) -> None:
    for name in _FRAMEWORKS:
        if f"import {name}" in path.read_text() or f"from {name}" in path.read_text():
            pytest.importorskip(name)


@pytest.mark.parametrize("path", _parameters("scripts"))
def test_the_planted_disease_is_found_in_its_place(path: Path, tmp_path: Path) -> None:
    _needs(path)
    wanted = disease(path)
    report, ran = doctor(path, tmp_path / "out", command(wanted))
    assert any(wanted.met_by(finding) for finding in report["findings"]), (wanted, report["findings"], ran.stderr)
    for said in (finding[part] or "" for finding in report["findings"] for part in ("message", "fix")):
        assert not re.search(r"\{\w*\}|\b(inf|nan)%", said), said


@pytest.mark.slow
@pytest.mark.parametrize("path", _parameters("healthy"))
def test_nothing_is_found_in_a_healthy_script(path: Path, tmp_path: Path) -> None:
    _needs(path)
    report, ran = doctor(path, tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert report["steps"] > 0 or ".backward(" not in path.read_text()  # which only evaluates
    assert [f for f in report["findings"] if f["severity"] != "info"] == []
