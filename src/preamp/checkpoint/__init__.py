"""Checkpoints: everything a training run needs to go on bit for bit, in one file that cannot be half written.

A file is a zip archive made by `torch.save`, read with `weights_only=True`, so that loading never runs code from it. It
is sealed with a hash of all its bytes: a flipped bit is an error, and not a slightly different training run. Loading is
all or nothing. What preamp guarantees: `docs/reliability.md`.
"""

from ._load import load
from ._save import save, save_async
from ._sharded import load_sharded, save_sharded, save_sharded_async

__all__ = ["load", "load_sharded", "save", "save_async", "save_sharded", "save_sharded_async"]
