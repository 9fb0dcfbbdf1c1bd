"""What the tests of `preamp migrate` share: translations that are checked, and trainings to compare."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

from preamp.migrate import Migration, migrate_source

from .. import forks

SOURCE = Path(__file__).resolve().parents[2] / "src"


def migrated(text: str) -> Migration:
    """A translation, which has to be stable: a second one changes nothing."""
    found = migrate_source(textwrap.dedent(text), "s.py")
    compile(found.after, "s.py", "exec")
    assert migrate_source(found.after, "s.py").after == found.after
    return found


def clean(text: str) -> str:
    """The translation of something with nothing left to do, and nothing of Apex."""
    found = migrated(text)
    assert found.left == 0, [note.text("s.py") for note in found.notes]
    assert "apex" not in found.after and "scale_loss" not in found.after, found.after
    return found.after


def left(text: str) -> None:
    """A file is left as it is; a comment `# why: WORDS` stands at each line that a note is about, with its words."""
    found = migrate_source(text, "s.py")
    lines = text.splitlines()
    wanted = {n: line.partition("# why: ")[2] for n, line in enumerate(lines, 1) if "# why: " in line}
    told = {note.line: note.seen for note in found.notes if note.by_hand}
    assert found.after == text, found.diff()
    assert set(told) == set(wanted), told
    for line, words in wanted.items():
        assert words in told[line], (words, told[line])
    assert wanted and all("left as it is" in n.write for n in found.notes if n.by_hand)


def by_hand(text: str) -> list[tuple[int, str]]:
    """Lines and words of what is left to do."""
    return [(note.line, f"{note.seen}: {note.write}") for note in migrated(text).notes if note.by_hand]


DATA = """
import torch
from torch import nn

torch.manual_seed(0)
X = [torch.randn(16, 6) for _ in range(12)]
Y = [x[:, :1] * 2 - x[:, 1:2] for x in X]


class Args:
    fp16 = FP16
    fp16_opt_level = "LEVEL"
    accum = 2
    max_norm = 0.5


args = Args()
losses = []
"""

HARNESS = """
import json, runpy, sys, warnings
mode, *files = sys.argv[1:]
if mode == "apex":
    import preamp
    preamp.install_as_apex()
    from apex import amp
found = {}
for file in files:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if mode == "preamp" else "ignore")
        out = runpy.run_path(file)
    found[file.rpartition("/")[2]] = out["losses"]
    if mode == "apex":
        amp.close()
    else:
        for each in [out.get("session")]:
            each is None or each.close()
sys.stderr.write(json.dumps(found))
"""


def trained(mode: str, folder: Path, files: list[Path]) -> dict[str, list[float]]:
    harness = folder / "harness.py"
    harness.write_text(HARNESS, encoding="utf-8")
    done = forks.run([str(harness), mode, *map(str, files)], env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stderr)
    return found


LOOP = """
{imports}
model, optimizer = {amp}initialize(model, optimizer, opt_level="O1")
for x in data:
    loss = model(x)
    with {amp}scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
SCRIPT = LOOP.format(imports="from apex import amp", amp="amp.").lstrip()
