"""Levels, policies as strings, overrides, and what is said about a mistake."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import platform
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import preamp
from preamp.errors import PolicyError
from preamp.formats import cpu_multiplies
from preamp.policy import LEVELS, Policy, auto_level, cpu_arithmetic, level_names, policy
from preamp.rules import CATEGORIES, OpRules

from ..products import cpu_that_multiplies

TEXTS = [
    "O1,self=x",
    "self=1",
    "modules=head",
    "O1; a{99999999999999999999} -> full",
    "O1; [[a] -> full",
    "O1; " + "(" * 5000 + ")" * 5000 + " -> full",
    *(f"O1; op {name} -> low" for name in (".:", "aten::", "a::b::c", "__class__", "_dir", "loaded_libraries::add")),
    "O1; op ->",
    "O1; (?P<n>a)(?P<n>b) -> low",
    "O1; op \ud800::x -> low",
    "O1; op x\0 -> low",
    "O1; head -> fp64",
]
MAPPINGS: list[dict[Any, Any]] = [
    {1: 2},
    {"self": 1},
    {"modules": 5},
    {"modules": ["ab"]},
    {"modules": {"(": "full"}},
    {"modules": {5: "full"}},
    {"modules": [("a", torch.int64)]},
    {"scale": 10**400},
    {"scale": True},
]


@pytest.mark.parametrize("description", TEXTS + MAPPINGS, ids=lambda d: repr(d)[:30])
def test_only_a_policy_error(description: Any) -> None:
    with pytest.raises(PolicyError):
        preamp.policy(description)


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [("op head", "write [ ]"), (" head", "write [ ]"), ("head ", "write [ ]"), ("", "write (?:)"), ("(", "missing )")],
)
def test_a_pattern_that_could_not_be_read_back_is_refused(pattern: str, advice: str) -> None:
    for attempt in (lambda: Policy().override(pattern, "full"), lambda: Policy(modules=((pattern, "full"),))):
        with pytest.raises(PolicyError, match=re.escape(advice)):
            attempt()


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=8))
def test_every_pattern_that_is_accepted_reads_back(pattern: str) -> None:
    try:
        found = preamp.policy("O1").override(pattern, "full")
    except PolicyError:
        return
    assert preamp.policy(str(found)) == found


@pytest.mark.parametrize("name", ["mean.default", "sum.default", "cat.default", "add.Tensor"])
def test_a_rule_for_one_overload_reads_back_as_that_one(name: str) -> None:
    ops = OpRules().with_banned(name)
    assert len(ops.changes) == 1
    assert preamp.policy(str(Policy(ops=ops))).ops == ops


def test_fields_given_to_the_class_are_understood_alike() -> None:
    assert Policy(params="fp16", compute="fp16", norms="fp16", output="fp32", ops="none").level == "O3"
    assert Policy(modules=[("head", torch.float32)]).modules == (("head", "full"),)  # type: ignore[arg-type]
    assert Policy(masters="no") == Policy()  # type: ignore[arg-type]


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# design, section 2: level, alias, params, compute, norms, masters, scale, regions
TABLE = [
    ("O0", "fp32", FP32, FP32, None, False, 1.0, False),
    ("O1", "fp16-mixed", FP32, FP16, None, False, "dynamic", True),
    ("O2", "fp16-master", FP16, FP16, FP32, True, "dynamic", True),
    ("O3", "fp16", FP16, FP16, FP16, False, 1.0, False),
    ("O4", "bf16-mixed", FP32, BF16, None, False, 1.0, True),
    ("O5", "bf16-master", BF16, BF16, FP32, True, 1.0, True),
]


@pytest.mark.parametrize("name, alias, params, compute, norms, masters, scale, regions", TABLE)
def test_the_levels_are_those_of_the_design(
    name: str, alias: str, params: Any, compute: Any, norms: Any, masters: bool, scale: Any, regions: bool
) -> None:
    found = policy(name)
    assert (found.params, found.compute, found.norms, found.masters) == (params, compute, norms, masters)
    assert found.scale == scale and found.has_regions is regions and found.level == name
    assert not found.modules and (found.ops is None or not found.ops.changes)
    for spelling in (alias, alias.upper(), name.lower(), f" {name} "):
        assert policy(spelling) == found
    assert policy(found) is found
    assert policy(str(found)) == found and policy(dataclasses.asdict(found) | {"ops": found.ops}) == found


def test_there_are_no_other_levels() -> None:
    assert [(level.name, level.alias) for level in LEVELS] == [row[:2] for row in TABLE]
    assert level_names() == (*(row[0] for row in TABLE), *(row[1] for row in TABLE), "auto")
    assert all(level.summary for level in LEVELS)


def test_a_policy_is_a_value() -> None:
    one = policy("O1").override("head", "full").replace(ops=OpRules().with_low("softmax"))
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), policy(str(one))):
        assert other == one and hash(other) == hash(one)
    assert one != policy("O1") and len({one, policy("O1"), policy("O1")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.scale = 1.0  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        one.new = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        Policy(FP32)  # type: ignore[misc]
    assert one.level is None and policy("O1").override("head", "full").level is None


DTYPES = st.sampled_from([FP32, FP16, BF16])
PATTERN = st.from_regex(r"\A[a-z][a-z0-9_.]{0,8}(\.\*|\[0-9\]|\(a\|b\)|\\d\+)?\Z")
PRECISION: Any = st.sampled_from(["full", "low", FP16, BF16])
FAMILY = st.sampled_from(
    ["softmax", "exp", "matmul", "cat", "gelu", "layer_norm", "binary_cross_entropy", "tanh", "sum"]
)


@st.composite
def policies(draw: Any) -> Policy:
    params = draw(DTYPES)
    low = params is not FP32
    rules = OpRules()
    for name, category in draw(st.lists(st.tuples(FAMILY, st.sampled_from(CATEGORIES)), max_size=4)):
        rules = rules._with(category, (name,))  # type: ignore[arg-type]
    made = Policy(
        params=params,
        compute=params if low else draw(DTYPES),
        norms=draw(st.sampled_from([FP32, params])) if low else draw(st.sampled_from([None, FP32])),
        output=draw(st.none() | DTYPES),
        masters=low and draw(st.booleans()),
        scale=draw(
            st.sampled_from(["dynamic", "hysteresis"])
            | st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
            | st.integers(1, 2**30).map(float)
        ),
        ops=draw(st.none() | st.just(rules)),
    )
    precisions = st.sampled_from(["full", "low"]) if made.compute is FP32 else PRECISION
    for pattern, precision in draw(st.lists(st.tuples(PATTERN, precisions), max_size=3)):
        made = made.override(pattern, precision)
    return made


@settings(max_examples=300, deadline=None)
@given(policies())
def test_a_policy_reads_back_from_its_string(made: Policy) -> None:
    assert policy(str(made)) == made
    assert hash(policy(str(made))) == hash(made)
    assert "\n" not in str(made)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.integers(), st.floats(), st.booleans(), st.lists(st.integers(), max_size=2), st.binary(max_size=3),
              st.dictionaries(st.sampled_from(["params", "scale", "ops", "modules", "masters", "norms", "x", "output"]),
                              st.none() | st.integers() | st.floats() | st.text(max_size=4)
                              | st.lists(st.text(max_size=2), max_size=2)))
)  # fmt: skip
def test_other_things_than_strings(thing: Any) -> None:
    try:
        assert isinstance(policy(thing), Policy)
    except PolicyError as error:
        assert str(error)


WRONG = [
    ("O7", "there is no level 'O7'; the levels are O0, O1"),
    ("01", "the first sign is the letter O, not the digit zero"),
    ("O1,scale", "'scale' in the policy 'O1,scale' should read field=value"),
    ("scale=", "should read field=value"),
    ("scale=2,scale=3", "names 'scale' twice"),
    ("colour=red", "a policy has no field 'colour'; it has compute, masters, modules, norms"),
    ("O1; head", "'head' in the policy 'O1; head' should read 'module.path -> full'"),
    ("O1; head ->", "should read 'module.path -> full'"),
    ("O1; head -> fast", "'fast' is not a dtype preamp knows"),
    ("O1; ( -> full", "is not a regular expression over module paths"),
    ("O1; op softmax -> fast", "'fast' is not a category of rules; write one of low, full, promote, banned, as-is"),
    ("O1; op sofmax -> low", "'sofmax'; did you mean .*softmax"),
    ("O3; op softmax -> low", "has ops=none, so a rule for an operator has no effect"),
    ("params=fp64", "params=fp64: parameters are fp32, fp16 or bf16"),
    ("compute=fp64", "compute=fp64: compute is fp32, fp16 or bf16"),
    ("params=int7", "params='int7': 'int7' is not a dtype preamp knows"),
    ("params=fp16,compute=bf16", "low parameters are computed with in their own dtype"),
    ("O2,compute=fp32", "low parameters are computed with in their own dtype"),
    ("masters=yes", "float32 parameters are their own masters"),
    ("masters=maybe", "masters='maybe': write yes or no"),
    ("norms=fp16", "norms=fp16: norms are fp32 or, as the parameters, fp32"),
    ("O2,norms=rules", "norm layers hold parameters"),
    ("output=fp64", "output=fp64: output is fp32, fp16, bf16 or as-is"),
    ("scale=0", "scale='0': a loss scale is a finite number above 0, 'dynamic' or 'hysteresis'"),
    ("scale=lots", "scale='lots': a loss scale is a finite number above 0"),
    ("O0; head -> bf16", "head -> bf16 with compute=fp32: nothing is cast in such a policy"),
    ("ops=all", "ops='all': write 'rules', 'none', or an OpRules"),
    (3, "a policy is a level such as 'O2', a string of fields, a mapping or a Policy; got 3"),
]


@pytest.mark.parametrize("description, message", WRONG, ids=[str(row[0]) for row in WRONG])
def test_what_is_said_about_a_mistake(description: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(description)
    with pytest.raises(ValueError):
        policy(description)


def test_mistakes_in_a_constructor() -> None:
    for wrong in (True, False, 0, -2, 10**400, [1], "large", b"dynamic", float("nan"), float("inf")):
        for attempt in (Policy, Policy().replace):
            with pytest.raises(PolicyError, match="finite number above 0"):
                attempt(scale=wrong)
    for pattern in ("a;b", "a->b"):
        with pytest.raises(PolicyError, match="may not contain"):
            Policy().override(pattern, "full")
    with pytest.raises(PolicyError, match="no field 'level'"):
        Policy().replace(level="O1")


def test_fields_that_are_left_out_follow_from_the_others() -> None:
    assert policy("params=fp16") == policy("O2")
    assert policy("params=bf16") == policy("O5")
    assert policy("compute=fp16") == policy("O1")
    assert policy("compute=bf16") == policy("O4")
    assert policy("") == policy(None) == policy({}) == policy("O0") == Policy()
    assert policy(params="fp16", compute="fp16", norms="fp16", masters=False, scale=1, ops=None) == policy("O3")
    assert policy("O2, scale=512").scale == 512.0
    assert policy("O1,scale=hysteresis").scale == "hysteresis"
    assert policy("O3,scale=backoff") == policy("O3,scale=dynamic")
    assert policy("O2", scale=512, masters="no").masters is False
    assert preamp.policy("params=fp16,compute=fp16,output=fp32,scale=dynamic") == policy("O2")


def test_replace_takes_names() -> None:
    made = Policy().replace(compute="half", scale="dynamic", output="float32", norms=None)
    assert (made.compute, made.scale, made.output, made.norms) == (FP16, "dynamic", FP32, None)
    assert made.replace() == made and made.replace(output="as-is").output is None
    assert made.replace(modules={"head": "fp32"}).modules == (("head", "full"),)


def test_overrides_are_kept_in_order_and_normalised() -> None:
    made = policy("O1").override("a", "fp32").override(r"b\.\d+", FP16).override("c", "low")
    assert made.modules == (("a", "full"), (r"b\.\d+", FP16), ("c", "low"))
    assert str(made).endswith(r"; a -> full; b\.\d+ -> fp16; c -> low")
    assert policy(r"O1; a -> full; b\.\d+ -> float16; c->low") == made


def test_two_patterns_that_disagree_are_an_error_which_names_both() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ambiguous = policy("O4").override(r"\d", "full").override("[0-9]", "low")
    with pytest.raises(PolicyError, match=r"(?s)'[01]'.*\\\\?d.*\[0-9\]"):
        preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=ambiguous)
    exact = ambiguous.override("0", "full").override("1", "full")  # an exact path wins
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=exact):
        pass


@pytest.mark.parametrize(
    "capability, level", [((9, 0), "O4"), ((8, 0), "O4"), ((7, 5), "O1"), ((7, 0), "O1"), ((6, 1), "O0")]
)
def test_the_level_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch, capability: Any, level: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for device in ("cuda", None):
        found, reason = auto_level(device)
        assert found == level and f"{capability[0]}.{capability[1]}" in reason
    assert policy("auto") == policy(level)
    assert policy("AUTO, scale=7").scale == 7.0


@pytest.mark.parametrize("cpu, level, told", [
    ("bf16,fp16", "O4", "multiplies bfloat16 and float16 in hardware."),
    ("bf16", "O4", "multiplies bfloat16 in hardware. Products of float16 are computed in float32"),
    ("", "O0", "has no 16-bit arithmetic. Products of bfloat16 and float16 are computed in float32"),
])  # fmt: skip
def test_the_level_for_a_cpu(monkeypatch: pytest.MonkeyPatch, cpu: str, level: str, told: str) -> None:
    with cpu_that_multiplies(cpu):
        assert told in cpu_arithmetic()
        _check_cpu_level(monkeypatch, level)


def _check_cpu_level(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert auto_level("cpu")[0] == auto_level()[0] == level
    assert policy("auto").level == level


def test_the_level_for_other_devices() -> None:
    assert auto_level("xpu")[0] == "O4"
    found, reason = auto_level("toaster")
    assert found == "O0" and "'toaster'" in reason


def test_asking_about_a_cpu_that_has_no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    cpu_multiplies.cache_clear()
    try:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        assert not cpu_multiplies(torch.bfloat16)
    finally:
        cpu_multiplies.cache_clear()
    assert cpu_multiplies(torch.float32)


def test_the_documented_string_of_a_level() -> None:
    text = "params=fp16,compute=fp16,norms=fp32,output=fp32,masters=yes,scale=dynamic,ops=rules"
    assert str(policy("O2")) == text
    assert re.fullmatch(r"[a-z0-9=,.-]+", text)
