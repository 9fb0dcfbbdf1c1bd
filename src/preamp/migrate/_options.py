"""The arguments of `amp.initialize` as arguments of `preamp.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import libcst as cst

from ._calls import literal, named_arguments

POSITIONS = (
    "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32",
    "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale",
)  # fmt: skip

_DTYPES = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.float": "fp32",
}  # fmt: skip


@dataclass
class Options:
    """What `prepare` gets besides models and optimizers, as (keyword, text) pairs; keyword "**" for a mapping."""

    models: cst.BaseExpression
    optimizers: cst.BaseExpression | None
    level: str
    extra: list[tuple[str, str]] = field(default_factory=list)
    losses: str | None = None
    """The text of num_losses where it may be more than one."""
    remarks: list[tuple[str, str, bool]] = field(default_factory=list)
    """(seen, write, by hand) for what has no exact counterpart."""


def read(call: cst.Call, code: Callable[[cst.CSTNode], str]) -> Options | None:
    """The options of a call of `amp.initialize`; None if they cannot be told (`*args`, `**kwargs`)."""
    given = named_arguments(call, POSITIONS)
    if given is None or "models" not in given:
        return None
    texts = {name: code(value) for name, value in given.items()}
    level = texts.get("opt_level", '"O1"')
    named_level = literal(given.get("opt_level"), "O1")
    optimizers = given.get("optimizers")
    if optimizers is not None and code(optimizers) == "None":
        optimizers = None
    options = Options(given["models"], optimizers, level)
    if texts.get("patch_torch_functions_type") in ("torch.bfloat16",) and named_level == "O1":
        options.level = '"O4"'
    enabled = texts.get("enabled", "True")
    if enabled == "False":
        options.level = '"O0"'
    elif enabled != "True":
        options.level = f'{options.level} if {enabled} else "O0"'
    count = texts.get("num_losses", "1")
    options.losses = None if count == "1" else count
    _scale(options, given, texts, named_level, enabled if enabled not in ("True", "False") else None)
    _overrides(options, given, texts, named_level)
    _left_out(options, texts, named_level)
    return options


def _scale(
    options: Options,
    given: Mapping[str, cst.BaseExpression],
    texts: Mapping[str, str],
    level: object,
    enabled: str | None,
) -> None:
    scale = texts.get("loss_scale")
    value = literal(given.get("loss_scale"), scale)
    text = None if scale in (None, "None") else scale
    if isinstance(value, str) and value != "dynamic" and text is not None and text != value:
        text = str(float(value)) if value.replace(".", "", 1).isdigit() else text
    bounds = [(name, texts[name]) for name in ("min_loss_scale", "max_loss_scale") if texts.get(name, "None") != "None"]
    if bounds and options.losses is None and (value == "dynamic" or (text is None and level in ("O1", "O2"))):
        inner = ", ".join(f"{name.partition('_')[0]}_scale={bound}" for name, bound in bounds)
        text = f"preamp.DynamicScale({inner})"
    elif bounds:
        options.remarks.append((
            ", ".join(f"{name}={bound}" for name, bound in bounds),
            "left out; write scale=preamp.DynamicScale(min_scale=..., max_scale=...) if the scale is dynamic",
            True,
        ))  # fmt: skip
    elif text is not None and literal(given["loss_scale"], None) is None:
        node = given["loss_scale"]
        if isinstance(node, (cst.Name, cst.Attribute)):  # a command line gives numbers as text, which Apex takes too
            text = f'{text} if {text} in (None, "dynamic") else float({text})'
            text = text if enabled is None else f"({text})"
    if text is not None:
        options.extra.append(("scale", text if enabled is None else f"{text} if {enabled} else None"))


def _unless_none(text: str, keyword: str, value: str) -> tuple[str, str]:
    """A keyword for an argument that may turn out to be None, which `prepare` does not take."""
    return "**", f'({{}} if {text} is None else {{"{keyword}": {value}}})'


def _overrides(
    options: Options, given: Mapping[str, cst.BaseExpression], texts: Mapping[str, str], level: object
) -> None:
    """Single fields of the level: norms, masters, output."""
    extra, low = options.extra, "bf16" if level == "O5" else "fp16"
    norms, masters, output = (
        texts.get(name, "None") for name in ("keep_batchnorm_fp32", "master_weights", "cast_model_outputs")
    )
    value = str(literal(given.get("keep_batchnorm_fp32"), ""))
    if norms != "None" and value in ("True", "False"):
        extra.append(("norms", '"fp32"' if value == "True" else f'"{low}"'))
    elif norms != "None":
        extra.append(_unless_none(norms, "norms", f'"fp32" if str({norms}) == "True" else "{low}"'))
    own = literal(given.get("master_weights"), None)
    if masters != "None" and not isinstance(own, bool):
        extra.append(_unless_none(masters, "masters", masters))
    elif isinstance(own, bool) and not (own and level in ("O2", "O5")):
        extra.append(("masters", masters))
    if output in _DTYPES:
        extra.append(("output", f'"{_DTYPES[output]}"'))
    elif output != "None":
        extra.append(_unless_none(output, "output", output))


def _left_out(options: Options, texts: Mapping[str, str], level: object) -> None:
    """Remarks on what a session has no argument for."""
    cast = texts.get("cast_model_type", "None")
    usual = {"O0": "fp32", "O2": "fp16", "O3": "fp16", "O5": "bf16"}
    if cast != "None" and _DTYPES.get(cast) != usual.get(str(level), "fp32"):
        why = "a session's parameters are 16-bit at O2, O3 (fp16) and O5 (bf16), float32 at the others"
        options.remarks.append((f"cast_model_type={cast}", f"left out; {why}", True))
    patch = texts.get("patch_torch_functions", "None")
    if patch not in ("None", "True" if level in ("O1", "O4") else "False"):
        write = "left out; write ops=None to prepare() for no operator rules"
        options.remarks.append((f"patch_torch_functions={patch}", write, True))
