"""How far the log-probabilities that two engines give the same tokens are apart.

In reinforcement learning one engine samples and another trains. Where they give a token other probabilities, the
gradient is that of another policy than the one that sampled (Qi et al. 2025, arXiv 2510.26788). A sampled token's
ratio is r = exp(trainer - sampler).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PreampError, kind_of
from ..report import Table, format_number
from ..report.values import Fields

CLIP = 0.2
"""How far PPO (Schulman et al. 2017) lets a ratio go from 1."""
SHOWN = 5
"""Tokens in the list of those that are farthest apart."""


@dataclass(frozen=True, slots=True)
class Apart(Fields):
    """A token whose log-probabilities differ."""

    sequence: int
    position: int
    sampler: float
    trainer: float


@dataclass(frozen=True, slots=True)
class LogprobComparison(Fields):
    """How natural log-probabilities of the same tokens differ. Means are over tokens that are finite on both sides."""

    tokens: int
    sequences: int
    not_finite: int
    """Tokens left out because a side has no finite number for them."""
    bias: float
    """The mean of trainer - sampler."""
    mean_apart: float
    """The mean of |trainer - sampler|."""
    largest: float
    """The largest |trainer - sampler|."""
    kl: float
    """KL(sampler || trainer) by the estimator r - 1 - log r (Schulman 2020, "Approximating KL Divergence")."""
    clipped: float
    """Share of tokens whose ratio is more than 0.2 away from 1, where PPO would clip before any training."""
    sequence_apart: float
    """The mean over sequences of |sum of trainer - sampler|: the logarithm of a sequence's importance weight."""
    worst: tuple[Apart, ...]
    """The tokens that are farthest apart."""

    def tables(self) -> tuple[Table, ...]:
        """What a terminal shows."""
        rows = [
            ("tokens, sequences", f"{self.tokens}, {self.sequences}"),
            ("bias: mean of trainer - sampler", f"{self.bias:+.3g}"),
            ("mean of |trainer - sampler|", format_number(self.mean_apart, 3)),
            ("largest |trainer - sampler|", format_number(self.largest, 3)),
            ("KL(sampler || trainer) a token", format_number(self.kl, 3)),
            (f"ratio more than {CLIP} from 1", f"{self.clipped:.3%}"),
            ("|log importance weight| of a sequence, mean", format_number(self.sequence_apart, 3)),
        ]
        if self.not_finite:
            rows.insert(1, ("tokens left out: not finite", str(self.not_finite)))
        worst = [(w.sequence, w.position, f"{w.sampler:.4f}", f"{w.trainer:.4f}") for w in self.worst]
        columns = ("sequence", "position", "sampler", "trainer")
        return Table("Log-probabilities", ("what", "nats"), rows), Table("Farthest apart", columns, worst)

    def __str__(self) -> str:
        return "\n\n".join(table.to_text() for table in self.tables())


def compare_logprobs(sampler: Any, trainer: Any, mask: Any = None) -> LogprobComparison:
    """Compare what two engines gave the same tokens.

    Args:
        sampler: Natural log-probabilities of the tokens that it drew: a floating tensor or array, (tokens,) or
            (sequences, tokens), or a list of one for each sequence, of any lengths.
        trainer: Those of the same tokens, in the same form.
        mask: In the same form; False or 0 where a token does not count (prompts, padding).

    Raises:
        PreampError: If their shapes differ, a number is above 0, or no token is left.

    >>> compare_logprobs(sampler=[-1.0, -2.0], trainer=[-1.5, -2.0]).largest
    0.5
    """
    ones, others = _sequences(sampler, "sampler"), _sequences(trainer, "trainer")
    masks = [np.ones(len(one), bool) for one in ones] if mask is None else _sequences(mask, "mask", np.bool_)
    for name, many in (("trainer", others), ("mask", masks)):
        if len(ones) != len(many):
            raise PreampError(f"the sampler has {len(ones)} sequences, and the {name} {len(many)}: give both the same")
        for i, (one, other) in enumerate(zip(ones, many, strict=True)):
            if len(one) != len(other):
                raise PreampError(
                    f"sequence {i} has {len(one)} tokens from the sampler and {len(other)} in the {name}: they are not "
                    "the same tokens. Leave out prompts on both sides, or on neither; the first token of one has none"
                )
    at = np.concatenate([np.full(len(one), i) for i, one in enumerate(ones)]) if ones else np.zeros(0, int)
    place = np.concatenate([np.arange(len(one)) for one in ones]) if ones else np.zeros(0, int)
    a, b = (np.concatenate(many) if many else np.zeros(0) for many in (ones, others))
    counts: Any = np.concatenate(masks) if masks else np.zeros(0, bool)
    for name, values in (("sampler", a), ("trainer", b)):
        if (values[counts] > 1e-3).any():
            raise PreampError(
                f"the {name} has a log-probability of {values[counts].max():.4g}, and none is above 0: give logarithms "
                "of probabilities, log_softmax(logits), not logits"
            )
    finite = np.isfinite(a) & np.isfinite(b)
    used = counts & finite
    if not used.any():
        raise PreampError("no token is left to compare: the mask has no True, or no number is finite")
    difference = (b - a)[used]
    sums = np.bincount(at[used], difference)[np.unique(at[used])]
    farthest = np.argsort(-np.abs(difference), kind="stable")[:SHOWN]
    indices = np.flatnonzero(used)[farthest]
    with np.errstate(over="ignore"):
        ratio = np.expm1(difference)
    return LogprobComparison(
        tokens=int(used.sum()),
        sequences=len(sums),
        not_finite=int((counts & ~finite).sum()),
        bias=float(difference.mean()),
        mean_apart=float(np.abs(difference).mean()),
        largest=float(np.abs(difference).max()),
        kl=float((ratio - difference).mean()),
        clipped=float((np.abs(ratio) > CLIP).mean()),
        sequence_apart=float(np.abs(sums).mean()),
        worst=tuple(Apart(int(at[i]), int(place[i]), float(a[i]), float(b[i])) for i in indices),
    )


def _sequences(given: Any, name: str, dtype: Any = np.float64) -> list[Any]:
    """One array for each sequence."""
    try:
        many = list(given)
        if all(each is None or np.ndim(each) == 0 for each in many):
            many = [given]
        found = [_array(each, dtype) for each in many]
        if any(each.ndim != 1 for each in found):
            raise ValueError("more dimensions than sequences and tokens")
    except (TypeError, ValueError, RuntimeError):
        raise PreampError(
            f"the {name} is {kind_of(given)} that holds no lists of numbers: write (tokens,) or (sequences, tokens), "
            "one number for each token"
        ) from None
    return found


def _array(given: Any, dtype: Any) -> Any:
    """Numbers as an array; of a tensor bfloat16, too, which numpy lacks."""
    if hasattr(given, "detach"):
        given = given.detach().cpu().double().numpy()
    elif not isinstance(given, np.ndarray):
        if isinstance(given, (str, set)) or any(isinstance(each, str) for each in given):
            raise TypeError("sets have no order, and of strings numpy would read True out of 'False'")
        given = [None if each is None else float(each) for each in given]
    return np.asarray(given, dtype)
