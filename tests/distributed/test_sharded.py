"""FSDP2, FSDP1, stages: what every rank has to know alike, it does; wrong orders are told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("scale", ["dynamic", "hysteresis"])
def test_an_infinity_in_one_shard_skips_the_step_on_all_ranks(told: list[dict[str, Any]], scale: str) -> None:
    first, second = (each[f"one shard {scale}"] for each in told)
    assert first == second  # norms, the scale and all it has learnt, the names of the sick parameter
    assert first["skips"][:3] == [False, True, False]  # hysteresis keeps a scale that may overflow once more
    assert first["names"][:3] == [[], ["0.weight"], []]
    assert not math.isfinite(first["norms"][1])


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_flat_parameters_of_fsdp1_are_agreed_upon(told: list[dict[str, Any]], level: str) -> None:
    first, second = (each[f"flat {level}"] for each in told)
    assert first["skips"] == second["skips"] == [False, False, True, False]
    assert first["norms"] == second["norms"]
    assert first["scale"] == second["scale"]
    assert first["names"][2] == []  # each rank names its own
    assert second["names"][2] != []


def test_pipeline_stages_agree_over_the_group_that_they_are_given(told: list[dict[str, Any]]) -> None:
    first, second = (each["stages"] for each in told)
    assert first == second
    assert first["skips"] == [False, True, False, False]
    assert first["scale"] == 2.0**15
    assert all(math.isfinite(first["norms"][step]) for step in (0, 2, 3))
    assert all(0 < first["inf"][step] <= 0.5 for step in (0, 2, 3))  # after the first clipping


@pytest.mark.parametrize("case", ["O1", "O2", "O3", "O4", "O5", "compiled"])
def test_batch_norms_with_16_bit_weights_and_statistics_of_float32(told: list[dict[str, Any]], case: str) -> None:
    """torch's kernel takes no such mixture."""
    for each in told:
        seen = each["batch norms, compiled" if case == "compiled" else f"batch norms {case}"]
        assert seen["apart"] < 4e-3 and seen["batches"] == 4


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_gradients_travel_in_16_bits_and_are_summed_in_float32(told: list[dict[str, Any]], name: str) -> None:
    low = getattr(torch, name)
    for each in (rank[f"wire {name}"] for rank in told):
        sent = [torch.tensor(one).to(low).float() for one in each["each"]]
        mean = (torch.stack(sent).sum(0) / 2).to(low).float()
        assert torch.equal(torch.tensor(each["got"]), mean)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_uneven_inputs_ranks_go_on_alike(told: list[dict[str, Any]], level: str) -> None:
    first, second = (each[f"joined {level}"] for each in told)
    assert (first.pop("own"), second.pop("own")) == (3, 5)
    assert first == second
    assert first["steps"] == 5


@pytest.mark.parametrize(("master", "dtype"), [("float32", "torch.float32"), ("split", "torch.int16")])
def test_an_optimizer_keeps_masters_of_16_bit_shards(told: list[dict[str, Any]], master: str, dtype: str) -> None:
    assert all(each[f"16-bit shards, {master}"] == {"same": True, "dtype": dtype} for each in told)


@pytest.mark.parametrize("what", ["coded", "as float32", "and back", "whole", "told"])
def test_moments_in_8_bits_of_shards_are_loaded_by_every_kind(told: list[dict[str, Any]], what: str) -> None:
    assert all(each["states"][what] for each in told)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("torn", "weights of a SyncBatchNorm"),
        ("unsaid", "mp_policy=policy.fsdp()"),
        ("late", "In this order"),
        ("low", "Shard the float32 model"),
        ("exception", "fsdp(full=True)"),
        ("validated", "gathers this model's weights in bf16"),
        ("wrapped", "use fully_shard"),
        ("unsynced", "with session.no_sync()"),
    ],
)
def test_what_cannot_be_says_what_can(told: list[dict[str, Any]], order: str, says: str) -> None:
    for each in told:
        assert says in each["orders"][order]
