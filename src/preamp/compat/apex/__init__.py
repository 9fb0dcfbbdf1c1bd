"""What NVIDIA's Apex was to those who trained with it: amp, fp16_utils, parallel, fused optimizers and norms.

Written from their described behaviour, on torch's and preamp's own kernels: nothing to compile, and it runs on CPUs
and on any accelerator of torch's. `import preamp.compat.apex as apex`, or `preamp.install_as_apex()` for code that
says `import apex`.
"""

from functools import partial as _partial

from ._modules import find_by_import as _find_by_import
from ._modules import module_of as _module_of
from ._notice import DeprecatedFeatureWarning, deprecated_warning

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
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
__getattr__ = _partial(_module_of, __name__)  # `import apex` alone brought them all
