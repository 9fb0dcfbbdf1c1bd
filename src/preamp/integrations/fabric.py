"""preamp in Lightning Fabric: a precision plugin."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import SessionError
from ..frameworks import unwrapped
from ..ledger import parameters_of, whole
from ..session import Session
from ..tree import cast_floating
from ._host import Host

IS_APART = "lightning" not in sys.modules and ("lightning_fabric" in sys.modules or find_spec("lightning") is None)
"""Whether Fabric and the Trainer are those of `lightning_fabric` and `pytorch_lightning`: the same code, apart."""

if not IS_APART:
    from lightning.fabric.plugins.precision import Precision
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
else:
    from lightning_fabric.plugins.precision import Precision
    from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer


class PreampPrecision(Host, Precision):
    """Trains what a `Fabric` sets up under a session: `Fabric(plugins=[PreampPrecision("O4")])`.

    The loop stays as it is. The session begins with the first forward pass, or when `session` is read: set up all
    models and optimizers before. Models return float32. Weights in `fabric.save` are float32; add the plugin to the
    state that is saved, and a run resumes bit for bit.

    Args:
        level: "O0" to "O5" or "auto".
        **options: For `preamp.prepare`.
    """

    _not_yet = "Trainer.fit makes it, or fabric.setup(model, optimizer)"

    def __init__(self, level: str = "auto", **options: Any) -> None:
        super().__init__({"level": level, **options})
        self.precision = f"preamp-{level}"  # what the framework shows
        self._set_up: list[weakref.ref[nn.Module]] = []
        self._earlier: list[weakref.ref[Any]] = []
        self._in_fabric = self._waits = False
        self._undo = ExitStack()

    def __str__(self) -> str:
        """What FSDPStrategy prints where it refuses the plugin."""
        name, level = type(self).__name__, self._options["level"]
        return f"{name}({level!r}). With it, shard by ModelParallelStrategy, which uses FSDP2"

    @property
    def session(self) -> Session:
        """The session that trains; `SessionError` before a model and an optimizer are set up, and after `close`."""
        self._begun()
        return super().session

    def close(self) -> None:
        """Close the session: models and optimizers go on in float32, until others are set up."""
        self._waits = False
        self._set_up.clear()
        self._undo.close()
        if self._in_fabric:  # what is there now goes on without a session, when others are set up later
            self._earlier = [weakref.ref(each) for each in self._wrappers(_FabricModule, _FabricOptimizer)]
            self._in_fabric = False
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, also of a model that Fabric has set up: without what is set up here."""
        return {**vars(self), "_set_up": [], "_earlier": [], "_undo": ExitStack(), "_session": None, "_waits": False}

    def teardown(self) -> None:
        """`close`, called by the framework."""
        self.close()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """A module is being set up; its session begins when its optimizer is known."""
        self._set_up.append(weakref.ref(module))
        self._waits = True
        return module

    def _begun(self) -> Session | None:
        """The session; makes it if models and optimizers have been set up for the first time."""
        if self._session is None and self._waits and torch.is_grad_enabled():
            models, optimizers = self._found()
            if optimizers:
                self._begin(models, [each.optimizer for each in optimizers])._steps.follow(optimizers)
                self._in_fabric = True
        return self._session

    def _begin(self, models: Any, optimizers: Any) -> Session:
        session = super()._begin(models, optimizers)
        self._waits = False
        self._set_up.clear()
        for name, each in session.models.items():
            model = unwrapped(each)
            _SESSIONS[model] = (weakref.ref(session), f"{name}:" if name else "")
            self._undo.callback(model.register_state_dict_post_hook(_with_masters).remove)
        return session

    def _found(self) -> tuple[list[nn.Module], list[Any]]:
        """The optimizers set up by a Fabric that has this plugin, and the models that they step, in order.

        Fabric tells a plugin of modules, and of optimizers only when they step. That is too late for masters, so what
        it has wrapped is searched for.
        """
        own = self._wrappers(_FabricModule, _FabricOptimizer)
        earlier = {id(made()) for made in self._earlier}
        own = [each for each in own if id(each) not in earlier]
        wrapped = {id(each._original_module): each for each in own if issubclass(type(each), _FabricModule)}
        ordered = [wrapped[id(made())] for made in self._set_up if id(made()) in wrapped]
        place: dict[nn.Parameter, int] = {}
        for model in ordered:
            for parameter in model.parameters():
                place.setdefault(parameter, len(place))
        optimizers = [each for each in own if issubclass(type(each), _FabricOptimizer)]
        optimizers.sort(key=lambda each: min((place.get(p, len(place)) for p in parameters_of(each)), default=0))
        stepped = {p for each in optimizers for p in parameters_of(each)}
        return [model for model in ordered if any(p in stepped for p in model.parameters())], optimizers

    def _wrappers(self, *kinds: type) -> list[Any]:
        """What a Fabric that has this plugin has wrapped."""
        own = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
        return [each for each in own if each._strategy.precision is self]

    def _running(self) -> Session | None:
        """The session of the forward pass that came before; None where there is none to be."""
        if self._session is None and self._waits:
            raise SessionError(
                "there is no session yet, so nothing was computed in the level's precision: set up the optimizer too, "
                "fabric.setup(model, optimizer), and run what that returned, or your forward pass in fabric.autocast()"
            )
        return self._session

    # -- a step

    def forward_context(self) -> AbstractContextManager[Any]:
        """The session's region."""
        self._begun()
        return self._autocast()

    def convert_input(self, data: Any) -> Any:
        """A batch, cast where there are no regions: a step calls layers of the module that have 16-bit weights."""
        session = self._begun()
        if session is None or session.policy.has_regions:
            return data
        return cast_floating(data, session.policy.compute)

    def convert_output(self, data: Any) -> Any:
        """What a model returns, in float32."""
        return data if self._session is None else cast_floating(data, torch.float32)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Gradients of the loss times its scale; with several losses, `fabric.backward(loss, name="d")`."""
        session = self._running()
        if session is None:
            Precision.backward(self, tensor, model, *args, **kwargs)
            return
        names = ("gradient", "retain_graph", "create_graph")
        session.backward(tensor, **dict(zip(names, args, strict=False)), **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any = None, **kwargs: Any) -> Any:
        """The session's step, after the closure if there is one, whose result is returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        session = self._running()
        if session is None:
            stepped = Precision.optimizer_step(self, optimizer, **kwargs)
            return stepped if closure is None else result
        session.step(optimizer)
        return result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """True gradients, which Fabric's clipping reads and changes."""
        if self._session is not None:
            self._session.unscale_(optimizer)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The session's state, or the closed one's, without masters, which are the weights in a checkpoint."""
        self._begun()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the session's state; without a session, do nothing."""
        self._begun()
        super().load_state_dict(state_dict)


_SESSIONS: MutableMapping[nn.Module, tuple[weakref.ref[Session], str]] = WeakIdKeyDictionary()
"""The session of a model, and the beginning of its masters' names."""


def _with_masters(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put masters in the place of the 16-bit weights that they were rounded to; loading them takes them back.

    A hook of the module, and a function of this file, so that the module can be copied and pickled.
    """
    found, label = _SESSIONS.get(module, (None, ""))
    session = None if found is None else found()
    masters = {} if session is None else session.state_dict()["masters"]
    if not masters:
        return
    own = {parameter: masters.get(label + name) for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if own[parameter] is not None and not isinstance(state.get(prefix + name, parameter), nn.Parameter):
            state[prefix + name] = whole(name, own[parameter])
