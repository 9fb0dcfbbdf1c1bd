"""What of Apex preamp does not have, and what takes its place: one error, whichever way it is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_HERE = __name__.rpartition(".")[0]
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
    """Complains of what is asked for by import; everybody else's modules are left to the finders behind it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        _, ours, name = fullname.partition(f"{_HERE}.")
        if ours and name in _ALTERNATIVES:
            raise ModuleNotFoundError(_told(name), name=f"apex.{name}")


def complain_when_imported() -> None:
    """Have imports of what is not here say what takes its place."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a package of ours does not have."""
    place = f"{module}.{name}".removeprefix(f"{_HERE}.")
    told = f": {_told(place)}" if place in _ALTERNATIVES else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{told}", name=name)


def _told(name: str) -> str:
    return (
        f"apex.{name} is not part of preamp: {_ALTERNATIVES[name]}. Or install NVIDIA's Apex, to which preamp adds "
        "what was removed there"
    )
