"""Which modules a running script trains, found from outside, and what their parts are called."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..frameworks import unwrapped as unwrapped_by
from .hooks import subclasses

unwrapped = functools.partial(unwrapped_by, any_wrapper=True)
"""The user's model inside wrappers for parallel training and compilation."""


def is_trainable(module: nn.Module) -> bool:
    """Whether any parameter of the module asks for a gradient."""
    return any(p.requires_grad for p in module.parameters())


class Names:
    """Module paths by module, as `Mapping.get`; looks for models anew when it meets one that it does not know.

    Paths are those of `named_modules` without a compiler's `_orig_mod`; of one of several models `name:path`. A model
    keeps the path under which it was found.
    `fixed`: the models by name, where they are known and no others are meant. All others are held by weak references:
    a script that makes one model after another has the memory of one.
    """

    def __init__(self, fixed: Mapping[str, nn.Module] | None = None) -> None:
        self._fixed = fixed
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self.owners: dict[int, str] = {}
        """Module paths by the ids of live parameters and buffers."""
        self._own_names: dict[int, str] = {}
        """Names of parameters in their models, by the same ids."""
        self._paths: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._watched: list[weakref.ref[Any]] = []
        """Keeps what takes a tensor out of `owners` when it goes: an id is given again."""
        self._unknown = WeakIdKeyDictionary()
        self.callers: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        """Threads that called models under autograd, by their identifiers."""
        self._only: int | None = None
        self.is_sharded = False
        """Whether processes hold parts of the models: then a call is one of all of them, and none can call alone."""

    @property
    def given(self) -> list[nn.Module]:
        """The models that are meant, where no others are."""
        return list((self._fixed or {}).values())

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models that are alive, by name."""
        return {name: model for name, ref in self._models.items() if (model := ref()) is not None}

    def get(self, module: nn.Module, default: str | None = None) -> str | None:
        """The path of a module within its model; `default` for what belongs to none."""
        found = self._paths.get(module)
        if found is None and module not in self._unknown:
            self.search(())
            found = self._paths.get(module)
            if found is None:
                for part in module.modules():  # a search through all objects takes long
                    self._unknown[part] = True
        return default if found is None else found

    def known(self, module: nn.Module, default: str | None = None) -> str | None:
        """The same without a search."""
        return self._paths.get(module, default)

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of all models."""
        return ((path, module) for module, path in list(self._paths.items()))

    def raised_in(self, error: BaseException) -> str | None:
        """The innermost module that an error has left."""
        inside = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        parts = (self.known(one) for one in reversed(inside) if isinstance(one, nn.Module))
        return next((path for path in parts if path is not None), None)

    def wants(self, module: nn.Module) -> bool:
        """Whether a call of this module is one of a model that is followed.

        A part without weights counts, too: a framework may call the parts of a model whose own forward never runs, and
        what a norm made not finite is not to be taken for data that came in so.
        """
        if isinstance(module, torch.jit.ScriptModule):  # which takes no hook
            return False
        if self._fixed is not None:
            return any(unwrapped(module) is unwrapped(one) for one in self._fixed.values())
        return is_trainable(module) or module in self._paths

    def parameter(self, parameter: Tensor) -> tuple[str | None, str]:
        """Path of the module that owns a parameter, and the parameter's own name."""
        path = self.owners.get(id(parameter))
        return path, "a parameter" if path is None else self._own_names.get(id(parameter), "a parameter")

    def search(self, optimizers: Iterable[Any]) -> None:
        """Find the models: modules that are no other's part, with parameters to train (that an optimizer steps)."""
        if self._fixed is not None:
            self._take(dict(self._fixed))
            return
        gc.collect()  # a wrapper that was thrown away would be taken for the model
        kinds = set(subclasses(nn.Module))  # asking each object whether it is a module takes three times as long
        modules = [one for one in gc.get_objects() if type(one) in kinds and "_modules" in one.__dict__]
        parts = {id(child) for one in modules for child in one._modules.values() if child is not None}
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        found: list[nn.Module] = []
        for one in modules:
            if id(one) in parts or not is_trainable(one):
                continue
            inner = unwrapped(one)
            if inner not in found and (not stepped or any(id(p) in stepped for p in inner.parameters())):
                found.append(inner)
        found = [one for one in found if not any(one is not other and one in set(other.modules()) for other in found)]
        if not found and stepped:
            self.search(())  # the optimizer steps copies
            return
        named: dict[str, nn.Module] = {}
        for index, one in enumerate(found):
            name = _variable(one) or type(one).__name__
            named[name if name not in named else f"{name}-{index}"] = one  # the one before, not yet thrown away
        self._take(named)

    def optimizers(self) -> list[Optimizer]:
        """Those that are alive and step a parameter of these models, where no others are meant."""
        own, kinds = {p for model in self.given for p in model.parameters()}, set(subclasses(Optimizer))
        alive = [one for one in gc.get_objects() if type(one) in kinds and hasattr(one, "param_groups")]
        return [one for one in alive if not own.isdisjoint(p for group in one.param_groups for p in group["params"])]

    def keep_stepped(self, optimizers: Iterable[Any]) -> None:
        """Keep the known models that an optimizer steps; search for others where it steps unknown parameters.

        Known models are kept where the optimizers step copies of their parameters.
        """
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        if not stepped & self.owners.keys():
            self.search(optimizers)
            return
        kept = {
            name: model
            for name, model in self.models.items()
            if self._fixed is not None or any(id(p) in stepped for p in model.parameters())
        }
        if len(kept) < len(self.models):
            self._take(kept)

    def keep_called(self, thread: int) -> None:
        """Keep what this thread calls, from here on: other models are trained by others, which free their gradients."""
        self._only = thread
        self._take(self.models)

    def _is_called(self, model: nn.Module) -> bool:
        return self._only is None or any(self.callers.get(part) == self._only for part in model.modules())

    def _take(self, models: dict[str, nn.Module]) -> None:
        models = {name: model for name, model in models.items() if self._is_called(model)}
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        before, self._paths, self.owners, held = self._paths, WeakIdKeyDictionary(), {}, dict[int, Tensor]()
        taken = {before.get(model, "a part") for model in models.values()}
        for name, model in models.items():
            prefix, fresh = before.get(model, "a part"), "" if len(models) == 1 else f"{name}:"
            if prefix[-1:] not in ("", ":"):  # it is new, or was a part of another
                prefix = f"{name}-{len(taken)}:" if fresh in taken else fresh
                taken.add(prefix)
            for path, module in model.named_modules():
                clean = ".".join(word for word in path.split(".") if word != "_orig_mod")
                self._paths.setdefault(module, prefix + clean)
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        self.owners.setdefault(id(tensor), self._paths[module])
                        held[id(tensor)] = tensor
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in (each for model in models.values() for each in model.named_parameters()):
            named.setdefault(id(parameter), (name, parameter))
        self._own_names = {key: name for key, (name, _) in named.items()}
        parameters = [p for _, p in named.values()]
        self._parameters = [weakref.ref(p) for p in parameters]
        owners = self.owners
        self._watched = [weakref.ref(t, lambda _, key=key: owners.pop(key, None)) for key, t in held.items()]  # type: ignore[misc]
        self._unknown = WeakIdKeyDictionary()
        self.is_sharded |= any(type(p).__name__ == "DTensor" for p in parameters)

    def common(self, parameters: Iterable[Tensor]) -> str | None:
        """The innermost module that holds all of these parameters."""
        paths = [self.owners.get(id(p)) for p in parameters]
        if not paths or any(path is None for path in paths):
            return None
        words = [str(path).split(".") if path else [] for path in paths]
        same = 0
        while all(len(each) > same and each[same] == words[0][same] for each in words):
            same += 1
        return ".".join(words[0][:same])

    def parameters(self) -> list[nn.Parameter]:
        """All parameters to train, each once."""
        return [p for ref in self._parameters if (p := ref()) is not None and p.requires_grad]


def _variable(module: nn.Module) -> str | None:
    """The script's global variable that holds a model."""
    space = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    for name, value in list(space.items()):
        if isinstance(value, nn.Module) and name not in ("self", "module", "model_") and unwrapped(value) is module:
            return name
    return None
