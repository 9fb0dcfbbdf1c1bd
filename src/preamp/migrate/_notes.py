"""What a translation says: the changed text, and a note wherever a person has to look."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from ..errors import PreampError


class CannotParse(PreampError, ValueError):
    """A file that is not Python of this interpreter's grammar, or not text."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was seen in line `line` of the original, and what to write, or to know, about it."""

    line: int
    seen: str
    write: str
    by_hand: bool = True
    """Whether something is left to do; False: the translation is done, and differs in what the note says."""

    def text(self, filename: str, line: int | None = None) -> str:
        """One line, `file:line: seen: what to write`."""
        kind = "by hand" if self.by_hand else "note"
        return f"{filename}:{line or self.line}: {kind}: {self.seen}: {self.write}"


@dataclass(frozen=True, slots=True)
class Migration:
    """A file before and after, with its notes in the order of lines."""

    filename: str
    before: str
    after: str
    notes: tuple[Note, ...] = field(default=())
    uses_apex: bool = True

    @property
    def changed(self) -> bool:
        """Whether anything was translated."""
        return self.before != self.after

    @property
    def left(self) -> int:
        """How many notes ask for something to be done by hand."""
        return sum(note.by_hand for note in self.notes)

    def diff(self) -> str:
        """The unified diff that `patch -p1` takes; empty if nothing changed."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        name = self.filename.lstrip("/")
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def line_after(self, line: int) -> int:
        """Where a line of the original stands in the translated text."""
        matcher = difflib.SequenceMatcher(None, self.before.splitlines(), self.after.splitlines(), autojunk=False)
        for _, start, end, new_start, new_end in matcher.get_opcodes():
            if start <= line - 1 < end:
                return min(new_start + line - 1 - start, max(new_end - 1, new_start)) + 1
        return line


KEEP = "or keep the script as it is and start it with `preamp run`, or call preamp.install_as_apex() first"
_RUNS: dict[str, tuple[str, ...]] = {
    "": (), "amp": (), "parallel": (), "fp16_utils": (),
    "optimizers": (
        "FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad",
        "FusedSGD",
    ),
    "mlp": (), "fused_dense": (), "contrib.clip_grad": (), "contrib.layer_norm": (), "contrib.optimizers": (),
    "contrib.xentropy": (),
    "normalization": ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
    "multi_tensor_apply": ("MultiTensorApply", "multi_tensor_applier"),
    "amp_C": (
        "multi_tensor_adagrad", "multi_tensor_adam", "multi_tensor_axpby", "multi_tensor_l2norm",
        "multi_tensor_l2norm_scale", "multi_tensor_lamb", "multi_tensor_novograd", "multi_tensor_scale",
        "multi_tensor_sgd", "multi_tensor_unscale_l2norm",
    ),
    "apex_C": ("flatten", "unflatten"),
}  # fmt: skip
"""What of Apex `preamp run` has: modules, with their names where it has not all of them."""
_LISTS = "write torch._foreach_* functions on the lists of tensors, behind `session.unscale_()` if they are gradients"
_FP16_OPTIMIZER = (
    'write `session = preamp.prepare(model, optimizer, level="O2")` on the float32 model, session.backward(loss) '
    "for optimizer.backward(loss) and session.step()"
)

ADVICE = {
    "amp.initialize": (
        "write `session = preamp.prepare(model, optimizer, level=...)` where both are at hand, and hand on the session"
    ),
    "amp.scale_loss": "write `session.backward(loss)` with the session of preamp.prepare, which this place needs",
    "amp.master_params": (
        "call `session.unscale_()`, after which parameters hold their masters and true gradients, and go through "
        "`optimizer.param_groups`; to clip, write `session.clip_grad_norm_(max_norm)`"
    ),
    "amp.state_dict": "write `session.state_dict()` with the session of preamp.prepare, which this place needs",
    "amp.load_state_dict": "write `session.load_state_dict(state)` with the session of preamp.prepare",
    "amp.disable_casts": "write `with torch.autocast(x.device.type, enabled=False):`",
    "amp.init": "the handles of the first Apex have no counterpart: write preamp.prepare(model, optimizer)",
    "amp._amp_state": (
        "Apex's inner state has no counterpart: the scale is `session.loss_scale()`, skips are `session.skipped`, "
        "options are `session.policy`"
    ),
    "amp": "preamp has no such module: whether it is there need not be asked, since a session does the rest",
    "": "preamp takes the place of the whole package: remove this, or write `preamp`",
    "parallel.LARC": "preamp has none: divide the rates layer by layer with preamp.optim.LAMB",
    "parallel.Reducer": "write torch.distributed.all_reduce over the gradients after session.unscale_()",
    "parallel.create_syncbn_process_group": "write torch.distributed.new_group for the ranks of each group",
    "parallel.multiproc": "start the script with `torchrun --nproc-per-node=N script.py`",
    "multi_tensor_apply": _LISTS,
    "amp_C": _LISTS,
    "apex_C": "write torch._utils._flatten_dense_tensors and _unflatten_dense_tensors",
    "RNN": "write torch.nn.LSTM, GRU or RNN: preamp's regions run them in 16 bits",
    "fp16_utils.FP16_Optimizer": _FP16_OPTIMIZER,
    "optimizers.FP16_Optimizer": _FP16_OPTIMIZER,
    "contrib.optimizers": _FP16_OPTIMIZER,
    "fp16_utils.network_to_half": 'leave the model in float32: preamp.prepare(model, optimizer, level="O2") casts it',
    "fp16_utils": "preamp.prepare keeps 16-bit parameters and float32 masters itself: remove this",
    "contrib": "is no mixed precision: it stays NVIDIA's Apex, which has to be installed",
    "contrib.clip_grad": "write `session.clip_grad_norm_(max_norm)`",
    "contrib.layer_norm": "write torch.nn.LayerNorm",
    "contrib.xentropy": (
        'write torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing, '
        "ignore_index=padding_idx)"
    ),
    "transformer": "is no mixed precision: it stays NVIDIA's Apex, which has to be installed",
    "mlp": "write torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "fused_dense": "write torch.nn.Linear, with torch.nn.functional.gelu between two",
}
_KEPT = (
    "amp.init", "parallel.LARC", "parallel.Reducer", "fp16_utils", "multi_tensor_apply", "amp_C", "apex_C", "mlp",
    "fused_dense", "contrib.clip_grad", "contrib.layer_norm", "contrib.xentropy",
)  # fmt: skip
"""Where `preamp run` is what one would rather do."""


def runs(name: str) -> bool:
    """Whether `preamp run` has something of Apex, `name` without "apex."."""
    parts = name.split(".")
    length = 2 if parts[0] == "contrib" else 1
    module, rest = ".".join(parts[:length]), parts[length:]
    return module in _RUNS and (not rest or not _RUNS[module] or rest[0] in _RUNS[module])


def advice(name: str, keep: bool = True) -> str:
    """What to write for something of Apex, `name` without "apex."; `keep`: whether `preamp run` runs the file."""
    parts = name.split(".")
    text, known = "preamp's own API has nothing of this name: take it out", False
    for length in range(len(parts), 0, -1):
        candidate = ".".join(parts[:length])
        if candidate in ADVICE and (candidate == name or candidate != "amp"):
            text, known = ADVICE[candidate], True
            break
    wanted = not known or any(name == each or name.startswith(f"{each}.") for each in _KEPT)
    return f"{text}, {KEEP}" if wanted and keep and runs(name) else text
