"""`Policy`: which dtype each kind of tensor has, as one frozen value; and the levels, as rows of one table."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, cast

import torch

from ..errors import PolicyError
from ..formats import LOW_DTYPES, dtype_of, name_of
from ..rules import OpRules

Scale = float | Literal["dynamic", "hysteresis"]
"""A loss scale as a policy states it: a number for a static scale (1: none), or the name of a schedule."""

SCHEDULES = ("dynamic", "hysteresis")
"""Names of schedules; "backoff" is another word for "dynamic"."""

_ELSEWHERE = {
    "opt_level": "level=", "cast_model_type": "params=", "keep_batchnorm_fp32": "norms=", "master_weights": "masters=",
    "loss_scale": "scale=", "dtype": "level=, 'O4' for bfloat16 and 'O1' for float16,",
    **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "growth_interval"), "of scale=DynamicScale(...)"),
}  # fmt: skip
"""What arguments of Apex's amp.initialize, of torch.autocast and of GradScaler are called here."""

Precision = Literal["full", "low"] | torch.dtype
"""Precision of a module override: "full" (float32), "low" (the policy's compute dtype), or a dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which dtype each kind of tensor has in training. A value: derive others with `replace` and `override`.

    It is also a string: `preamp.policy("params=fp16,compute=fp16,scale=dynamic")`, and `str(policy)` reads back.

    >>> preamp.policy("O1").override(r"decoder\\.\\d+", "full").replace(scale=512)
    """

    params: torch.dtype = torch.float32
    """Of the model's parameters and floating buffers, between steps."""
    compute: torch.dtype = torch.float32
    """Of matrix products and convolutions; what other operations run in is up to `ops`."""
    norms: torch.dtype | None = None
    """Of normalisation layers' parameters, statistics and inner arithmetic; None: whatever `ops` says."""
    output: torch.dtype | None = None
    """Floating tensors that the model returns are cast to this; None: left as they come."""
    masters: bool = False
    """Whether the optimizer steps a float32 copy of each low parameter."""
    scale: Scale = 1.0
    """Loss scale: a number above 0, or a schedule: "dynamic", "hysteresis"."""
    ops: OpRules | None = field(default_factory=OpRules)
    """Operator rules of the regions; None: no regions, operations run in the dtype of their inputs."""
    modules: tuple[tuple[str, Precision], ...] = ()
    """(regular expression over module paths, precision) pairs; see `override`."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, coerce(each.name, getattr(self, each.name)))
        _validate(self)

    def replace(self, /, **changes: Any) -> Policy:
        """A policy with some fields changed.

        Args:
            **changes: Fields and their values; dtypes may be names ("fp16").

        Raises:
            PolicyError: For a field that there is not, or values that do not fit together.
        """
        legal = {f.name for f in fields(self)}
        for name in changes:
            if name not in legal:
                hint = f". {name} of Apex or torch.amp is {_ELSEWHERE[name]} here" if name in _ELSEWHERE else ""
                near = get_close_matches(name, legal, n=1)
                hint = hint or (f". Write {near[0]}" if near else "")
                raise PolicyError(f"a policy has no field {name!r}; it has {', '.join(sorted(legal))}{hint}")
        return replace(self, **changes)

    def override(self, pattern: str, precision: str | torch.dtype) -> Policy:
        """A policy under which the modules whose path matches `pattern` have a precision of their own.

        An exact path wins over a pattern; a path that two patterns match in different precisions is a `PolicyError`
        when the model is prepared.

        Args:
            pattern: A regular expression that must match the whole path, as `named_modules()` spells it; what lies
                inside a matching module follows it.
            precision: "full", "low", or a dtype.
        """
        return replace(self, modules=(*self.modules, (pattern, precision_named(precision))))

    @property
    def level(self) -> str | None:
        """The level that this policy is ("O2"), or None when it is none of them."""
        return next((level.name for level in LEVELS if level.policy == self), None)

    @property
    def has_regions(self) -> bool:
        """Whether the forward pass runs in autocast regions."""
        return self.compute in LOW_DTYPES and self.ops is not None

    def fsdp(self, *, full: bool = False) -> Any:
        """Return torch's `MixedPrecisionPolicy` for this policy: `fully_shard(module, mp_policy=policy.fsdp())`.

        The sharded parameters stay float32 and are the masters; they are gathered in `compute`, their gradients summed
        over the ranks in float32.

        Args:
            full: For parts that are to compute in float32 (norms, a head): they are gathered as they are, get float32
                inputs, and return the 16-bit ones that the next part takes.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # takes long to import

        low = self.compute if self.compute in LOW_DTYPES else None
        if full and low is not None:
            wide = torch.float32
            return MixedPrecisionPolicy(param_dtype=wide, reduce_dtype=wide, output_dtype=low, cast_forward_inputs=True)
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low is not None else None)

    def __str__(self) -> str:
        parts = [
            f"params={name_of(self.params)}",
            f"compute={name_of(self.compute)}",
            f"norms={name_of(self.norms) if self.norms else 'rules'}",
            f"output={name_of(self.output) if self.output else 'as-is'}",
            f"masters={'yes' if self.masters else 'no'}",
            f"scale={self.scale if isinstance(self.scale, str) else repr(self.scale)}",
            f"ops={'none' if self.ops is None else 'rules'}",
        ]
        text = ",".join(parts)
        for pattern, precision in self.modules:
            text += f"; {pattern} -> {precision if isinstance(precision, str) else name_of(precision)}"
        if self.ops is not None and self.ops.changes:
            text += f"; {self.ops}"
        return text


