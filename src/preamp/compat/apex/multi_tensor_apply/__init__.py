"""`multi_tensor_applier`, by which Apex's optimizers and their users call operators over lists of tensors."""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
