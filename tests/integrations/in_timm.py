"""Runs a script where torchvision was built for CUDA and torch was not: `python in_timm.py script arguments...`."""

import runpy
import sys

import torch

if not torch.backends.cuda.is_built():  # or torchvision loads its own operators
    names = "nms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward "
    names += "ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward qnms"
    missing = torch.library.Library("torchvision", "DEF")  # for torchvision to be imported; never called
    for name in names.split():
        missing.define(f"{name}(Tensor input) -> Tensor")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
