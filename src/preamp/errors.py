"""The exception tree.

    PreampError
      PolicyError          (ValueError)   a policy, level, rule or override that makes no sense
      ScaleError           (ValueError)   a loss scale or schedule outside its range
        ScaleCollapse                     too many skipped steps in a row: training cannot go on
      SessionError         (RuntimeError) a step, backward or state used out of order, or after close()
      StateError           (ValueError)   a state_dict that does not fit
      OptimizerError       (ValueError)   hyper-parameters or gradients that an optimizer of preamp.optim cannot step
      CheckpointError      (RuntimeError) a file that is not a checkpoint of preamp, or is damaged
      MissingExtra         (ImportError)  an optional package is not installed

    PreampWarning          (UserWarning)  everything preamp warns about

Each also derives from the built-in exception that a caller who never heard of preamp would catch.
A message says what was seen, why it hurts, and what to write instead.
"""

from __future__ import annotations


class PreampError(Exception):
    """Base of everything that preamp raises on purpose."""


class PolicyError(PreampError, ValueError):
    """A policy, level, rule or per-module override that is misspelt, ambiguous or contradictory."""


class OptimizerError(PreampError, ValueError):
    """A hyper-parameter, parameter or gradient that an optimizer of `preamp.optim` cannot step."""


class ScaleError(PreampError, ValueError):
    """A loss scale or a schedule's parameter outside the range in which it protects gradients."""


class ScaleCollapse(ScaleError):
    """So many steps in a row were skipped that no loss scale helps any more.

    `name`: the loss; `scale`: where it stands; `skipped`: steps skipped in a row; `parameter`: the first
    parameter with a gradient that is not finite, by its path in the model, or None when none is found.
    """

    def __init__(self, message: str, *, name: str, scale: float, skipped: int, parameter: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.scale = scale
        self.skipped = skipped
        self.parameter = parameter


class SessionError(PreampError, RuntimeError):
    """A session used out of order: a step without backward, anything after close()."""


class StateError(PreampError, ValueError):
    """A state_dict whose version, keys or shapes do not fit what it is loaded into."""


class CheckpointError(PreampError, RuntimeError):
    """A checkpoint that is damaged, was not written by preamp, or does not fit the objects."""


class MissingExtra(PreampError, ImportError):
    """A package that only an extra of preamp installs is missing."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f'{why} needs the package {package!r}, which is not installed: pip install "preamp[{extra}]"')
        self.package = package
        self.extra = extra


class PreampWarning(UserWarning):
    """Something that works but is likely not what was meant."""


def kind_of(value: object) -> str:
    """The type of a value with its article, as errors say it: "an AdamW", "a Linear"; "the class AdamW" for that."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"
