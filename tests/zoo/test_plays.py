"""Plays: held out whole, cut into pieces the same way every time, and masked as BERT masks."""

from __future__ import annotations

import pytest
import torch

from preamp.zoo import bert as plays
from preamp.zoo.bert import SHAPES, Bert

PIECES = SHAPES["ci"].pieces


def test_four_whole_plays_are_held_out():
    held = {path.stem for path in plays.paths() if plays.is_held_out(path)}
    assert held == set(plays.HELD_OUT)
    assert len(plays.paths()) == 38
    assert len({path.parent.name for path in plays.paths() if plays.is_held_out(path)}) == 4


@pytest.mark.slow
def test_the_splits_share_no_passage():
    train, held = (plays.load_plays(PIECES, held_out=split).ids for split in (False, True))
    assert len(train) > 5 * len(held) > 500_000

    factors = torch.randint(2**62, (24,), generator=torch.Generator().manual_seed(0))

    def passages(ids, step):  # hashed, since there are a million
        return (ids.unfold(0, 24, step) * factors).sum(1)

    assert not torch.isin(passages(held, 24), passages(train, 1)).any()


def test_every_piece_is_known():
    for split in (False, True):
        ids = plays.load_plays(PIECES, held_out=split).ids
        assert ids.min() >= len(plays.SPECIAL)
        assert ids.max() < PIECES
    assert plays.load_plays(PIECES, held_out=False).vocabulary == PIECES <= SHAPES["ci"].vocabulary
    assert SHAPES["full"].pieces <= SHAPES["full"].vocabulary


def test_lines_are_free_of_markup(tmp_path):
    path = tmp_path / "play.md"
    path.write_text("# Title\n\n**BERNARDO**  \nWho's there?  \n\n_Enter \\[two\\] GHOSTS_\n", encoding="utf-8")
    assert plays.lines(path) == ["Title", "BERNARDO:", "Who's there?", "Enter  [two ] GHOSTS"]


@pytest.mark.slow
def test_preparation_repeats_exactly():
    files = plays.paths()[:3]
    first, second = plays._prepare(files, 600), plays._prepare(files, 600)
    assert first["vocabulary"] == second["vocabulary"] == 600
    assert torch.equal(first["train"], second["train"])


def test_windows_are_framed():
    rows = plays.windows(torch.arange(100, 200), torch.tensor([0, 7]), 6)
    assert rows.tolist() == [[plays.CLS, 100, 101, 102, 103, plays.SEP], [plays.CLS, 107, 108, 109, 110, plays.SEP]]


def test_masking_is_15_percent_split_80_10_10():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 1000, (2000, 64), generator=generator)
    rows[:, 0], rows[:, -1] = plays.CLS, plays.SEP
    seen, target = plays.masked(rows, 1000, generator)
    asked = target != plays.IGNORED
    assert (asked.sum(1) == round(0.15 * 62)).all()
    assert not asked[:, [0, -1]].any()
    assert torch.equal(target[asked], rows[asked])
    assert torch.equal(seen[~asked], rows[~asked])
    hidden = (seen[asked] == plays.MASK).float().mean().item()
    kept = (seen[asked] == rows[asked]).float().mean().item()
    assert abs(hidden - 0.8) < 0.015
    assert abs(kept - 0.1) < 0.015
    other = seen[asked][(seen[asked] != plays.MASK) & (seen[asked] != rows[asked])]
    assert other.min() >= len(plays.SPECIAL)
    assert other.max() < 1000
    assert other.unique().numel() > 500
    assert (asked.float().mean(0)[1:-1] - 9 / 62).abs().max() < 0.04  # every position alike


def test_each_position_hears_of_the_others():
    model = Bert(SHAPES["ci"]).eval()
    ids = torch.randint(5, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 40] = 4
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(2)[0]
    assert (difference > 0).all()
    assert difference.argmax() == 40
