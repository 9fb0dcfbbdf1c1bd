"""Modules of Apex that are other modules here, and those that are not here: one error, however they are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from ..install import Alias

_HERE = __name__.rpartition(".")[0]
_SAME = {
    "contrib.clip_grad.clip_grad": "contrib.clip_grad",
    "contrib.layer_norm.layer_norm": "contrib.layer_norm",
    "contrib.optimizers.fp16_optimizer": "optimizers.fp16_optimizer",
    "contrib.optimizers.fused_lamb": "optimizers.fused_lamb",
    "contrib.optimizers.fused_sgd": "optimizers.fused_sgd",
    "contrib.xentropy.softmax_xentropy": "contrib.xentropy",
    "fused_dense.fused_dense": "fused_dense",
    "mlp.mlp": "mlp",
    "multi_tensor_apply.multi_tensor_apply": "multi_tensor_apply",
    "parallel.optimized_sync_batchnorm": "parallel.sync_batchnorm",
}
"""What scripts import, and the module that has it."""
_ATTENTION = (
    "torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention between linear layers, runs "
    "fused kernels"
)
_CONVOLUTIONS = "write the layers of torch.nn, model.to(memory_format=torch.channels_last), and torch.compile(model)"
_ALTERNATIVES = {
    "RNN": (
        "torch.nn.LSTM, GRU and RNN take its place: at O1 they run in 16 bits, at O2 and O3 they are cast with the "
        "model"
    ),
    "pyprof": "torch.profiler takes its place",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm takes its place",
    "transformer": "megatron.core (pip install megatron-core) took over its parallel layers, schedules and state",
    "contrib.bottleneck": _CONVOLUTIONS,
    "contrib.conv_bias_relu": _CONVOLUTIONS,
    "contrib.cudnn_gbn": "write torch.nn.SyncBatchNorm",
    "contrib.fmha": _ATTENTION,
    "contrib.focal_loss": "write torchvision.ops.sigmoid_focal_loss",
    "contrib.group_norm": "write torch.nn.GroupNorm",
    "contrib.groupbn": (
        "write torch.nn.BatchNorm2d, or apex.parallel.SyncBatchNorm over groups of ranks, and "
        "model.to(memory_format=torch.channels_last)"
    ),
    "contrib.index_mul_2d": "write first[index] * second",
    "contrib.multihead_attn": _ATTENTION,
    "contrib.sparsity": "write torch.sparse.to_sparse_semi_structured, or torch.ao.pruning.WeightNormSparsifier",
    "contrib.transducer": "write torchaudio.functional.rnnt_loss",
}


class _Finder(MetaPathFinder):
    """Finds the modules above and our packages, and complains of absent ones; all others are left to other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        _, ours, name = fullname.partition(f"{_HERE}.")
        if ours and name in _SAME:
            return ModuleSpec(fullname, Alias(import_module(f"{_HERE}.{_SAME[name]}")))
        if ours and name in _ALTERNATIVES:
            raise ModuleNotFoundError(_told(name), name=f"apex.{name}")
        spec = PathFinder.find_spec(fullname, path) if ours else None
        if spec and spec.submodule_search_locations and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Package(fullname, spec.loader.path)
        return spec


class _Package(SourceFileLoader):
    """Loads a package of ours, whose modules are imported when they are first asked for as its attributes."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = partial(module_of, module.__name__)
        super().exec_module(module)


def find_by_import() -> None:
    """Have imports find modules by their second names, and say of absent ones what takes their place."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def module_of(package: str, name: str) -> ModuleType:
    """The module of that name in a package of ours; AttributeError if there is none."""
    place = f"{package}.{name}".removeprefix(f"{_HERE}.")
    try:
        if not name.startswith("__"):
            return import_module(f"{package}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name not in (f"{package}.{name}", f"apex.{place}"):
            raise
    told = f": {_told(place)}" if place in _ALTERNATIVES else ""
    raise AttributeError(f"module {package!r} has no attribute {name!r}{told}", name=name)


def _told(name: str) -> str:
    return (
        f"apex.{name} is not part of preamp: {_ALTERNATIVES[name]}. Or install NVIDIA's Apex, to which preamp adds "
        "what was removed there"
    )