def _validate(policy: Policy) -> None:
    low = policy.params in LOW_DTYPES
    if policy.params is not torch.float32 and not low:
        raise PolicyError(f"params={name_of(policy.params)}: parameters are fp32, fp16 or bf16")
    if policy.compute is not torch.float32 and policy.compute not in LOW_DTYPES:
        raise PolicyError(f"compute={name_of(policy.compute)}: compute is fp32, fp16 or bf16")
    if low and policy.compute is not policy.params:
        raise PolicyError(
            f"params={name_of(policy.params)} with compute={name_of(policy.compute)}: low parameters are computed with "
            "in their own dtype; write the same for both, or params=fp32 to have them cast where they are used"
        )
    if policy.masters and not low:
        raise PolicyError("masters=yes with params=fp32: float32 parameters are their own masters; write masters=no")
    if policy.norms is not None and policy.norms not in {torch.float32, policy.params}:
        raise PolicyError(
            f"norms={name_of(policy.norms)}: norms are fp32 or, as the parameters, {name_of(policy.params)}"
        )
    if policy.norms is None and low:
        raise PolicyError(
            "norms=rules with low parameters: norm layers hold parameters; write norms=fp32 or their dtype"
        )
    if policy.output is not None and policy.output not in {torch.float32, *LOW_DTYPES}:
        raise PolicyError(f"output={name_of(policy.output)}: output is fp32, fp16, bf16 or as-is")
    for pattern, precision in policy.modules if policy.compute is torch.float32 else ():
        if isinstance(precision, torch.dtype) and precision in LOW_DTYPES:
            raise PolicyError(
                f"{pattern} -> {name_of(precision)} with compute=fp32: nothing is cast in such a policy, and the rule "
                "would have no effect; write O1 or O4, and '-> full' for the other modules"
            )


def coerce(name: str, value: Any) -> Any:
    """A field's value from what a person writes."""
    if name in ("params", "compute"):
        return _dtype(name, value)
    if name == "norms" and str(value) in ("True", "False"):
        raise PolicyError(
            f"norms={value!r}: it is a dtype. Apex's keep_batchnorm_fp32=True is norms='fp32', and False the dtype of "
            "the parameters, as norms='fp16'"
        )
    if name in ("norms", "output"):
        return None if value in (None, "rules", "as-is", "none") else _dtype(name, value)
    if name == "masters":
        return _yes_or_no(value)
    if name == "scale":
        return _scale(value)
    if name == "ops":
        if value is None or isinstance(value, OpRules):
            return value
        if value in ("rules", "none"):
            return OpRules() if value == "rules" else None
        raise PolicyError(f"ops={value!r}: write 'rules', 'none', or an OpRules")
    if name == "modules":
        return _modules(value)
    return value


