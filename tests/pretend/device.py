"""A fake CUDA device for a torch built without CUDA: the C++ beside this file and the functions of `torch.cuda`."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .building import built, loaded

HERE = Path(__file__).parent
NAME = "pretend_cuda"
SOURCES = ("device.cpp", "kernels.cpp", "group.cpp", "module.cpp")
WRITTEN_FOR = "2.13"
"""The release of torch whose C++ this is written against: much of what it uses is no public API."""


def missing() -> str | None:
    """Why the device cannot exist here; None if it can."""
    if torch.version.cuda is not None or torch.cuda.is_available():
        return "torch is built with CUDA, or has a device already"
    if not torch.__version__.startswith(WRITTEN_FOR + "."):
        return f"written against the C++ of torch {WRITTEN_FOR}, and this is {torch.__version__}"
    return None if shutil.which("c++") else "no C++ compiler"


@functools.cache
def pretend(devices: int = 1, *flags: str) -> Any:
    """Install the device in `torch.cuda`, for the rest of this process. The first call takes a minute to build the C++.

    `flags`: further flags of the compiler.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(f"no fake CUDA device: {reason}")
    native = loaded(built(NAME, HERE, SOURCES, "pretend.h", flags=flags), NAME)
    native.set_devices(devices)
    _replace_torch_cuda(native)
    _make_storages(native)
    _record_interpreted_kernels(native)
    _copy_replicas()
    _register_backend(native)
    return native


def _replace_torch_cuda(native: Any) -> None:
    cuda: Any = torch.cuda

    class OnDevice:
        def __init__(self, device: Any) -> None:
            self.idx, self.before = _index(device, native), 0

        def __enter__(self) -> None:
            self.before = native.device()
            native.set_device(self.idx)

        def __exit__(self, *_: Any) -> None:
            native.set_device(self.before)

    class Stream:
        """Work is done when its call returns, so a stream is only a name."""

        def __init__(self, device: Any = None, **_: Any) -> None:
            self.device = torch.device("cuda", _index(device, native))
            self.cuda_stream = id(self)

        def wait_stream(self, stream: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            native.wait("Stream.synchronize")

        def query(self) -> bool:
            return True

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = 0.0

        def record(self, stream: Any = None) -> None:
            self.at = time.perf_counter()

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            native.wait("Event.synchronize")

        def elapsed_time(self, other: Any) -> float:
            return float(1e3 * (other.at - self.at))

    default = Stream()
    streams = [default]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]

    @contextlib.contextmanager
    def stream(given: Any) -> Iterator[None]:
        streams.append(given or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._graph = native.Graph()

        def capture_begin(self, *_: Any, **__: Any) -> None:
            self._graph.begin()

        def capture_end(self) -> None:
            self._graph.end()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._graph = native.Graph()

        def pool(self) -> tuple[int, int]:
            return (0, 0)

    @contextlib.contextmanager
    def graph(which: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        with cuda.stream(stream or Stream()):
            which.capture_begin()
            try:
                yield
            finally:
                which.capture_end()

    modes = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}
    properties = SimpleNamespace(
        name="pretended", major=9, minor=0, total_memory=8 << 30, multi_processor_count=2, warp_size=32
    )
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": native.devices,
        "current_device": native.device,
        "set_device": lambda index: native.set_device(_index(index, native)),
        "device": OnDevice,
        "synchronize": lambda device=None: native.wait("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: streams[-1],
        "default_stream": lambda device=None: default,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "is_current_stream_capturing": native.is_capturing,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "memory_allocated": lambda device=None: native.held(),
        "max_memory_allocated": lambda device=None: native.held_at_most(),
        "memory_reserved": lambda device=None: native.held(),
        "reset_peak_memory_stats": lambda device=None: native.forget_peak(),
        "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda share, device=None: None,
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": lambda mode: native.set_on_wait(modes[mode]),
        "get_sync_debug_mode": native.on_wait,
        "get_rng_state": lambda device="cuda": native.generator().get_state(),
        "set_rng_state": lambda state, device="cuda": native.generator().set_state(state),
        "get_rng_state_all": lambda: [native.generator().get_state() for _ in range(native.devices())],
        "set_rng_state_all": lambda states: native.generator().set_state(states[0]),
        "manual_seed": lambda seed: native.generator().manual_seed(seed),
        "manual_seed_all": lambda seed: native.generator().manual_seed(seed),
        "default_generators": [native.generator()] * native.devices(),
        "_exchange_device": lambda index: _exchange(index, native),
        "_maybe_exchange_device": lambda index: _exchange(index, native),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch._C._cuda_getDevice = native.device  # type: ignore[attr-defined]
    torch._C._cuda_isCurrentStreamCapturing = native.is_capturing  # type: ignore[attr-defined]


def _make_storages(native: Any) -> None:
    """Make and resize storages on the device, for which torch needs C++ that is compiled with CUDA only."""
    plain = torch.UntypedStorage.__new__

    def storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda" or not (args and isinstance(args[0], int)):
            return plain(cls, *args, **kwargs) if device is None else plain(cls, *args, device=device, **kwargs)
        return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()

    plain_resize = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        native.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.__new__ = storage  # type: ignore[assignment,method-assign]
    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]


def _copy_replicas() -> None:
    """Scatter, broadcast and gather for `nn.DataParallel`, whose C++ is compiled with CUDA only."""

    def scatter(tensor: Tensor, devices: list[int], sizes: Any, dim: int, streams: Any) -> list[Tensor]:
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return [part.to(torch.device("cuda", i)) for part, i in zip(parts, devices, strict=False)]

    def broadcast(tensors: list[Tensor], devices: list[int], size: int) -> list[list[Tensor]]:
        return [[tensor.to(torch.device("cuda", i)) for tensor in tensors] for i in devices]

    def gather(tensors: list[Tensor], dim: int, destination: int | None) -> Tensor:
        home = torch.device("cuda", destination) if destination is not None and destination >= 0 else tensors[0].device
        return torch.cat([tensor.to(home) for tensor in tensors], dim)

    torch.cuda.nccl.is_available = lambda tensors: False
    for name, function in (("_scatter", scatter), ("_broadcast_coalesced", broadcast), ("_gather", gather)):
        setattr(torch._C, name, function)


def _index(device: Any, native: Any) -> int:
    if device is None:
        return int(native.device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(native.device()) if index is None else int(index)


def _exchange(index: int, native: Any) -> int:
    before = int(native.device())
    if index >= 0:
        native.set_device(index)
    return before


def _record_interpreted_kernels(native: Any) -> None:
    """Triton's interpreter copies tensors to the host and back; that is no host sync, and a graph does it at replay."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            mode = native.on_wait()
            native.set_on_wait(0)
            try:
                launch(self, *args, **kwargs)
            finally:
                native.set_on_wait(mode)

        native.launch(run)

    interpreter.GridExecutor.__call__ = launched


def _register_backend(native: Any) -> None:
    """Register a backend "pretend" in NCCL's place, for `dist.init_process_group("pretend")`."""

    def made(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return native.group(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("pretend", made, devices=["cuda"])
