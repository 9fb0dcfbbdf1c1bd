"""Scenes: exact masks, and held-out digits on held-out parts of the textures.

Digits: one stratified split for good, a shift that loses nothing, and gates that scale.
"""

from __future__ import annotations

import pytest
import torch

from preamp.zoo import _data_digits as digits
from preamp.zoo import unet as scenes
from preamp.zoo.seresnext import SHIFT, SqueezeExcite, framed, shifted
from preamp.zoo.unet import overlap


def test_the_split_is_disjoint_and_stratified():
    train, held = digits.load(held_out=False), digits.load(held_out=True)
    assert not set(train.rows.tolist()) & set(held.rows.tolist())
    assert train.labels.bincount().tolist() == [400] * 10
    assert held.labels.bincount().tolist() == [100] * 10
    assert train.images.dtype == torch.float32
    assert (train.images.min(), train.images.max()) == (0.0, 1.0)


def test_a_shift_moves_whole_images():
    images = torch.zeros(64, 28, 28)
    images[:, 10:18, 10:18] = torch.rand(64, 8, 8, generator=torch.Generator().manual_seed(0))
    moved = shifted(images, torch.Generator().manual_seed(1))
    assert torch.allclose(moved.sum((1, 2)), images.sum((1, 2)))
    offsets = set()
    for before, after in zip(images, moved, strict=True):
        reach = range(-SHIFT, SHIFT + 1)
        found = [(i, j) for i in reach for j in reach if torch.equal(before.roll((i, j), (0, 1)), after)]
        assert len(found) == 1
        offsets.update(found)
    assert len(offsets) > 10


def test_frames_have_the_networks_shape():
    images = digits.load(held_out=True).images[:3]
    assert framed(images, "ci").shape == (3, 1, 28, 28)
    assert framed(images, "full").shape == (3, 3, 112, 112)
    assert framed(images, "full").is_contiguous()


def test_a_gate_scales_each_channel_by_one_number():
    gate = SqueezeExcite(32, reduction=16)
    x = torch.rand(2, 32, 5, 5) + 0.1
    share = gate(x) / x
    assert torch.allclose(share, share[:, :, :1, :1].expand_as(share))
    assert (share > 0).all()
    assert (share < 1).all()


def make(size="ci", count=8, *, held_out=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scenes.make_scenes(scenes.CANVASES[size], count, held_out=held_out, generator=generator)


@pytest.mark.parametrize("size, side, channels", [("ci", 64, 1), ("full", 256, 3)])
def test_masks_are_exact(size, side, channels):
    made = make(size, 6)
    assert made.images.shape == (6, channels, side, side)
    assert made.masks.shape == (6, 1, side, side)
    assert torch.equal(made.masks, (made.ink > 0.5).float())
    bare = (made.ink == 0).expand_as(made.images)
    assert torch.allclose(made.images[bare], made.ground[bare], atol=1e-6)
    drawn = (made.masks > 0).expand_as(made.images)
    assert ((made.images - made.ground)[drawn].abs() > 0.02).float().mean() > 0.95  # what is masked was changed
    assert 0.03 < made.masks.mean() < 0.3


def test_the_ink_is_that_of_the_digits(monkeypatch):
    square = torch.zeros(1, 28, 28)
    square[:, 9:19, 9:19] = 1
    one = digits.Digits(images=square, labels=torch.zeros(1).long(), rows=torch.zeros(1).long())
    monkeypatch.setattr(digits, "load", lambda *, held_out: one)
    canvas = scenes.Canvas(channels=1, cut=64, enlarge=1, digits=1, patch=56, smallest=2.0, largest=2.0)
    made = scenes.make_scenes(canvas, 16, held_out=False, generator=torch.Generator().manual_seed(0))
    whole = made.masks.sum((1, 2, 3))
    assert ((whole - 400).abs() < 20).all(), whole  # 10 x 10 pixels, twice as large; turning moves only the rim


def test_textures_lie_in_the_package():
    textures = scenes.textures()
    assert textures.shape == (len(scenes.TEXTURES), 3, scenes.SIDE, scenes.SIDE)
    assert (textures.amax((1, 2, 3)) > 0.5).all()
    assert textures.min() >= 0
    assert textures.max() <= 1


@pytest.mark.parametrize("size", ["ci", "full"])
def test_splits_see_different_parts_of_the_textures(monkeypatch, size):
    canvas = scenes.CANVASES[size]
    parted = torch.zeros(8, scenes.SIDE, scenes.SIDE, canvas.channels)
    parted[:, :, scenes.BORDER :] = 10.0
    monkeypatch.setattr(scenes, "_atlas", lambda channels: parted)
    for held_out, level in ((False, 0.0), (True, 10.0)):
        cuts = scenes._cuts(canvas, 64, held_out=held_out, generator=torch.Generator().manual_seed(0))
        assert ((cuts - level).abs() <= 0.11).all()  # brightness alone; a cut across the border would show both


def test_splits_draw_different_digits(monkeypatch):
    asked = []
    load = digits.load
    monkeypatch.setattr(digits, "load", lambda *, held_out: asked.append(held_out) or load(held_out=held_out))
    make(held_out=True)
    make(held_out=False)
    assert asked == [True, False]


def test_overlap_by_hand():
    masks = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).view(2, 1, 2, 2)
    logits = torch.tensor([[2.0, -1.0, 3.0, -0.5], [float("nan"), -1.0, 0.0, 0.1]]).view(2, 1, 2, 2)
    assert overlap(logits, masks).tolist() == [[1.0, 3.0], [0.0, 1.0]]
