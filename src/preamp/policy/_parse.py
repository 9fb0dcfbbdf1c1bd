"""Policies from what a person writes: a level, a string of fields, a mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from ..errors import PolicyError
from ..formats import LOW_DTYPES
from ..rules import category_named
from ._levels import auto_level
from ._policy import LEVEL_BY_NAME, Policy, coerce, level_names


def policy(description: str | Policy | Mapping[str, Any] | None = None, **changes: Any) -> Policy:
    """Make a policy from a description.

    Fields that a description without a level leaves out follow from the others: `compute` from `params`; low params
    have float32 norms, output and masters; fp16 compute has a dynamic scale.

    Args:
        description: A level or alias ("O2", "bf16-mixed"); "auto", the best level of this machine's default device;
            fields ("params=fp16,compute=fp16,scale=512"), also after a level ("O2,scale=512"), and after them module
            and operator rules, each behind a semicolon ("O1; head -> full; op softmax -> low"); a mapping of fields;
            or a policy.
        **changes: Single fields on top.

    Raises:
        PolicyError: For a description that makes no sense.

    >>> preamp.policy("O2,scale=512").masters
    True
    """
    if description is None:
        return _from_fields(changes)
    if isinstance(description, Policy):
        found = description
    elif isinstance(description, Mapping):
        if strange := [name for name in description if not isinstance(name, str)]:
            raise PolicyError(f"a mapping of a policy's fields has the key {strange[0]!r}, which is no field's name")
        found = _from_fields(description)
    elif isinstance(description, str):
        found = _parse(description)
    else:
        raise PolicyError(
            f"a policy is a level such as 'O2', a string of fields, a mapping or a Policy; got {description!r}"
            f"{_meant(str(description).removeprefix('torch.'))}"
        )
    return found.replace(**changes) if changes else found


def _parse(text: str) -> Policy:
    head, *rules = text.split(";")
    words = [word.strip() for word in head.split(",") if word.strip()]
    base: Policy | None = None
    if words and "=" not in words[0]:
        name = words.pop(0)
        if name.lower() == "auto":
            name = auto_level()[0]
        if name.lower() not in LEVEL_BY_NAME:
            hint = " (the first sign is the letter O, not the digit zero)" if re.fullmatch(r"0\d", name) else ""
            raise PolicyError(
                f"there is no level {name!r}{hint}; the levels are {', '.join(level_names())}{_meant(name)}"
            )
        base = LEVEL_BY_NAME[name.lower()].policy
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if len(key.split()) > 1:
            raise PolicyError(f"the policy {text!r} wants commas: write {','.join(word.split())!r}")
        if not equals or not value:
            raise PolicyError(f"{word!r} in the policy {text!r} should read field=value, for instance scale=dynamic")
        if key in given:
            raise PolicyError(f"the policy {text!r} names {key!r} twice")
        given[key] = value
    found = base.replace(**given) if base is not None else _from_fields(given)
    for rule in rules:
        found = _with_rule(found, rule.strip(), text)
    return found


def _meant(name: str) -> str:
    """Which levels something that is none was probably to be, as the end of a message."""
    known = level_names()
    sought = name.strip().lower().replace("bfloat", "bf").replace("float", "fp")
    if re.fullmatch(r"\d", sought):
        near = [level for level in known if level == f"O{sought}"]
    else:
        near = [level for level in known if len(sought) > 2 and sought in level]
    near = near or get_close_matches(sought, known, n=2)
    if not near:
        return ". What they are: preamp levels"
    return f". Write {' or '.join(f'{each!r}{_alias_of(each)}' for each in near)}"


def _alias_of(name: str) -> str:
    level = LEVEL_BY_NAME.get(name.lower())
    return f" ({level.name})" if level is not None and level.name != name else ""


def _with_rule(found: Policy, rule: str, text: str) -> Policy:
    subject, arrow, meaning = (part.strip() for part in rule.rpartition("->"))
    if not arrow or not subject or not meaning:
        raise PolicyError(f"{rule!r} in the policy {text!r} should read 'module.path -> full' or 'op softmax -> low'")
    if subject.startswith("op "):
        operator = subject[3:].strip()
        if not operator.isprintable():
            raise PolicyError(f"{rule!r} in the policy {text!r} names no operator")
        if found.ops is None:
            raise PolicyError(f"{rule!r}: the policy {text!r} has ops=none, so a rule for an operator has no effect")
        changed = found.ops._with(category_named(meaning), (operator,))
        return replace(found, ops=changed)
    return found.override(subject, meaning)


def _from_fields(given: Mapping[str, Any]) -> Policy:
    known = {name: coerce(name, value) for name, value in given.items()}
    params = known.get("params", torch.float32)
    low = params in LOW_DTYPES
    compute = known.get("compute", params)
    derived: dict[str, Any] = {
        "params": params,
        "compute": compute,
        "norms": torch.float32 if low else None,
        "output": torch.float32 if low else None,
        "masters": low,
        "scale": "dynamic" if compute is torch.float16 else 1.0,
    }
    return Policy().replace(**{**derived, **known})
