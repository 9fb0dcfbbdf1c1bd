"""What the documents say holds: examples run, generated parts are current, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tools import docs

from ..session.toys import batch, mlp

ROOT = Path(__file__).resolve().parents[2]


def code_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_readme_example_runs_as_written(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = code_blocks("README.md")[0].replace('level="O2"', f'level="{level}"')
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
    for name in ("README.md", "docs/rules.md"):
        for block in code_blocks(name):
            compile(block, name, "exec")


@pytest.mark.parametrize("name", docs.DOCUMENTS)
def test_generated_parts_are_current(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert docs.renewed(ROOT, text) == text, "run ./dev docs"
    assert text.count("<!-- begin:") == text.count("<!-- end:") > 0


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("**/*.md")), ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("module", ["preamp.rules", "preamp.autocast._region", "preamp.report.table"])
def test_doctests(module: str) -> None:
    import preamp

    globs = {"preamp": preamp, "torch": torch, **vars(importlib.import_module(module))}
    result = doctest.testmod(importlib.import_module(module), extraglobs=globs)
    assert result.attempted and not result.failed
