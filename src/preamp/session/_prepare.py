"""`prepare`: the one call that brings a model and its optimizer under a policy."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from ..autocast import widened
from ..eps import safe_eps
from ..errors import PolicyError, PreampWarning, SessionError, kind_of
from ..formats import LOW_DTYPES, name_of
from ..frameworks import unwrap, unwrapped
from ..ledger import KEPT, Masters, NoMasters, SplitMasters, parameters_of, rebuild_reducers
from ..modules import Conversion
from ..optim import FusedOptimizer
from ..policy import Policy, auto_level, parse_policy
from ..scaling import LOG, LossScale, loss_scale
from ..sharding import flat_group, reshard
from ._checks import named_parameters
from ._losses import Losses, named_values
from ._released import check_release
from ._session import Session
from ._step import OPEN, SKIPS

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None
_NOT_GIVEN: Any = object()


def prepare(
    model: Models,
    optimizer: Optimizers = _NOT_GIVEN,
    level: str | None = None,
    *,
    policy: Policy | str | Mapping[str, Any] | None = None,
    losses: Sequence[str] = ("loss",),
    scale: float | str | LossScale | Mapping[str, float | str | LossScale] | None = None,
    skip: str = "auto",
    group: Any = None,
    release_gradients: bool = False,
    **overrides: Any,
) -> Session:
    """Bring a model and its optimizer under a level or policy, in place, and return the session that trains them.

    The wrappers that Lightning and Accelerate return are accepted: the session uses the model and optimizer inside.
    Warns once when an epsilon would vanish (see `safe_eps`).

    Args:
        model: A float32 model on its device, or a list or mapping of several that share no trained modules.
        optimizer: Any of `torch.optim` but LBFGS, made from the model's parameters; one, several, or None.
        level: "O0" to "O5", an alias, or "auto" (the default): what suits the device; `repr(session)` shows it.
        policy: In place of a level: a `Policy`, its string or its fields.
        losses: Names of the losses, each with a scale of its own.
        scale: In place of the policy's scale, for all losses or by name.
        skip: How to skip with optimizers that cannot skip by themselves. "host" reads the flag, one host sync a step.
            "device" steps always, and puts parameters and states back where gradients were not finite, which costs a
            copy of them. "auto" is "device" for capturable optimizers on an accelerator, else "host".
        group: The process group whose ranks hold different parameters in plain tensors (pipeline stages). They agree on
            whether gradients are finite, and on their norm; gradients may come from the loss of another stage, which
            scales it. DTensors (FSDP2, tensor parallelism) need no group; under DistributedDataParallel gradients are
            the same anyway.
        release_gradients: Step each parameter as soon as its gradient is complete, and free that gradient. Only
            without a loss scale (O4, O5), without accumulation and clipping by the norm, and with `preamp.optim`. A
            gradient that is not finite skips its own parameter.
        **overrides: Single fields of the policy: `norms="fp16"`, `modules={"head": "full"}`.

    Raises:
        PolicyError: For a policy that makes no sense or does not fit the model; nothing has been changed.
        SessionError: For objects that cannot be prepared; nothing has been changed.

    >>> session = preamp.prepare(model, optimizer, level="O4")
    """
    if optimizer is _NOT_GIVEN:
        raise SessionError(
            "prepare() was given no optimizer: it steps the float32 masters, and a loss scale keeps it from steps that "
            "overflowed. Write prepare(model, optimizer), or prepare(model, None) for inference"
        )
    models = {name: unwrap(each) for name, each in named_values(model, "model").items()}
    given = {} if optimizer is None else named_values(optimizer, "optimizer")
    if given and torch.is_inference_mode_enabled():
        raise SessionError("prepare() in torch.inference_mode(): torch trains no tensor made there. Call it outside")
    optimizers = {name: unwrap(each) for name, each in given.items()}
    _check_kinds(models, optimizers)
    for each_optimizer in optimizers.values():
        if isinstance(each_optimizer, FusedOptimizer):
            each_optimizer.leave_lost()
    reshard(models.values())
    if skip not in SKIPS:
        raise SessionError(f"skip={skip!r}: write one of {', '.join(map(repr, SKIPS))}")
    device_type = _device_type(models)
    chosen, why = _choose_policy(level, policy, device_type, overrides)
    scales = Losses(_scales(chosen, losses, scale))
    _check_wrapping(models, chosen)
    if release_gradients:
        check_release(models.values(), optimizers, scales, group)
    _check_parameters(models, optimizers, not (scales.separate_scales or release_gradients))
    masters = masters_for(chosen, optimizers.values())
    _warn_of_float64(models, chosen)
    for each_optimizer in optimizers.values() if not chosen.masters else ():
        _warn_of_rounding(each_optimizer, chosen)
    for each_optimizer in optimizers.values():
        _warn_of_eps(each_optimizer, chosen)
    conversions: list[Conversion] = []
    stepped = {p for each in optimizers.values() for p in parameters_of(each)} if optimizers else None
    earlier = {p: p.grad for each in optimizers.values() for p in parameters_of(each) if p.grad is not None}
    around = widened if device_type == "cpu" and chosen.params in LOW_DTYPES else None
    try:
        for name, each in models.items():
            conversions.append(
                Conversion(each, chosen, masters, f"{name}:" if name else "", around, stepped, copies_of)
            )
        if chosen.params in LOW_DTYPES:
            lowered = {p for each in models.values() for p in each.parameters() if p.dtype in LOW_DTYPES}
            rebuild_reducers(lowered, models=models.values(), strict=True)
        group = flat_group(models.values()) if group is None else group
        session = Session(
            models, optimizers, chosen, scales, masters, conversions, device_type, skip, group, given, earlier, why,
            release_gradients,
        )  # fmt: skip
    except BaseException:
        for conversion in conversions:
            conversion.undo()
        masters.restore()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
        raise
    every = (module for each in models.values() for module in each.modules())
    _SESSIONS.update(dict.fromkeys(every, weakref.ref(session)))
    return session


def masters_for(policy: Policy, optimizers: Iterable[Optimizer]) -> Masters:
    """What keeps the masters that a policy and its optimizers want; `PolicyError` if these do not fit together."""
    optimizers = list(optimizers)
    if not policy.masters:
        return NoMasters()
    if any(getattr(optimizer, "rounding", "nearest") == "stochastic" for optimizer in optimizers):
        raise PolicyError(
            "an optimizer has rounding='stochastic', for weights without masters, and the policy has masters, which "
            "would take its place: write policy='O5,masters=no', or leave the rounding out"
        )
    wanted = {getattr(optimizer, "master", "float32") or "float32" for optimizer in optimizers}
    if wanted <= {"float32"}:
        return Masters()
    if len(wanted) > 1 or policy.params is not torch.bfloat16:
        raise PolicyError(
            f"an optimizer has master={max(wanted)!r}, which needs every optimizer of the session to have it, and "
            f"bfloat16 parameters (these are {name_of(policy.params)}): use level='O5', or master='float32'"
        )
    return SplitMasters(KEPT[wanted.pop()], next(getattr(optimizer, "seed", 0) for optimizer in optimizers))


def _choose_policy(
    level: str | None, given: Any, device_type: str, overrides: dict[str, Any]
) -> tuple[Policy, str | None]:
    """Choose the policy, and say why, where nobody has named one."""
    if level is not None and given is not None:
        raise PolicyError(f"prepare() got level={level!r} and policy={given!r}: give one of them")
    described = given if given is not None else (level if level is not None else "auto")
    if level is not None and not str(level).strip():
        raise PolicyError("level='': an empty level would be float32. Write 'O0' for that, or 'auto'")
    if isinstance(described, str) and described.strip().lower() == "auto":
        described, why = auto_level(device_type)
        chosen = parse_policy(described, **overrides)
        LOG.info("level auto is %s on %s: %s", described, device_type, why)
        if chosen.compute is torch.float32:
            warnings.warn(f"mixed precision stays off, {described}: {why}", PreampWarning, stacklevel=3)
        return chosen, why
    return parse_policy(described, **overrides), None


def _scales(policy: Policy, losses: Sequence[str], scale: Any) -> dict[str, LossScale]:
    names = [losses] if isinstance(losses, str) else list(losses)
    if isinstance(scale, Mapping):
        names = list(scale) if tuple(losses) == ("loss",) else names
        if set(scale) != set(names):
            raise PolicyError(f"scale names the losses {', '.join(scale)}, and losses are {', '.join(names)}")
    if not names or len(set(names)) != len(names):
        raise PolicyError(f"losses={losses!r}: give each loss one name of its own")
    wanted = {name: scale[name] if isinstance(scale, Mapping) else scale for name in names}
    made = {name: loss_scale(policy.scale if value is None else value) for name, value in wanted.items()}
    if len(set(map(id, made.values()))) < len(made):
        raise PolicyError("one LossScale object cannot serve several losses: write scale={'d': ..., 'g': ...}")
    return made


def _check_kinds(models: dict[str, Any], optimizers: dict[str, Any]) -> None:
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            order = ". The model comes first: prepare(model, optimizer)" if isinstance(model, Optimizer) else ""
            raise SessionError(f"prepare() takes nn.Modules; model {name or 'given'} is {kind_of(model)}{order}")
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            raise SessionError(
                f"prepare() takes torch.optim optimizers; optimizer {name or 'given'} is {kind_of(optimizer)}. "
                f"{_make_one(optimizer)}"
            )
        if isinstance(optimizer, LBFGS):
            raise SessionError(
                "LBFGS evaluates the loss several times a step, and each evaluation could overflow on its own, so "
                "its steps cannot be skipped as a whole: train with it in float32, without a session"
            )
        if optimizer in OPEN:
            raise SessionError(
                f"{_called(name, optimizer)} is in a session that is open: close() that one first. For several models "
                "or optimizers call prepare() once, with lists of them"
            )
    if len({id(o) for o in optimizers.values()}) < len(optimizers):
        raise SessionError("the same optimizer is given twice")


def _make_one(given: Any) -> str:
    """Say how to make an optimizer of what was given as one."""
    if isinstance(given, str):
        return f"A level is named: prepare(model, optimizer, level={given!r})"
    if isinstance(given, LRScheduler):
        return "Give it the scheduler's optimizer, which the scheduler goes on changing"
    made = given.__name__ if isinstance(given, type) and issubclass(given, Optimizer) else "torch.optim.AdamW"
    return f"Make one first: optimizer = {made}(model.parameters())"


def _check_parameters(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], may_share: bool) -> None:
    """Check that every optimizer steps something of the models, once.

    `may_share`: optimizers may have parameters in common, whose gradients have one loss scale and wait for a step.
    """
    known = {p: path for path, p in named_parameters(models)}
    owners: dict[nn.Parameter, str] = {}
    for name, optimizer in optimizers.items():
        called, own = _called(name, optimizer), Counter(parameters_of(optimizer))
        if not known and own:
            raise SessionError(
                f"the model ({', '.join(type(each).__name__ for each in models.values())}) has no parameters, and "
                f"{called} has {len(own)}: it would step tensors that the model does not use. Give prepare() the "
                "module that is trained, or prepare(model, None) if there is nothing to train"
            )
        if own and not any(p in known for p in own):
            raise SessionError(
                f"{called} has {len(own)} parameters and none of them is the model's: it would step tensors that the "
                "model does not use. A model that is made anew, copied, or moved by assignment after its optimizer was "
                "made has other parameters: make the optimizer from model.parameters() last, then prepare() both"
            )
        for parameter, times in own.items():
            path, owner = known.get(parameter, "given"), owners.setdefault(parameter, called)
            if times > 1:
                raise SessionError(
                    f"{called} has the parameter {path!r} twice, as lists of the parameters of two modules have one "
                    "that these share: each step would unscale and step it twice. Make the optimizer with each "
                    "parameter once: list(dict.fromkeys(parameters))"
                )
            if owner is not called and (not may_share or parameter.dtype in LOW_DTYPES):
                raise SessionError(
                    f"the parameter {path!r} is in {owner} and in {called}. A session takes that with float32 weights "
                    "and one loss scale, without release_gradients: give it to one of them, or make one optimizer "
                    "with two groups"
                )


def _called(name: str, optimizer: Optimizer) -> str:
    return f"the {type(optimizer).__name__}{f' {name!r}' if name else ''}"


def _check_wrapping(models: dict[str, nn.Module], policy: Policy) -> None:
    if policy.params not in LOW_DTYPES:
        return
    for name, model in models.items():
        if getattr(model, "mixed_precision", None) is not None and isinstance(model, DistributedDataParallel):
            raise SessionError(
                f"model {name or 'given'} is wrapped in DistributedDataParallel(mixed_precision=...), which casts the "
                "parameters by itself: leave that out, the policy says what is 16-bit"
            )
        if flat_group([model]) is not None:
            raise SessionError(
                f"model {name or 'given'} is wrapped in FullyShardedDataParallel, whose flat parameters cannot be "
                "made 16-bit ones: use fully_shard(model, mp_policy=policy.fsdp()), or level='O1' or 'O4'"
            )


def _device_type(models: dict[str, nn.Module]) -> str:
    types = {p.device.type for model in models.values() for p in unwrapped(model).parameters()}
    if "meta" in types:
        raise SessionError(
            "the model lies on the meta device: its parameters have shapes and no values that could be trained. Write "
            "model.to_empty(device=...), load or initialise its weights, make the optimizer, then prepare() both"
        )
    if len(types) > 1:
        raise SessionError(f"the model lies on devices of several kinds ({', '.join(sorted(types))}): move it to one")
    return types.pop() if types else "cpu"


def _warn_of_float64(models: Mapping[str, nn.Module], policy: Policy) -> None:
    dtypes = {p.dtype for each in models.values() for p in each.parameters() if p.is_floating_point()}
    if dtypes == {torch.float64} and policy.compute in LOW_DTYPES:
        warnings.warn(
            "every parameter of the model is float64, which a policy leaves as it is: nothing would run in "
            f"{name_of(policy.compute)}. Write model.float() before the optimizer is made, and give it float32 inputs; "
            "or level='O0'",
            PreampWarning,
            stacklevel=3,
        )


def _warn_of_rounding(optimizer: Optimizer, policy: Policy) -> None:
    stochastic = getattr(optimizer, "rounding", "nearest") == "stochastic" and policy.params is torch.bfloat16
    rounds_well = stochastic or optimizer.param_groups[0].get("kahan_sum", False)
    if policy.params in LOW_DTYPES and policy.norms is torch.float32 and not rounds_well:  # O3 is meant so
        warnings.warn(
            f"{type(optimizer).__name__} steps {name_of(policy.params)} weights without masters and rounds to the "
            "nearest: an update below 2^-9 of its weight (in fp16 2^-12) is lost each time, as most are. Leave out "
            "masters=no, or use bfloat16 weights and preamp.optim.AdamW(..., master=None, rounding='stochastic')",
            PreampWarning,
            stacklevel=3,
        )


def _warn_of_eps(optimizer: Optimizer, policy: Policy) -> None:
    bad = [row for row in safe_eps(optimizer, policy) if not row.fine]
    if bad:
        warnings.warn(
            f"{type(optimizer).__name__}: {'; '.join(map(str, bad))}, so denominators can be zero. Write "
            f"eps={bad[0].suggested:g}, or call preamp.safe_eps(optimizer, policy, apply=True)",
            PreampWarning,
            stacklevel=3,
        )


_SESSIONS: MutableMapping[nn.Module, weakref.ref[Session]] = WeakIdKeyDictionary()
"""The last session that each module was prepared for."""


def sessions_of(*models: nn.Module) -> list[Session]:
    """The open sessions that models, or parts of them, were prepared for."""
    found = dict.fromkeys(_SESSIONS[each]() for model in models for each in model.modules() if each in _SESSIONS)
    return [session for session in found if session is not None and not session._closed]


def copies_of(model: nn.Module) -> dict[Parameter, Tensor] | None:
    """The float32 values of a model's weights, in new memory; None if it has no masters."""
    known = next((each for each in sessions_of(model) if each.policy.masters), None)
    return None if known is None else known._masters.copies(model.parameters())
