"""What NVIDIA's Apex was to those who trained with it: amp, fp16_utils, parallel, fused optimizers and norms.

Written from their described behaviour, on torch's and preamp's own kernels: nothing to compile, and it runs on CPUs
and on any accelerator of torch's. `import preamp.compat.apex as apex`, or `preamp.install_as_apex()` for code that
says `import apex`.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from ._modules import find_by_import as _find_by_import
from ._modules import no_attribute as _no_attribute
from ._notice import DeprecatedFeatureWarning, check_cudnn_version_and_warn, deprecated_warning

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
    "check_cudnn_version_and_warn",
    "contrib",
    "deprecated_warning",
    "fp16_utils",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]

_find_by_import()


def __getattr__(name: str) -> _ModuleType:
    if name in __all__:  # each when it is first asked for: `import apex` alone brought them all
        return _import_module(f".{name}", __name__)
    raise _no_attribute(__name__, name)
