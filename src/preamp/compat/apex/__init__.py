"""What NVIDIA's Apex was to those who trained with it: amp, fp16_utils, parallel, fused optimizers and norms.

Written from their described behaviour, on torch's and preamp's own kernels: nothing to compile, and it runs on CPUs
and on any accelerator of torch's. `import preamp.compat.apex as apex`, or `preamp.install_as_apex()` for code that
says `import apex`.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from ._notice import DeprecatedFeatureWarning, check_cudnn_version_and_warn, deprecated_warning

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
    "check_cudnn_version_and_warn",
    "deprecated_warning",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]

_PARTS = ("RNN", "amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")


def __getattr__(name: str) -> _ModuleType:
    if name in _PARTS:  # each when it is first asked for: `import apex` alone brought them all
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
