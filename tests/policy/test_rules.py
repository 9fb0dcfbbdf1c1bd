"""The table of operator rules and `OpRules`."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.errors import PolicyError
from preamp.rules import CATEGORIES, TABLE, OpRules, autocast_key, native_category, resolve

NAMES = [*(row.family for row in TABLE), "gelu", "tanh"]
FAMILIES = [row.family for row in TABLE]
OPS = [op for row in TABLE for op in row.ops]


def test_each_operator_stands_in_one_row_with_a_reason() -> None:
    assert len(set(OPS)) == len(OPS) and len(set(FAMILIES)) == len(FAMILIES)
    for row in TABLE:
        assert row.category in CATEGORIES and row.ops and len(row.reason) > 10


def test_each_operator_exists_in_this_torch() -> None:
    missing = []
    for op in OPS:
        packet, _, overload = op.partition(".")
        found = getattr(torch.ops.aten, packet, None)
        if found is None or (overload or "default") not in found.overloads():
            missing.append(op)
    # of other torch releases: their kernels are left out where they are missing
    assert set(missing) <= {"ctc_loss", "linalg_matrix_norm.str", "linalg_matrix_sqrth", "cholesky", "qr"}


def unknown_to_us(key: str) -> set[str]:
    """Operators that torch has rules for and the table has not.

    Less those of named tensors, which torch has given up, and cuDNN's RNN, whose rule lays weights out anew as well.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    unknown = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - set(OPS)
    return {op for op in unknown - {"_cudnn_rnn"} if not re.search(r"dimname|\.names", op, re.IGNORECASE)}


def test_torchs_own_rules_on_cuda_are_in_the_table() -> None:
    assert not unknown_to_us("AutocastCUDA")


def test_torchs_own_rules_on_the_cpu_are_in_the_table() -> None:
    assert not unknown_to_us("AutocastCPU")


def test_every_rule_of_torch_on_cuda_is_ours() -> None:
    for op in OPS:
        native = native_category(op, "cuda")
        assert native is None or native == OpRules().category(op) or op == "binary_cross_entropy"


@pytest.mark.parametrize("device, key", [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"), ("mps", "AutocastMPS"),
                                         ("privateuseone", "AutocastPrivateUse1")])  # fmt: skip
def test_keys(device: str, key: str) -> None:
    assert autocast_key(device) == key and hasattr(torch._C.DispatchKey, key)


changes = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(CATEGORIES)), max_size=6)


@settings(max_examples=200, deadline=None)
@given(changes)
def test_the_last_word_counts_and_order_is_forgotten(words: list[tuple[str, str]]) -> None:
    rules = OpRules()
    for name, category in words:
        rules = rules._with(category, (name,))  # type: ignore[arg-type]
    last = dict(words)
    for name, category in last.items():
        covers = set(resolve(name))
        if all(not covers & set(resolve(other)) for other in last if other != name):
            assert rules.category(name) == category
    again = OpRules()
    for name, category in reversed(last.items()):
        again = again._with(category, (name,))  # type: ignore[arg-type]
    if len({op for name in last for op in resolve(name)}) == sum(len(resolve(name)) for name in last):
        assert again == rules and hash(again) == hash(rules)
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert dict(rules.ruled()) == {**{op: row.category for row in TABLE for op in row.ops}, **dict(rules.changes)}
    rows = rules.rows()
    assert sorted(op for row in rows for op in row.ops) == sorted(op for op, _ in rules.ruled())


def test_going_back_to_the_default_leaves_no_change() -> None:
    for row in TABLE:
        rules = OpRules().with_banned(row.family)._with(row.category, (row.family,))
        assert rules == OpRules() and str(rules) == ""


def test_a_family_with_different_rules_has_no_one_category() -> None:
    rules = OpRules().with_low("softmax.int")
    with pytest.raises(PolicyError, match=r"ask for one of softmax\.int, _softmax"):
        rules.category("softmax")
    assert rules.category("softmax.int") == "low" and rules.category("_softmax") == "full"
    assert OpRules().category("gelu") is None


def test_all_ways_to_name_an_operator() -> None:
    assert resolve("exp") == resolve(torch.exp) == resolve("aten::exp") == ("exp", "expm1")
    assert resolve("gelu") == resolve(torch.nn.functional.gelu) == ("gelu",)
    assert resolve("softmax.int") == ("softmax.int",)
    assert "mean.dim" in resolve("mean") and not any("out" in name for name in resolve("mean"))
    for wrong in ("", ".", "::", "a::b::c", "no such", "exp.nothing", "__init__"):
        with pytest.raises(PolicyError):
            resolve(wrong)
