"""What Apex compiled as `apex_C`: many tensors as one, and back."""

from .parallel.distributed import flatten, unflatten

__all__ = ["flatten", "unflatten"]
