"""Digits: one stratified split for good, a shift that loses nothing, and gates that scale."""

from __future__ import annotations

import torch

from preamp.zoo import _data_digits as digits
from preamp.zoo.seresnext import SHAPES, SHIFT, SEResNeXt, SqueezeExcite, framed, shifted


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


def test_the_logits_have_one_column_per_class():
    model = SEResNeXt(SHAPES["ci"]).eval()
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
