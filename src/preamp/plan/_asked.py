"""The arguments of a plan, and the combinations that preamp or torch refuses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import optim
from ..autocast import REGISTRY
from ..errors import OptimizerError, PolicyError, PreampError, PreampWarning, SessionError
from ..formats import LOW_DTYPES, dtype_of, name_of
from ..optim import FusedOptimizer
from ..policy import Policy
from ..session import prepare


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer: how it is made, and how many states of a parameter's shape it keeps."""

    make: type[Optimizer]
    moments: int
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def fused(self) -> bool:
        """Whether it is one of preamp.optim, which steps 16-bit gradients and writes 16-bit weights itself."""
        return issubclass(self.make, FusedOptimizer)


_MOMENTUM = MappingProxyType({"momentum": 0.9})

KINDS: dict[str, Kind] = {
    "adam": Kind(optim.Adam, 2),
    "adamw": Kind(optim.AdamW, 2),
    "sgd": Kind(optim.SGD, 0),
    "sgd-momentum": Kind(optim.SGD, 1, _MOMENTUM),
    "adagrad": Kind(optim.Adagrad, 1),
    "lamb": Kind(optim.LAMB, 2),
    "novograd": Kind(optim.NovoGrad, 1),
    "lion": Kind(optim.Lion, 1),
    "torch.adam": Kind(torch.optim.Adam, 2),
    "torch.adamw": Kind(torch.optim.AdamW, 2),
    "torch.sgd": Kind(torch.optim.SGD, 0),
    "torch.sgd-momentum": Kind(torch.optim.SGD, 1, _MOMENTUM),
    "torch.adagrad": Kind(torch.optim.Adagrad, 1),
}
"""Optimizers by the name that a plan takes; those of torch begin with "torch."."""

