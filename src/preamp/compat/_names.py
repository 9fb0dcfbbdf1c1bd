"""Modules of Apex that are parts of other modules here, and errors for those that preamp does not have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS = "preamp.compat.apex"
_ALIASES = {
    "amp.opt": "amp.handle",
    "amp.scaler": "_scaler",
    "amp.rnn_compat": "amp.wrap",
    "amp.utils": "amp.wrap",
    "contrib.clip_grad": "_layers",
    "contrib.clip_grad.clip_grad": "_layers",
    "contrib.layer_norm": "_layers",
    "contrib.layer_norm.layer_norm": "_layers",
    "contrib.optimizers.fp16_optimizer": "optimizers.fp16_optimizer",
    "contrib.optimizers.fused_adam": "contrib.optimizers",
    "contrib.optimizers.fused_lamb": "optimizers",
    "contrib.optimizers.fused_sgd": "optimizers",
    "contrib.xentropy": "_layers",
    "contrib.xentropy.softmax_xentropy": "_layers",
    "fused_dense": "_layers",
    "fused_dense.fused_dense": "_layers",
    "mlp": "_layers",
    "mlp.mlp": "_layers",
    "multi_tensor_apply": "_amp_c",
    "multi_tensor_apply.multi_tensor_apply": "_amp_c",
    "optimizers.fused_adagrad": "optimizers",
    "optimizers.fused_lamb": "optimizers",
    "optimizers.fused_mixed_precision_lamb": "optimizers",
    "optimizers.fused_novograd": "optimizers",
    "optimizers.fused_sgd": "optimizers",
    "parallel.optimized_sync_batchnorm": "parallel.sync_batchnorm",
    "parallel.sync_batchnorm_kernel": "parallel.sync_batchnorm",
}
"""What scripts import, and the module of this package that has its names."""
_ATTENTION = (
    "torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention between linear layers, runs "
    "fused kernels"
)
_ALTERNATIVES = {
    "RNN": (
        "torch.nn.LSTM, GRU and RNN take its place: at O1 they run in 16 bits, at O2 and O3 they are cast with the "
        "model"
    ),
    "pyprof": "torch.profiler takes its place",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm takes its place",
    "transformer": "megatron.core (pip install megatron-core) took over its parallel layers, schedules and state",
    "contrib.fmha": _ATTENTION,
    "contrib.focal_loss": "write torchvision.ops.sigmoid_focal_loss",
    "contrib.group_norm": "write torch.nn.GroupNorm",
    "contrib.groupbn": (
        "write torch.nn.BatchNorm2d, or apex.parallel.SyncBatchNorm over groups of ranks, and "
        "model.to(memory_format=torch.channels_last)"
    ),
    "contrib.multihead_attn": _ATTENTION,
    "contrib.sparsity": "write torch.sparse.to_sparse_semi_structured, or torch.ao.pruning.WeightNormSparsifier",
    "contrib.transducer": "write torchaudio.functional.rnnt_loss",
}


def register_aliases() -> None:
    """Have Apex's module names find modules of this package, all of which are loaded."""
    for alias, name in _ALIASES.items():
        module, (parent, _, child) = sys.modules[f"{OURS}.{name}"], alias.rpartition(".")
        sys.modules[f"{OURS}.{alias}"] = module
        setattr(sys.modules[f"{OURS}.{parent}".rstrip(".")], child, module)
    if not any(isinstance(finder, AbsentModules) and finder.package == OURS for finder in sys.meta_path):
        sys.meta_path.insert(0, AbsentModules(OURS))


class AbsentModules(MetaPathFinder):
    """Raises ImportError for modules that a `package`, "apex" or ours, does not have; finds none.

    `real`: NVIDIA's Apex, if that is the package; of its parts only what was removed is missed.
    """

    def __init__(self, package: str, real: ModuleType | None = None) -> None:
        self.package, self.real = package, real

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        before, found, name = fullname.partition(f"{self.package}.")
        if before or not found:
            return None
        if self.real is not None:
            if name == "RNN":  # an ImportError, since `from apex import RNN` would swallow the other kind
                raise ImportError(_not_included(name), name=fullname)
        elif name in _ALTERNATIVES:
            raise ModuleNotFoundError(_not_included(name), name=f"apex.{name}")
        elif self.package == "apex" and PathFinder.find_spec(fullname, path) is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: preamp has apex.amp, fp16_utils, parallel, optimizers, normalization, "
                f"multi_tensor_apply, mlp, fused_dense and some of contrib, and not {name}. For the rest, install "
                "NVIDIA's Apex; preamp then adds to it what was removed there",
                name=fullname,
            )
        return None


def _not_included(name: str) -> str:
    return (
        f"apex.{name} is not part of preamp: {_ALTERNATIVES[name]}. Or install NVIDIA's Apex, to which preamp adds "
        "what was removed there"
    )
