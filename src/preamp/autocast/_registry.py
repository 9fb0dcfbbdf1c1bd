"""Puts rules for operators into torch's dispatcher, and takes them out again.

torch's autocast is a dispatch key: inside a region every operator passes the kernels of that key first. preamp adds
kernels of its own there (`torch.library.Library`), for exactly the operators whose rule differs from what torch does
on the device, so that an operator without such a rule costs nothing.

Kernels are process-wide, a region belongs to one thread. So each kernel first checks whether preamp's rules apply,
and otherwise does what torch's own autocast would have done:

* inside a region the *marker* is set: autocast's state for a device type that nothing else uses. Keeping it there, and
  not in a variable of our own, makes torch.compile correct: dynamo runs changes of autocast state while it traces, and
  guards compiled code on them.
* a checkpointed block is recomputed during backward, under the plain `torch.autocast` that torch's checkpoint sets up;
  so the rules hold while nodes of the graph are run that were made in such a region (`_nodes`).
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from typing import Any

import torch

from ..compiling import uncompiled
from ..errors import PolicyError
from ..rules import RULED_ON_CPU, OpRules, autocast_key, has_kernel, native_category
from . import _kernels
from ._held import HeldKernels, go_on, library_of, overload_of
from ._nodes import NODES
from ._products import COMPILED, MARKER, PRODUCTS, ruled
from ._vmapped import VMAPPED

# Another set of rules has another marker dtype, so that code compiled under one set is not reused under another.
MARKER_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float64, torch.complex64,
    torch.complex128, torch.qint8, torch.quint8, torch.qint32,
)  # fmt: skip


class Registry(HeldKernels):
    """The rules that are in the dispatcher now. There is one (`REGISTRY`), because there is one dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: OpRules | None = None
        self.stamp = ""
        """Names the rules in the dispatcher ("" for none). Traced code reads it, and so is guarded on it."""
        self._numbers: dict[OpRules, int] = {}
        self._number = 0
        self._lingering = False

    def enter(self, rules: OpRules | None, device_type: str, lingering: bool) -> int:
        """Rules for a region. They stay after it, since its backward may recompute: `lingering` until `uninstall()`,
        else as long as the session that holds them; nothing happens once that is closed. Returns the rules' number.
        """
        with self._lock:
            if lingering or self._holders:
                self._ensure(rules, device_type)
            self._lingering |= lingering
            return self._number

    def hold_rules(self, rules: OpRules, device_type: str) -> object:
        """Rules for a session: kept until `release()` of what is returned."""
        with self._lock:
            self._ensure(rules, device_type)
            holder = object()
            self._holders.add(holder)
            return holder

    def release(self, holder: object) -> None:
        """Give up a `hold_rules()`, once. The last one clears the dispatcher, unless regions of others were entered."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)
                if not self._holders and not self._lingering:
                    self._clear()
                    PRODUCTS.forget_nodes()

    def uninstall(self) -> None:
        """Clear the dispatcher now; `PolicyError` while a session is open."""
        with self._lock:
            if self._holders:
                raise PolicyError(f"{len(self._holders)} open session(s) need the operator rules: close them first")
            self._clear()
            PRODUCTS.forget_nodes()

    def _ensure(self, rules: OpRules | None, device_type: str) -> None:
        wanted = rules if rules is not None else (self.rules or OpRules())
        if self.rules is not None and wanted is not self.rules and wanted != self.rules:
            around = torch.is_autocast_enabled(MARKER) and ruled(torch.get_autocast_dtype(MARKER))
            if self._holders or around:
                session = ("an open session", "Close that session")
                whose, way = session if self._holders else ("the region around this one", "Leave that region")
                raise PolicyError(
                    f"operator rules hold for the whole process, and {whose} has others: "
                    f"{str(self.rules) or 'the default'}; asked for: {str(wanted) or 'the default'}. "
                    f"{way} first, or give both the same OpRules."
                )
            self._clear()
        if self.rules is None:
            self.rules = wanted
            self._number = self._numbers.setdefault(wanted, len(self._numbers))
            self.stamp = f"rules {self._number}"
            self._tag_compiled(_tag_of(wanted))
            VMAPPED.hold(self)
        if device_type == "cpu" and device_type in self._libraries:
            PRODUCTS.install()  # those for tracing, if the compiler has come since
        elif device_type == "cpu":
            PRODUCTS.hold(self)
        if device_type not in self._libraries:
            try:
                self._libraries[device_type] = _install(self.rules, device_type)
            except BaseException:
                if not self._libraries:  # these rules came with this call, and go with it
                    self._clear()
                raise

    def _clear(self) -> None:
        super()._clear()
        VMAPPED.release(self)
        PRODUCTS.release(self)
        self.rules, self._lingering, self.stamp = None, False, ""


REGISTRY = Registry()


@functools.cache
def _tag_of(rules: OpRules) -> str:
    return f"preamp-rules:{hashlib.sha256(repr(tuple(rules.ruled())).encode()).hexdigest()[:16]}"


def _install(rules: OpRules, device_type: str) -> list[torch.library.Library]:
    """Put the kernels that rules want into the dispatcher; one library a namespace."""
    own = any("::" in name for name, _ in rules.ruled())  # custom operators may come, and get rules, at any time
    kernels = (_kernels_of.__wrapped__ if own else _kernels_of)(rules, device_type)
    return [library_of(own, autocast_key(device_type), namespace=space) for space, own in kernels.items()]


@functools.cache
def _kernels_of(rules: OpRules, device_type: str) -> dict[str, list[tuple[str, _kernels.Kernel]]]:
    """A kernel for each operator whose rule differs from torch's, by namespace; kept for each session."""
    found: dict[str, list[tuple[str, _kernels.Kernel]]] = defaultdict(list)
    changed = dict(rules.changes)
    for name, category in rules.ruled():
        native = native_category(name, device_type)
        op = overload_of(name)
        torch_has_one = has_kernel(name, device_type)
        if op is None:
            continue
        if name in RULED_ON_CPU and device_type != "cpu" and name not in changed:
            continue
        if torch_has_one and "::" in name:
            raise PolicyError(
                f"{name} has an autocast rule of its own on {device_type!r} (torch.library.register_autocast), "
                "which preamp could not put back: change it there, or leave it out of OpRules"
            )
        # Where torch has no kernel, its rule or its lack of one stems from the operator's parts.
        if (
            category == (native or "as-is")
            and (torch_has_one or not changed or (not native and name not in changed))
            and (name != "linalg_vecdot" or device_type != "cpu")  # torch's is low, too, and adds up in 16 bits
        ):
            continue
        ours = _kernels.build(op, category, device_type)
        by_torch = "plain low" if native == "low" else native
        torchs = _kernels.build(op, by_torch, device_type) if by_torch and torch_has_one else None
        namespace, _, plain = name.rpartition("::")
        found[namespace or "aten"].append((plain, _gate(op, ours, torchs, device_type)))
    return found


def _gate(op: Any, ours: _kernels.Kernel, torchs: _kernels.Kernel | None, device_type: str) -> _kernels.Kernel:
    """A kernel that checks whose rules apply: preamp's in a region of this thread, and in its backward. Without a rule
    of torch's (None), the operator goes on to the next dispatch key with autocast still on, so that torch's rules for
    its parts apply: exactly as if no kernel were here.
    """
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, autocast_key(device_type)))
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    graph_task = torch._C._current_graph_task_id

    @uncompiled
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if enabled(MARKER) and ruled(marker := dtype_of(MARKER)):
            if marker is COMPILED and graph_task() == -1:
                NODES.note(compiled=True)
            return ours(*args, **kwargs)
        if graph_task() == -1:
            NODES.note(compiled=False)
        elif NODES.is_running():
            return ours(*args, **kwargs)
        if torchs is None:
            return go_on(op, keyset & below, args, kwargs)
        return torchs(*args, **kwargs)

    return kernel