_LEGAL: dict[str, tuple[str, ...]] = {
    "shard": ("none", "ddp", "fsdp2", "zero1"),
    "states": ("float32", "8bit"),
    "rounding": ("nearest", "stochastic"),
    "master": ("float32", "split", "none"),
    "optimizer": tuple(KINDS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """All arguments, checked."""

    policy: Policy
    world: int
    shard: str
    optimizer: str
    states: str
    master: str | None
    """"float32" or "split" where the policy wants masters, else None."""
    rounding: str
    shadow: bool
    reshard: bool
    bucket_view: bool
    reduce: torch.dtype
    units: int

    @property
    def kind(self) -> Kind:
        """The optimizer."""
        return KINDS[self.optimizer]

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, and so are their own masters."""
        return self.shard == "fsdp2"

    @property
    def replicated(self) -> bool:
        """Whether DistributedDataParallel holds whole parameters and gradients on every rank."""
        return self.shard in ("ddp", "zero1")


def ask(policy: Policy, *, optimizer: str | None, master: str | None, reduce: str | torch.dtype, **given: Any) -> Asked:
    """Check the arguments. Raises the `PreampError` that preamp itself raises for them, if any."""
    for what, why in (("world", "a run has one rank or more"), ("units", "FSDP2 gathers a model in one unit or more")):
        if isinstance(given[what], bool) or not isinstance(given[what], int) or given[what] < 1:
            raise PreampError(f"{what}={given[what]!r}: {why}")
    named = {**given, "master": "float32" if master is None else master, "optimizer": optimizer or "adamw"}
    for what, legal in _LEGAL.items():
        if named[what] not in legal:
            raise PreampError(f"{what}={named[what]!r}: write {', '.join(legal)}")
    shard, world = given["shard"], given["world"]
    if shard == "none" and world > 1:
        raise PreampError(
            f"world={world} with shard='none': ranks that exchange nothing train apart; write shard='ddp', 'fsdp2' or "
            "'zero1', or world=1"
        )
    reduced = _reduce(reduce)
    misplaced = {
        "reshard=False": not given["reshard"] and shard != "fsdp2",
        f"reduce={reduce!r}": reduced is not torch.float32 and shard != "fsdp2",
        "bucket_view=True": given["bucket_view"] and shard not in ("ddp", "zero1"),
    }
    for what, is_so in misplaced.items():
        if is_so:
            raise PreampError(f"{what} with shard={shard!r}, which has no such choice: leave it out")
    asked = Asked(policy=policy, optimizer=named["optimizer"], master=_master(policy, master), reduce=reduced, **given)
    _check_sharded(asked)
    _check_optimizer(asked)
    _check_replicated(asked)
    _rehearse(asked)
    return asked


def _master(policy: Policy, master: str | None) -> str | None:
    """The kind of master of a 16-bit weight; None if the policy has no masters."""
    if policy.masters:
        if master == "none":
            raise PolicyError(
                "master='none' under a policy with masters=yes: the session keeps float32 masters whatever the "
                "optimizer says; write the policy with masters=no, as in 'O5,masters=no'"
            )
        return master or "float32"
    if policy.params in LOW_DTYPES and master in ("float32", "split"):
        raise PolicyError(
            f"master={master!r} under a policy with masters=no: nothing would be kept beside {name_of(policy.params)} "
            "weights; write the policy with masters=yes, as O2 and O5 have it"
        )
    if master == "split":
        raise PolicyError(
            "master='split' with params=fp32: float32 parameters are their own masters, and there is nothing to split; "
            "use level='O5'"
        )
    return None


def _reduce(reduce: str | torch.dtype) -> torch.dtype:
    try:
        dtype = dtype_of(reduce)
    except ValueError as error:
        raise PreampError(f"reduce: {error}") from None
    if dtype is not torch.float32 and dtype not in LOW_DTYPES:
        raise PreampError(f"reduce={name_of(dtype)}: gradients are reduced in fp32, fp16 or bf16")
    return dtype


def _check_sharded(asked: Asked) -> None:
    if not asked.sharded:
        return
    if asked.master == "split":
        raise PolicyError(
            "master='split' with shard='fsdp2': the sharded float32 parameters are the masters themselves, and the "
            "16-bit weights are only gathered: leave it out there"
        )
    if asked.shadow:
        raise PolicyError(
            "shadow=True with shard='fsdp2': FSDP2 gathers weights in 16 bits and casts none of them: leave it out"
        )
    if asked.rounding == "stochastic":
        raise PolicyError(
            "rounding='stochastic' with shard='fsdp2': float32 shards lose nothing that chance could save: leave it out"
        )


def _check_optimizer(asked: Asked) -> None:
    own, rounds = asked.kind.fused, (optim.Adam, optim.Lion)
    for what, value, plain, having in (
        ("states", asked.states, "float32", rounds[:1]), ("rounding", asked.rounding, "nearest", rounds),
    ):  # fmt: skip
        if value != plain and not issubclass(asked.kind.make, having):
            names = "adam, adamw and lion" if len(having) > 1 else "adam and adamw"
            raise OptimizerError(
                f"{what}={value!r} with optimizer={asked.optimizer!r}: only {names} of preamp.optim have it; write one "
                f"of them, or {what}={plain!r}"
            )
    if asked.master == "split" and not own and not asked.sharded:
        raise OptimizerError(
            f"master='split' with optimizer={asked.optimizer!r}: an optimizer of torch cannot step weights that are "
            "halves of their masters; write adam or adamw of preamp.optim, or master='float32'"
        )


def _check_replicated(asked: Asked) -> None:
    if asked.shard == "zero1" and asked.policy.masters and not asked.kind.fused:
        raise SessionError(
            f"optimizer={asked.optimizer!r} with masters and shard='zero1': ZeroRedundancyOptimizer shards what an "
            "optimizer keeps, one of torch's keeps no masters, and those of a session lie whole on every rank; write "
            "an optimizer of preamp.optim, which has them in its state, or level='O1' or 'O4'"
        )
    if asked.shadow and asked.shard == "ddp":
        raise PolicyError(
            "shadow=True with shard='ddp': the parallel wrapper exchanges gradients in the dtype of the parameters: "
            "leave it out there"
        )
    if asked.shadow and asked.shard == "zero1":
        raise PolicyError(
            "shadow=True with shard='zero1': only the optimizers of preamp.optim step float32 parameters by 16-bit "
            "gradients and write the copies, and ZeroRedundancyOptimizer is none of them: leave it out there"
        )


def _rehearse(asked: Asked) -> None:
    """Prepare one layer with these arguments, so that what `prepare` and the optimizer refuse is refused here too."""
    kind, options = asked.kind, dict(asked.kind.options)
    if kind.fused:
        options["master"] = asked.master
    if issubclass(kind.make, optim.Adam):
        options |= {"states": asked.states, "rounding": asked.rounding}
    make: Any = kind.make
    layer = nn.utils.skip_init(nn.Linear, 1, 1)  # draws no random numbers
    optimizer = make(layer.parameters(), lr=0.1, **options)
    if asked.sharded:
        return
    ops = asked.policy.ops if asked.shadow else None  # only shadows ask for regions
    if ops is not None and REGISTRY.rules is not None:
        ops = REGISTRY.rules  # a running session's, which excludes others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreampWarning)  # of epsilons, which are not what is planned
        prepare(layer, optimizer, policy=asked.policy.replace(ops=ops, modules=()), shadow=asked.shadow).close()
