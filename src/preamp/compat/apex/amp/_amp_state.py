"""What amp remembers between calls: its API passes no handle, so it lives in one object of this module.

`_amp_state` has, besides the fields below, `opt_properties` and `loss_scalers` once `initialize` was called, and
`handle` once torch was patched (O1, O4, `init`). Scripts read and write all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .._notice import is_rank_zero


class AmpState:
    """The state of amp in this process."""

    hard_override = False
    """Whether forbidden overrides of options are printed as warnings instead of raised."""
    allow_incoming_model_not_fp32 = False
    """Whether `initialize` takes models with float16 parameters."""
    verbosity = 1
    """0: silent. 1: options and skipped steps. 2: every cast as well."""
    loaded_unused = False
    """Whether `load_state_dict` gave loss scales that no loss has had yet."""
    # what other modules put here: Properties, LossScalers by loss_id, an AmpHandle
    opt_properties: Any
    loss_scalers: list[Any]
    handle: Any

    def reset(self) -> None:
        """Set everything back to what it was when amp was imported."""
        self.__dict__.clear()


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise RuntimeError; with `hard_override` print the message instead."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless `verbosity` is 0; with `rank0`, in the first process of a group only."""
    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(message)


def master_params(optimizer: Any) -> Iterator[nn.Parameter]:
    """The parameters that `optimizer` steps: masters at O2 and O5 (after the first backward), else the model's."""
    for group in optimizer.param_groups:
        yield from group["params"]
