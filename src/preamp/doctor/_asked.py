"""What precision a script asks for, and where: PA109, PA110 and PA112."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..autocast import autocast
from ..formats import LOW_DTYPES, name_of
from ..report import Finding
from ..session import Session
from ._live import Live
from ._names import WRAPPERS, unwrapped
from ._patches import Patches
from ._stack import Line, users_line

if TYPE_CHECKING:
    from ._watch import Watch


class Asked:
    """Follows autocast regions, casts by hand, and compilation."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._patches: Patches | None = None
        self.compiled: str | None = None
        """"module" or "function" once torch.compile was called on one."""
        self._regions: list[tuple[str, torch.dtype, bool, Line]] = []
        self._foreign: dict[torch.dtype, Line] = {}
        """Dtypes of regions that are not preamp's, and where the first of each was made."""
        self._depth = 0
        self._versions: dict[int, int] = {}

    def start(self, patches: Patches) -> None:
        """Have autocast, casts and the compiler tell."""
        self._patches = patches
        patches.wrap(torch.autocast, "__init__", self._made)
        patches.wrap(torch.autocast, "__enter__", self._enter)
        patches.wrap(torch.autocast, "__exit__", self._exit)
        for name in ("half", "bfloat16", "to"):
            patches.wrap(nn.Module, name, self._cast)
        patches.wrap(torch, "compile", self._compile)
        patches.wrap(nn.Module, "compile", self._compile)

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        # After, as Module.compile() comes down to compiling a function.
        self.compiled = "module" if args and isinstance(args[0], nn.Module) else "function"
        if original.__name__ == "compile" and out is None and args and isinstance(args[0], nn.Module):
            self._follow_compiled(args[0])
        return out

    def _follow_compiled(self, module: nn.Module) -> None:
        """After `module.compile()`: a call of it goes past torch's hooks, so it tells by itself."""
        compiled = module._compiled_call_impl
        watch = self._watch

        held = weakref.ref(module)  # it is the script's to let go of

        def called(*args: Any, **kwargs: Any) -> Any:
            return watch.calls.compiled(module, compiled, args, kwargs)

        called.of = compiled  # type: ignore[attr-defined]
        module._compiled_call_impl = called

        def undo() -> None:
            there: Any = held()
            if there is not None and hasattr(there._compiled_call_impl, "of"):
                there._compiled_call_impl = there._compiled_call_impl.of

        if self._patches is not None:
            self._patches.on_close(undo)

    def _made(self, original: Any, region: Any, device_type: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        if "device_type" in kwargs:
            device_type = kwargs.pop("device_type")
        original(region, device_type, *args, **kwargs)
        asked = bool(kwargs.get("enabled", args[1] if len(args) > 1 else True))
        got = bool(getattr(region, "_enabled", asked))
        place = users_line()
        dtype = getattr(region, "fast_dtype", None)
        if asked and not got and place[0] is not None:
            self._watch.tell(_no_effect(str(device_type), dtype, place))
        if got and dtype is not None and not isinstance(region, autocast):
            self._foreign.setdefault(dtype, place)
        self._regions = [*self._regions[-20:], (str(device_type), dtype, got, place)]  # type: ignore[list-item]

    def _enter(self, original: Any, region: Any) -> Any:
        if self._depth == 0:
            self._versions = {}
        self._depth += 1
        return original(region)

    def _exit(self, original: Any, region: Any, *error: Any) -> Any:
        self._depth -= 1
        return original(region, *error)

    @property
    def keeps_casts(self) -> bool:
        """Whether a cast of a weight that is made now is used again until the region ends."""
        return self._depth > 0 and torch.is_autocast_cache_enabled()

    def model_called(self, versions: dict[int, int]) -> None:
        """A model is about to run; `versions`: how often each weight was changed in place so far, by its id."""
        if self._depth <= 0 or not torch.is_autocast_cache_enabled():
            return
        if not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            return
        changes = sum(version - self._versions.get(key, version) for key, version in versions.items())
        if changes:
            file, line = self._watch.stepped_at
            self._watch.tell(
                Finding(
                    "PA110", "error",
                    "weights were changed inside an autocast region that goes on: the model computes with the cast "
                    "weights of before, which autocast keeps until the region ends",
                    direction="forward", file=file, line=line, evidence={"changes": changes},
                    fix="with torch.autocast(...):  # one region a step, around forward and loss only\n"
                    "    loss = criterion(model(x), y)\nloss.backward()\noptimizer.step()",
                )
            )  # fmt: skip
        self._versions = versions

    def _cast(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        low = name != "to" or any(value in LOW_DTYPES for value in (*args, *kwargs.values()) if _is_dtype(value))
        place = users_line()
        if low and self._depth > 0 and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            self._watch.tell(
                Finding(
                    "PA110", "warning",
                    f"{type(module).__name__}.{name}() inside an autocast region: from here on its parameters are "
                    "16-bit, where autocast would have cast copies of float32 ones",
                    module=self._watch.names.get(unwrapped(module)), op=name, file=place[0], line=place[1],
                    fix=f"# remove .{name}(...): autocast casts by itself",
                )
            )  # fmt: skip
        elif low and _wrapped(module):
            self._watch.tell(
                Finding(
                    "PA112", "warning",
                    f"{name}() after {type(module).__name__}: the wrapper made its buckets and hooks for the dtype "
                    "that the parameters had before",
                    module=self._watch.names.get(unwrapped(module)), op=name, file=place[0], line=place[1],
                    fix="model = model.bfloat16()  # first\nmodel = DistributedDataParallel(model)  # then",
                )
            )  # fmt: skip
        return original(module, *args, **kwargs)

    def not_in_thread(self, module: str) -> Finding:
        """PA109: a part of the model runs in a thread, and regions are a thread's own."""
        on = [(dtype, place) for _, dtype, got, place in self._regions if got]
        dtype, (file, line) = on[-1] if on else (None, (None, None))
        return Finding(
            "PA109", "warning",
            f"{module or 'the model'} runs in another thread than the autocast region that was entered for it: "
            "autocast holds for its own thread only, so it ran in full precision",
            module=module, direction="forward", file=file, line=line,
            evidence={"asked for": None if dtype is None else name_of(dtype)},
            fix="with torch.autocast(...):  # inside the function that the threads run\n    return module(x)",
        )  # fmt: skip

    def findings(self, live: Live) -> Iterator[Finding]:
        """PA109 and PA110, once a step was seen."""
        if live.writes and live.autocast_on:
            place = live.writes[0][0]
            owner = self._watch.names.common(weight for _, weight in live.writes)
            yield Finding(
                "PA110", "error",
                "a weight is changed in place while the model runs inside an autocast region: a cast of it that "
                "was made before is used on",
                module=owner, direction="forward", file=place.file, line=place.line,
                fix="# change weights outside of the region, or compute a new tensor: w = weight.clamp(-1, 1)",
            )  # fmt: skip
        for session in self._watch.scaling.sessions:
            yield from self._overruled(session, live)
        products = live.products
        if not products.total or live.low:
            return
        yield from _in_vain(self._regions, products)

    def _overruled(self, session: Session, live: Live) -> Iterator[Finding]:
        """PA109: a region that is not the session's has its models compute in another dtype."""
        own = {part for model in session.models.values() for part in unwrapped(model).modules()}
        paths = {path for path, part in self._watch.names.items() if part in own}
        flops: dict[torch.dtype, float] = {}
        for product in live.products.products.values():
            if product.module in paths:
                flops[product.dtype] = flops.get(product.dtype, 0.0) + product.flops
        wanted, masters = session.policy.compute, session.policy.masters
        for dtype in sorted((flops.keys() & self._foreign.keys() & set(LOW_DTYPES)) - {wanted}, key=str):
            seen, (file, line) = name_of(dtype), self._foreign[dtype]
            share = flops[dtype] / sum(flops.values())
            level = {torch.float16: "O2" if masters else "O1"}.get(dtype, "O5" if masters else "O4")
            yield Finding(
                "PA109", "warning",
                f"the session was prepared to compute in {name_of(wanted)}, and {share:.0%} of its products ran in "
                f"{seen}: an autocast region of {seen} that is not the session's lies around "
                "the model's call, and the innermost region decides",
                module=min(paths, key=len), direction="forward", file=file, line=line,
                evidence={"prepared for": name_of(wanted), "observed": seen},
                fix="# switch the framework's own mixed precision off: Accelerator(mixed_precision='no'), bf16=False, "
                f"precision='32-true'\n# or: session = preamp.prepare(model, optimizer, level={level!r})  # {seen}",
            )  # fmt: skip


def _in_vain(regions: list[Any], products: Any) -> Iterator[Finding]:
    """Precision asked for, by a framework or for another device, and products that all ran in float32."""
    seen = sorted({name_of(p.dtype) for p in products.products.values()})
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "AcceleratorState", None), "_shared_state", {}) if state else {}
    wanted = str(shared.get("_mixed_precision", "no"))
    if wanted in ("fp16", "bf16"):
        yield Finding(
            "PA109", "warning",
            f"Accelerate was asked for mixed_precision={wanted!r}, and every matmul and conv ran in "
            f"{' and '.join(seen)}: on this device it does nothing, and says nothing",
            evidence={"asked for": wanted, "observed": seen},
            fix="Accelerator(mixed_precision='bf16')  # on the CPU; float16 there only by preamp or torch.autocast",
        )  # fmt: skip
        return
    for _, dtype, _, place in reversed(regions if not any(on for _, _, on, _ in regions) else []):
        if dtype in LOW_DTYPES and place[0] is not None:
            yield Finding(
                "PA109", "info",
                f"every autocast region for {dtype} has enabled=False: all of it runs in {' and '.join(seen)}",
                file=place[0], line=place[1], evidence={"asked for": name_of(dtype), "observed": seen},
                fix="with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=True): ...",
            )  # fmt: skip
            return
    for device_type, dtype, on, place in reversed(regions):
        if on and dtype in LOW_DTYPES and place[0] is not None:
            yield Finding(
                "PA109", "warning",
                f"autocast({device_type!r}, {dtype}) was entered, and every matmul and conv ran in "
                f"{' and '.join(seen)}",
                file=place[0], line=place[1], evidence={"asked for": name_of(dtype), "observed": seen},
                fix="with torch.autocast(x.device.type, dtype=torch.bfloat16): ...",
            )  # fmt: skip
            return


def _no_effect(device_type: str, dtype: Any, place: Line) -> Finding:
    return Finding(
        "PA109", "warning",
        f"autocast({device_type!r}) was asked for and torch has switched it off: this machine cannot, so everything "
        "inside runs in float32",
        file=place[0], line=place[1],
        evidence={"device type": device_type, "dtype": str(dtype), "CUDA": torch.cuda.is_available()},
        fix="with torch.autocast(x.device.type, dtype=torch.bfloat16): ...",
    )  # fmt: skip


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _wrapped(module: nn.Module) -> bool:
    return type(module).__name__ in WRAPPERS - {"OptimizedModule", "_LightningModuleWrapperBase", "_FabricModule"}