def _modules(value: Any) -> tuple[tuple[str, Precision], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise PolicyError(f"modules={value!r}: write pairs of pattern and precision, or 'O1; head -> full' in a string")
    rules: list[tuple[str, Precision]] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PolicyError(f"modules: {pair!r} should be a pair of pattern and precision: ('head', 'full')")
        _validate_pattern(pair[0])
        rules.append((pair[0], precision_named(pair[1])))
    return tuple(rules)


def _validate_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise PolicyError(f"{pattern!r} is not a regular expression over module paths: it is no string")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what will be read differently one day is ambiguous today
            re.compile(pattern)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise PolicyError(f"{pattern!r} is not a regular expression over module paths: {error}") from None
    # What follows could not be read back from the policy's string.
    if ";" in pattern or "->" in pattern:
        raise PolicyError(f"the pattern {pattern!r} may not contain ';' or '->': write \\x3b, or -[>]")
    if pattern != pattern.strip() or pattern.startswith("op "):
        raise PolicyError(f"the pattern {pattern!r} may not begin or end with a space, nor with 'op ': write [ ]")
    if not pattern:
        raise PolicyError("the pattern '' would match the model itself: write (?:), or .* for all that is in it too")


def _dtype(name: str, value: Any) -> torch.dtype:
    try:
        return dtype_of(value)
    except ValueError as error:
        raise PolicyError(f"{name}={value!r}: {error}") from None


def precision_named(value: Any) -> Precision:
    if value in ("full", "low"):
        return cast(Precision, value)
    found = _dtype("precision of a module", value)
    if found is not torch.float32 and found not in LOW_DTYPES:
        raise PolicyError(f"a module's precision is full, low, fp32, fp16 or bf16, not {value!r}")
    return "full" if found is torch.float32 else found


def _yes_or_no(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    answers = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if str(value).lower() not in answers:
        raise PolicyError(f"masters={value!r}: write yes or no")
    return answers[str(value).lower()]


def _scale(value: Any) -> Scale:
    if isinstance(value, str) and value in (*SCHEDULES, "backoff"):
        return cast(Scale, "dynamic" if value == "backoff" else value)
    if value in (None, "none"):
        return 1.0
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise PolicyError(f"scale={value!r}: a loss scale is a finite number above 0, 'dynamic' or 'hysteresis'")
    return number


@dataclass(frozen=True, slots=True)
class Level:
    """A row of the table of levels."""

    name: str
    alias: str
    policy: Policy
    summary: str


_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16

LEVELS: tuple[Level, ...] = (
    Level("O0", "fp32", Policy(), "float32 throughout: what the others are compared with"),
    Level(
        "O1", "fp16-mixed", Policy(compute=_FP16, scale="dynamic"),
        "float32 parameters, float16 where it is safe, by operator rules; loss scaling",
    ),
    Level(
        "O2", "fp16-master",
        Policy(params=_FP16, compute=_FP16, norms=_FP32, output=_FP32, masters=True, scale="dynamic"),
        "float16 parameters and activations, float32 norms and master weights; loss scaling",
    ),
    Level(
        "O3", "fp16", Policy(params=_FP16, compute=_FP16, norms=_FP16, output=_FP32, ops=None),
        "float16 throughout, no masters, no scaling: how fast it can be at most, rarely a way to train",
    ),
    Level("O4", "bf16-mixed", Policy(compute=_BF16), "as O1 in bfloat16, whose range needs no loss scaling"),
    Level(
        "O5", "bf16-master", Policy(params=_BF16, compute=_BF16, norms=_FP32, output=_FP32, masters=True),
        "as O2 in bfloat16, whose range needs no loss scaling",
    ),
)  # fmt: skip

LEVEL_BY_NAME = {name.lower(): level for level in LEVELS for name in (level.name, level.alias)}


def level_names() -> tuple[str, ...]:
    """Every name that `policy` and `prepare(level=...)` take."""
    return (*(level.name for level in LEVELS), *(level.alias for level in LEVELS), "auto")
