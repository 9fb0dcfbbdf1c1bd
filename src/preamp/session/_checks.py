"""The checks of a session's methods, and their errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PreampError, PreampWarning, SessionError, StateError, kind_of
from ..formats import LOW_DTYPES, name_of
from ..frameworks import unwrap, unwrapped
from ..ledger import Masters, parameters_of, wrappers_of
from ..optim import FusedOptimizer
from ..sharding import gathered_as, is_sharded, sharded_parts
from ._losses import Losses

_DTYPE = attrgetter("dtype")


def check_loss(loss: Any) -> None:
    """Check that a loss is one floating number."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise SessionError(f"backward() takes a loss, a floating tensor; got {type(loss).__name__}: {loss!r:.60}")
    if loss.numel() != 1:
        raise SessionError(f"backward() takes one number and got the shape {tuple(loss.shape)}: reduce it, .mean()")


def check_limit(call: str, limit: Any) -> Any:
    """What gradients are to be clipped to: a number that is not negative, or a 0-d tensor."""
    if isinstance(limit, Tensor) and limit.numel() == 1:
        return limit.reshape(())  # which may be on the device
    if isinstance(limit, bool) or not isinstance(limit, Real) or not float(limit) >= 0:
        raise SessionError(
            f"{call}({limit!r:.40}): the first argument is the limit, a number of at least 0; a negative one would "
            f"turn gradients around. The session knows its parameters: write session.{call}(1.0)"
        )
    return limit


