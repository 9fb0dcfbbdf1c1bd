"""What `preamp migrate` says: the changed text, notes beside it, and for each name of Apex the line of preamp's own."""

from __future__ import annotations

import difflib
import io
from dataclasses import dataclass

from ..errors import PreampError


class CannotParse(PreampError, ValueError):
    """A file that this Python does not read as Python."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was seen in line `line` of the original."""

    line: int
    text: str
    by_hand: bool = False
    """Whether the script does not run before somebody has done something about it."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A file before and after, with its notes in the order of lines."""

    filename: str
    before: str
    after: str
    notes: tuple[Note, ...] = ()
    uses_apex: bool = True

    def diff(self) -> str:
        """The unified diff that `patch -p1` takes; empty if nothing changed."""
        name = self.filename.lstrip("/")
        lines = difflib.unified_diff(lines_of(self.before), lines_of(self.after), f"a/{name}", f"b/{name}")
        return "".join(line if line[-1] in "\r\n" else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def line_after(self, line: int) -> int:
        """Where a line of the original stands in the new text."""
        before, after = lines_of(self.before), lines_of(self.after)
        for _, start, end, new, new_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if start <= line - 1 < end:
                return min(new + line - 1 - start, max(new_end - 1, new)) + 1
        return line


def lines_of(text: str) -> list[str]:
    """The lines as Python counts them, line ends included; str.splitlines also splits at form feeds."""
    return list(io.StringIO(text, newline=""))


COMPILED = (
    "amp_C", "apex_C", "fused_layer_norm_cuda", "mlp_cuda", "fused_dense_cuda", "xentropy_cuda", "fused_adam_cuda",
    "distributed_adam_cuda", "distributed_lamb_cuda", "scaled_masked_softmax_cuda", "fused_weight_gradient_mlp_cuda",
)  # fmt: skip
"""Modules that Apex's own build installs beside the package."""
_CONTRIB = ("clip_grad", "layer_norm", "optimizers", "xentropy")
"""What preamp has of apex.contrib."""


def lacking(name: str) -> str | None:
    """The module that preamp's Apex does not have, of `name` without "apex."; None if it has it."""
    first, *rest = name.split(".")
    if first in COMPILED:
        return None if first in ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda") else first
    module = ".".join([first, *rest[:1]]) if first == "contrib" else first
    nvidias = "." in module or module in ("RNN", "pyprof", "reparameterization", "transformer")
    ours = [f"contrib.{each}" for each in _CONTRIB]
    return f"apex.{module}" if nvidias and module not in ours else None


LINES = {
    "amp.initialize": "session = preamp.prepare({models}, {optimizers}, level={opt_level}{more})",
    "amp.scale_loss": "session.backward({loss}{more}), for the with and its body; loss from `with session.autocast():`",
    "amp.master_params": "session.clip_grad_norm_(max_norm); unscale_() to read p.grad; full_precision() to save",
    "amp.state_dict": "session.state_dict()",
    "amp.load_state_dict": "session.load_state_dict(state); of Apex's state, give the scale to prepare(..., scale=...)",
    "amp.disable_casts": "session.autocast(enabled=False)",
    "amp.half_function": "preamp.half_function",
    "amp.float_function": "preamp.float_function",
    "amp.promote_function": "preamp.promote_function",
    "amp.register_half_function": 'preamp.prepare(..., policy="O1; op NAME -> low")',
    "amp.register_float_function": 'preamp.prepare(..., policy="O1; op NAME -> full")',
    "amp.init": "session = preamp.prepare(model, optimizer, level=...)",
    "amp._amp_state": "session.loss_scale(), session.skipped; to set it, scale=preamp.DynamicScale(init_scale=...)",
    "optimizers.FusedAdam": "preamp.optim.AdamW, weight_decay=0.0 if none is given; Adam for adam_w_mode=False",
    "optimizers.FusedSGD": "preamp.optim.SGD",
    "optimizers.FusedLAMB": "preamp.optim.LAMB",
    "optimizers.FusedNovoGrad": "preamp.optim.NovoGrad",
    "optimizers.FusedAdagrad": "preamp.optim.Adagrad",
    **dict.fromkeys(
        ("optimizers.FP16_Optimizer", "contrib.optimizers", "fp16_utils"),
        'session = preamp.prepare(model, optimizer, level="O2"), which keeps float32 masters of the float32 model',
    ),
    "fp16_utils.to_python_float": "tensor.item()",
    "fp16_utils.clip_grad_norm": "session.clip_grad_norm_(max_norm)",
    "fp16_utils.model_grads_to_master_grads": "session.step(), which does this",
    "fp16_utils.master_params_to_model_params": "session.step(), which does this",
    "normalization": "torch.nn.LayerNorm",
    **dict.fromkeys(("normalization.FusedRMSNorm", "normalization.MixedFusedRMSNorm"), "torch.nn.RMSNorm(eps=1e-5)"),
    "contrib.layer_norm": "torch.nn.LayerNorm",
    "contrib.clip_grad": "session.clip_grad_norm_(max_norm)",
    "contrib.xentropy": 'torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")',
    "parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel(model, ...), if it trains",
    "parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "parallel.Reducer": "torch.distributed.all_reduce of p.grad, after session.unscale_()",
    "parallel.LARC": "preamp.optim.LAMB, which scales rates layer by layer too",
    "mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "fused_dense": "torch.nn.Linear",
    **dict.fromkeys(("multi_tensor_apply", "amp_C"), "torch._foreach_*, of gradients after session.unscale_()"),
    "apex_C": "torch._utils._flatten_dense_tensors(tensors), torch._utils._unflatten_dense_tensors(flat, tensors)",
}
"""Of preamp's own API, or torch's, by a name of Apex without "apex."; {loss} and others are arguments."""
OPTIONS = {
    "loss_scale": "scale={}", "keep_batchnorm_fp32": 'norms="fp32" (if {})', "loss_id": "name=str({})",
    "num_losses": "losses=[str(i) for i in range({})]",
}  # fmt: skip
"""What preamp has for more arguments of those calls; {} is the value that Apex gets."""


def row_of(name: str) -> str | None:
    """The row of `LINES` for a name without "apex.", whatever inner module it is taken from; None if there is none."""
    parts = name.split(".")
    package = parts[: 2 if parts[0] == "contrib" else 1]
    for length in range(len(parts), 0, -1):
        for row in (parts[:length], [*package, parts[length - 1]], package):
            if ".".join(row) in LINES:
                return ".".join(row)
    return None
