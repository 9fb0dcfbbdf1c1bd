"""The page `docs/inside/a-step-in-the-code.md` names files and functions in the order in which a step calls them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import preamp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inside" / "a-step-in-the-code.md"


def calls_of_a_step() -> list[tuple[str, str]]:
    """(file, function) of every call of preamp's in a step at O2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-3)
    x, calls = torch.randn(4, 8), []
    root = str(Path(preamp.__file__).parent) + "/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_name))

    with preamp.prepare(model, optimizer, level="O2") as session:
        for step in range(6):
            if step == 5:  # states are there, and lists are cached
                sys.setprofile(note)
            try:
                with session.autocast():
                    loss = model(x).square().mean()
                session.backward(loss)
                session.clip_grad_norm_(1.0)
                session.step()
                session.zero_grad()
            finally:
                sys.setprofile(None)
    return calls


def test_the_step_in_the_code_is_the_step() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 30
    calls = calls_of_a_step()
    at = 0
    for row in rows:
        assert row in calls[at:], f"{row} does not come after {calls[max(at - 1, 0)]}"
        at = calls.index(row, at) + 1