def check_not_cast(parameters: Sequence[nn.Parameter], named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
    """Check that weights which a policy keeps in float32 were not cast since."""
    for dtype in set(map(_DTYPE, parameters)) & LOW_DTYPES:
        paths = names_of(parameters, named)
        path = next(path for path, p in zip(paths, parameters, strict=True) if p.dtype is dtype)
        raise SessionError(
            f"the parameter {path} was cast to {name_of(dtype)} after prepare(), and the policy steps float32 weights: "
            "small updates of 16-bit ones are rounded away. Leave out .half() and .to(...), as regions cast. A loss "
            "that casts weights of its own belongs after the region, with .float() inputs. Or take level='O2' or 'O5', "
            "which keep float32 masters"
        )


def not_unpacked(session: Any) -> NoReturn:
    """`model, optimizer = prepare(...)`: what Apex's and Accelerate's functions return is not what this one does."""
    if not session.steps:
        session.close()  # as it is unpacked nobody has it who could
    raise SessionError(
        "prepare() returns one session, and changes model and optimizer in place. Write "
        "session = preamp.prepare(model, optimizer), and go on with the same two"
    )


def check_no_sync(models: Iterable[nn.Module]) -> None:
    """Check that the forward pass before `backward(sync=False)` ran without synchronisation."""
    for model in models:
        ddp = isinstance(model, nn.parallel.DistributedDataParallel) and model.require_backward_grad_sync
        groups = [getattr(part._get_fsdp_state(), "_fsdp_param_group", None) for part in sharded_parts(model)]
        if ddp or any(group is not None and group.reduce_grads for group in groups):
            raise SessionError(
                f"backward(sync=False) on a {'DistributedDataParallel' if ddp else 'fully_shard-ed'} model whose "
                "forward pass ran with synchronisation on: run forward and backward of the micro-batch inside "
                "`with session.no_sync():`"
            )


def check_exchanged(models: Iterable[nn.Module]) -> None:
    """Refuse a backward pass inside `full_precision` whose gradients no DistributedDataParallel would exchange."""
    if wrappers_of([parameter for model in models for parameter in model.parameters()]):
        raise SessionError(
            "a backward pass inside full_precision() would let ranks part: DistributedDataParallel exchanges the "
            "gradients of 16-bit parameters, and float32 ones are in their places now. Call backward outside, or train "
            "at O1 or O4, whose parameters stay float32"
        )


def check_hooks(wrapper: Any) -> None:
    """Refuse PowerSGD over buckets of two dtypes, which wait for each other for ever, without preamp as well."""
    compresses = any(type(state).__name__ == "PowerSGDState" for _, state in wrapper._comm_hooks)
    dtypes = {p.dtype for p in wrapper.parameters() if p.requires_grad} if compresses else ()
    if len(dtypes) > 1:
        raise SessionError(
            "this DistributedDataParallel has torch's PowerSGD hook, and parameters of "
            f"{' and '.join(sorted(map(name_of, dtypes)))}, whose buckets would wait for each other for ever: use "
            "level='O1' or 'O4', or preamp.parallel.compress_hook in its place"
        )


def check_gathered_full(models: Iterable[nn.Module]) -> None:
    """Check that FSDP2 gathers weights in float32, as `full_precision()` needs them."""
    for model in models:
        low = next((dtype for dtype in gathered_as(model).values() if dtype in LOW_DTYPES), None)
        if low is not None:
            raise SessionError(
                f"full_precision(): FSDP2 gathers this model's weights in {name_of(low)} whatever is around it. "
                "Validate in the session's precision, or run a float32 model with the weights that torch gathers "
                "inside full_precision(values_only=True)"
            )


def check_sharded_late(models: Iterable[nn.Module]) -> None:
    """Refuse a model that was sharded after `prepare`: its optimizer and its session have other parameters."""
    if any(is_sharded(parameter) for model in models for parameter in model.parameters()):
        raise SessionError(
            "the model was sharded after prepare(): its parameters are other objects now, and neither the optimizer "
            "nor the session has them. In this order: fully_shard(model, mp_policy=policy.fsdp()), then the optimizer, "
            "then prepare()"
        )


def check_own_step(optimizer: Optimizer, masters: Masters | None, scaled: bool) -> None:
    """Refuse `optimizer.step()` by the caller if gradients are scaled, or will be in its closure, or masters exist.

    Optimizers of preamp.optim step 16-bit gradients and the session's masters by themselves.
    """
    kind = type(optimizer).__name__
    if scaled:
        raise SessionError(
            f"{kind}.step() was called by itself: gradients of session.backward(), also in a closure, are multiplied "
            "by the loss scale, and nobody has looked whether they are finite. Nothing has been stepped: run what a "
            "closure does before, and write session.step(), or session.step(optimizer), in its place"
        )
    if masters is None or not masters.wanted or isinstance(optimizer, FusedOptimizer):
        return
    if any(p in masters or p.dtype in LOW_DTYPES for p in parameters_of(optimizer)):
        raise SessionError(
            f"{kind}.step() was called by itself, and the session keeps float32 masters of its 16-bit parameters: the "
            "step would go to the 16-bit copies, be rounded away or be lost when the masters are put back. Nothing has "
            "been stepped: write session.backward(loss) and session.step(), or session.step(optimizer), in place of "
            "loss.backward() and optimizer.step()"
        )


def check_step_of_another(
    kind: str, stepping: list[nn.Parameter], masters: Masters, scaled: Collection[Tensor]
) -> None:
    """Refuse the step of an optimizer that the session does not have, of 16-bit copies or with scaled gradients."""
    if any(p in masters and p.dtype in LOW_DTYPES for p in stepping):
        why = "would step 16-bit copies of weights whose float32 masters the session's optimizer steps"
    elif any(p in scaled for p in stepping):
        why = "would take gradients as they are, and session.backward() multiplies them by the loss scale"
    else:
        return
    raise SessionError(
        f"step() of an optimizer ({kind}) that the session of this model does not have: it {why}. "
        "Nothing has been stepped: give prepare() all optimizers of the model, in a list, and write session.step(); or "
        "let this one train in float32, with loss.backward(), inside session.full_precision()"
    )


def selected(optimizers: Mapping[str, Optimizer], optimizer: Any) -> list[Optimizer]:
    """All optimizers for None, else the one named, which must be the session's."""
    if optimizer is None:
        if not optimizers:
            raise SessionError("this session was prepared without an optimizer, so there is nothing to step")
        return list(optimizers.values())
    optimizer = unwrap(optimizer)
    if all(optimizer is not each for each in optimizers.values()):
        raise SessionError(
            f"this {type(optimizer).__name__} is not one of the session's optimizers: give it to prepare()"
        )
    return [optimizer]


def names_of(parameters: Sequence[nn.Parameter], named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> list[str]:
    """Paths of parameters in the models, "(not in the model)" for those of an optimizer alone."""
    paths = {parameter: path for path, parameter in named()}
    return [paths.get(parameter, "(not in the model)") for parameter in parameters]


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of bare models with their paths, prefixed by the model's name if there are several."""
    for prefix, model in models.items():
        for path, parameter in unwrapped(model).named_parameters():
            yield f"{prefix}:{path}" if prefix else path, parameter


def warn_rounded(masters: Masters) -> None:
    """Warn, once, that masters were replaced by 16-bit values that were loaded."""
    warnings.warn(
        f"{masters.rounded} and others were loaded from a state that has them in 16 bits, and their float32 masters "
        "with them: what was below that precision is lost. To go back to an earlier point (a range test of learning "
        "rates, the best weights so far), keep session.state_dict() beside model.state_dict() and load both, or take "
        "and load the model's inside session.full_precision(values_only=True)",
        PreampWarning,
        stacklevel=4,
    )
    masters.rounded = None


# -- states

STATE_VERSION = 1

_FIELDS = {"version", "policy", "losses", "masters", "steps", "skipped"}


def check_state(state: Any, policy: str, losses: Losses) -> None:
    """`StateError` (or `ScaleError`) unless every part but the masters themselves fits; changes nothing.

    `Masters.load` checks them before it takes one.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a session's state is a dict, what state_dict() gave; this is {kind_of(state)}")
    _check_origin(state, policy)
    for name in ("steps", "skipped"):
        _check_count(state[name], name)
    for part, kind, what in (("masters", object, "tensors"), ("losses", Mapping, "dicts")):
        own = state[part]
        if not isinstance(own, Mapping) or not all(isinstance(n, str) and isinstance(own[n], kind) for n in own):
            raise StateError(f"the state's {part} are to be a dict of {what} by name; they are {own!r:.80}")
    losses.check(state["losses"])
    for name in losses:
        fields = dict(state["losses"][name])
        _check_count(fields.pop("skipped_in_a_row", None), f"skipped_in_a_row of the loss {name!r}")
        try:
            copy.deepcopy(losses[name]).load_state_dict(fields)
        except PreampError:
            raise
        except Exception as error:
            raise StateError(
                f"the scale of the loss {name!r} cannot be what the state says ({type(error).__name__}: {error})"
            ) from error


def _check_count(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"the state has {name}={value!r:.60}: it counts steps")


def _check_origin(state: Mapping[str, Any], policy: str) -> None:
    """Check that a state is a session's, of this version, and made under the same policy."""
    if set(state) != _FIELDS:
        seen = ", ".join(map(str, state)) or "nothing"
        of_scaler = {"loss_scaler0", "growth_factor", "loss_scaler"} & set(state)
        raise StateError(
            "this is the state of a scaler of torch.amp or Apex, and no session's: load the model and the optimizer as "
            "they are, and prepare with its scale, scale=preamp.DynamicScale(init_scale=...); O4 and O5 have none"
            if of_scaler
            else f"not a session's state ({', '.join(sorted(_FIELDS))}) but {seen:.80}"
        )
    if not isinstance(state["version"], int) or state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']!r}; this preamp reads version {STATE_VERSION}")
    if not isinstance(state["policy"], str) or state["policy"] != policy:
        raise StateError(
            f"the state was made under the policy {state['policy']!r}, and this session has {policy!r}; "
            "prepare with that policy (prepare(..., policy=...)), or load only model and optimizer, without session="
        )
