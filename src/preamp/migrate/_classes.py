"""Apex's optimizers, layers and wrappers as those of preamp and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from ._calls import argument, bound, literal, named_arguments, recall, renamed


@dataclass(frozen=True)
class Replacement:
    """A class or function and what takes its place."""

    target: str
    positions: tuple[str, ...]
    drop: frozenset[str] = frozenset()
    """Parameters that say nothing in the new place."""
    only: dict[str, object] = field(default_factory=dict)
    """Parameters that have no counterpart, with the value at which they say nothing."""
    add: dict[str, str] = field(default_factory=dict)
    """Arguments to write where none were given, since the defaults differ."""
    positional: int = 1
    """How many arguments may stay without keyword."""
    bare: bool = False
    """Whether the name alone, without a call, may be replaced."""
    remark: str = ""


_ADAM = ("params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none",
         "capturable", "master_weights")  # fmt: skip
_DDP = (
    "module", "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params",
    "retain_allreduce_buffers", "allreduce_always_fp32", "num_allreduce_streams", "allreduce_communicators",
    "gradient_average", "gradient_predivide_factor", "gradient_average_split_factor", "prof",
)  # fmt: skip
_LAYER_NORM = Replacement(
    "torch.nn.LayerNorm", ("normalized_shape", "eps", "elementwise_affine"), frozenset({"memory_efficient"}),
    positional=3, bare=True,
)  # fmt: skip
_RMS_NORM = Replacement(
    "torch.nn.RMSNorm", ("normalized_shape", "eps", "elementwise_affine"), frozenset({"memory_efficient"}),
    add={"eps": "1e-5"}, positional=3,
)  # fmt: skip

REPLACEMENTS = {
    "optimizers.FusedAdam": Replacement(
        "preamp.optim.AdamW", _ADAM, frozenset({"set_grad_none", "master_weights", "adam_w_mode"}),
        {"bias_correction": True}, {"weight_decay": "0.0"},
    ),
    "optimizers.FusedSGD": Replacement(
        "preamp.optim.SGD",
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum",
         "materialize_master_grads", "set_grad_none"),
        frozenset({"materialize_master_grads", "set_grad_none"}), {"wd_after_momentum": False}, positional=6,
    ),
    "optimizers.FusedLAMB": Replacement(
        "preamp.optim.LAMB",
        ("params", "lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode",
         "grad_averaging", "set_grad_none", "max_grad_norm", "use_nvlamb"),
        frozenset({"set_grad_none"}), {"amsgrad": False},
    ),
    "optimizers.FusedNovoGrad": Replacement(
        "preamp.optim.NovoGrad",
        ("params", "lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "reg_inside_moment",
         "grad_averaging", "norm_type", "init_zero", "set_grad_none"),
        frozenset({"set_grad_none"}), {"amsgrad": False},
    ),
    "optimizers.FusedAdagrad": Replacement(
        "preamp.optim.Adagrad", ("params", "lr", "eps", "weight_decay", "set_grad_none", "adagrad_w_mode"),
        frozenset({"set_grad_none"}), {"adagrad_w_mode": False},
    ),
    "normalization.FusedLayerNorm": _LAYER_NORM,
    "normalization.MixedFusedLayerNorm": _LAYER_NORM,
    "normalization.FusedRMSNorm": _RMS_NORM,
    "normalization.MixedFusedRMSNorm": _RMS_NORM,
    "parallel.DistributedDataParallel": Replacement(
        "torch.nn.parallel.DistributedDataParallel", _DDP,
        frozenset(_DDP) - {"module", "allreduce_always_fp32", "gradient_average", "gradient_predivide_factor"},
        {"allreduce_always_fp32": False, "gradient_average": True, "gradient_predivide_factor": 1.0}, bare=True,
        remark="torch's wrapper broadcasts buffers too and finds its buckets itself; add device_ids=[...] if a "
        "process sees several GPUs, and find_unused_parameters=True if a pass leaves parameters out",
    ),
    "parallel.SyncBatchNorm": Replacement(
        "torch.nn.SyncBatchNorm",
        ("num_features", "eps", "momentum", "affine", "track_running_stats", "process_group", "channel_last",
         "fuse_relu"),
        frozenset({"channel_last"}), {"fuse_relu": False}, positional=6, bare=True,
    ),
    "parallel.convert_syncbn_model": Replacement(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm", ("module", "process_group", "channel_last"),
        frozenset({"channel_last"}), positional=2, bare=True,
    ),
    "amp.half_function": Replacement("preamp.half_function", ("fn",), bare=True),
    "amp.bfloat16_function": Replacement("preamp.half_function", ("fn",), bare=True),
    "amp.float_function": Replacement("preamp.float_function", ("fn",), bare=True),
    "amp.promote_function": Replacement("preamp.promote_function", ("fn",), bare=True),
}  # fmt: skip


def refusal(call: cst.Call, row: Replacement, code: Callable[[cst.CSTNode], str]) -> str | None:
    """Why a call cannot be translated; None if it can."""
    given = named_arguments(call, row.positions)
    if given is None:
        return "its arguments hide behind a star"
    for name in given:
        if name not in row.positions and name not in row.drop:
            return f"{name}={code(given[name])} is no argument of {row.target}"
    for name, harmless in row.only.items():
        if name in given and literal(given[name], harmless) != harmless:
            return f"{name}={code(given[name])} has no counterpart in {row.target}"
    return None


def translated(original: cst.Call, updated: cst.Call, row: Replacement, code: Callable[[cst.CSTNode], str]) -> cst.Call:
    """The call of what takes the place, arguments mapped."""
    drop = {**dict.fromkeys(row.drop), **row.only}
    args: list[cst.Arg] = []
    named = False
    kept = [(name, arg) for name, arg in bound(updated, row.positions) if name not in drop]
    for index, (name, arg) in enumerate(kept):
        named = (
            named or index >= row.positional or row.positions.index(name) != index if name in row.positions else True
        )
        args.append(renamed(arg, name) if named and arg.keyword is None else arg)
    given = named_arguments(original, row.positions) or {}
    args += [argument(text, name) for name, text in row.add.items() if name not in given]
    target = row.target
    if "adam_w_mode" in row.drop and "adam_w_mode" in given:
        mode = literal(given["adam_w_mode"], None)
        plain = "preamp.optim.Adam"
        if mode is None:
            target = f"({target} if {code(given['adam_w_mode'])} else {plain})"
        else:
            target = target if mode else plain
    return recall(updated, target, args)
