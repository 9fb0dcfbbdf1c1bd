import json

import pytest

from preamp.report import Finding, count_severities


def full(**changes):
    values = {
        "code": "PA201",
        "severity": "error",
        "message": "first non-finite value",
        "module": "encoder.3",
        "op": "aten._softmax",
        "direction": "forward",
        "file": "train.py",
        "line": 41,
        "step": 318,
        "evidence": {"amax": float("inf"), "carriers": ["a", "b"]},
        "fix": "a = 1\nb = 2",
    }
    return Finding(**{**values, **changes})


@pytest.mark.parametrize("code", ["PA20", "PA2011", "pa201", "PB201", "", "PA201\n", "PA\u0661\u0662\u0663"])
def test_a_code_that_is_not_pa_and_three_digits_is_refused(code):
    with pytest.raises(ValueError, match="PA and three digits"):
        full(code=code)


@pytest.mark.parametrize(("field", "value"), [("severity", "fatal"), ("direction", "sideways")])
def test_unknown_words_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        full(**{field: value})


def test_findings_sort_by_harm():
    info, warning = Finding("PA101", "info", "i"), Finding("PA102", "warning", "w")
    late, early, other = full(step=9), full(step=2), full(code="PA106")
    assert sorted([info, late, warning, early, other]) == [early, late, other, warning, info]
    assert count_severities([info, late, early]) == {"error": 2, "warning": 0, "info": 1}


def test_a_long_list_is_shown_in_part_and_kept_whole():
    whole = full(evidence={"carriers": [f"m{n}" for n in range(17)], "few": ["a"] * 8})
    assert whole.seen == (("carriers", "m0, m1, m2, m3, m4, m5, m6, and 10 more"), ("few", ", ".join("a" * 8)))
    assert whole.to_dict()["evidence"]["carriers"][16] == "m16"


def test_text_tells_place_evidence_and_fix():
    assert full().to_text().splitlines() == [
        "error PA201: first non-finite value",
        "  where: source train.py:41, module encoder.3, op aten._softmax, direction forward, step 318",
        "  seen:  amax inf, carriers a, b",
        "  fix:",
        "    a = 1",
        "    b = 2",
    ]
    assert Finding("PA109", "warning", "not in effect").to_text() == "warning PA109: not in effect"
    assert "module (root)" in Finding("PA109", "warning", "m", module="").to_text()
    assert "source line 3" in Finding("PA109", "warning", "m", line=3).to_text()


def test_what_was_tried_has_a_line_of_its_own_unless_the_fix_says_it():
    seen = {"amax": 1.5, "carried by": ["a", "b"], "tried": "finite, off by 1%"}
    assert full(evidence=seen, fix=None).to_text().splitlines()[2:] == [
        "  seen:  amax 1.5",
        "  carried by: a, b",
        "  tried: finite, off by 1%",
    ]
    assert "  tried:" not in full(evidence=seen, fix="x = 1\n# tried: finite, off by 1%").to_text()


def test_dict_is_strict_json_and_complete():
    found = json.loads(json.dumps(full().to_dict(), allow_nan=False))
    assert found == {**full().to_dict(), "evidence": {"amax": None, "carriers": ["a", "b"]}}
    assert set(found) == set(Finding.__dataclass_fields__)


def test_a_finding_is_a_value():
    evidence = {"amax": 1.0}
    finding = full(evidence=evidence)
    evidence["amax"] = 2.0
    assert finding.evidence == {"amax": 1.0}
    assert hash(finding) == hash(full(evidence=None))
