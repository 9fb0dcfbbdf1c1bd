"""What NVIDIA's Apex was to those who trained with it: amp, fp16_utils, parallel, fused optimizers and norms.

Written from their described behaviour, on torch's and preamp's own kernels: nothing to compile, and it runs on CPUs
and on any accelerator of torch's. `import preamp.compat.apex as apex`, or `preamp.install_as_apex()` for code that
says `import apex`.
"""

from .._names import register_aliases as _register_aliases
from . import _amp_c as _amp_c
from . import _layers as _layers
from . import amp, contrib, fp16_utils, normalization, optimizers, parallel
from ._notice import DeprecatedFeatureWarning, deprecated_warning

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
    "contrib",
    "deprecated_warning",
    "fp16_utils",
    "normalization",
    "optimizers",
    "parallel",
]

_register_aliases()
