"""A session's gradients between backward and step: scaled or true, in the parameters or in float32 beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..kernels import Reading, chained, global_norm, multiply_, present_in, read, reciprocal
from ..ledger import Collected, Masters
from ..optim import FusedOptimizer
from ..parallel import Agreement
from ..sharding import placed_as
from ._look import Look
from ._parameters import dtype_of_gradient, gradients_of, low_strangers, parameters_of
from ._sums import WideSums

_LAYOUT, _VERSION = attrgetter("layout"), attrgetter("_version")


class GradientBook:
    """Knows of every optimizer's gradients what has been read of them and whether they are still scaled.

    One loss: gradients accumulate and rest scaled; unscaling and clipping are a factor, applied by the step.
    `make_true` applies it earlier. Several losses with scales of their own: `backward_apart` unscales each loss's
    gradients at once and adds them up, in float32 for low parameters. What was read, factors and norms lie on the
    device that `home` tells, wherever the gradients are: optimizers of several devices have to be compared.
    """

    def __init__(self, masters: Masters, home: Callable[[], torch.device], group: Any = None) -> None:
        self._masters, self._home, self._group = masters, home, group
        self._agreements: dict[Optimizer, tuple[int, Agreement | None]] = {}
        self._sums = WideSums()
        self._looks: dict[Optimizer, Look] = {}
        self._strays: list[tuple[Parameter, Parameter]] = []
        """Parameters that held masters a moment ago, and what they were: a forward pass may have run meanwhile, and its
        gradients end there."""

    def has_read(self, optimizer: Optimizer) -> bool:
        """Whether `look` has run since the optimizer's last step."""
        return optimizer in self._looks

    def parameters(self, optimizer: Optimizer) -> list[Parameter]:
        """The parameters whose gradients were read, in the order of the reading."""
        return self._looks[optimizer].parameters

    def is_true(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients were made true."""
        return optimizer in self._looks and self._looks[optimizer].true

    def look(self, optimizer: Optimizer, inverse: Tensor | None, statistics: bool, steps_next: bool = False) -> Reading:
        """Read an optimizer's gradients, once; `inverse` makes them true (None: they are).

        `steps_next`: the optimizer's step follows at once, so that they may be read where it collects them. Then the
        last bit of the norm depends on how they lie there, so not if it is to clip them by.
        """
        if optimizer not in self._looks:
            self.collect_strays()
            for index, parameter in enumerate(low_strangers(optimizer, self._masters)):
                self._masters.adopt(f"(added later):{index}:{len(self._masters)}", parameter)
            if self._agreement(optimizer) is None and not self._sums and not statistics:
                self._looks[optimizer] = self._quick_look(optimizer, inverse, steps_next)
            else:
                self._looks[optimizer] = self._long_look(optimizer, inverse, statistics)
        return self._looks[optimizer].reading

    def _long_look(self, optimizer: Optimizer, inverse: Tensor | None, statistics: bool) -> Look:
        agreement = self._agreement(optimizer)
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = {}
        for parameter in parameters:
            grad = parameter.grad
            assert grad is not None
            if grad.layout is torch.sparse_coo:
                grad = parameter.grad = grad.coalesce()
            elif agreement is not None:
                grad = parameter.grad = placed_as(grad, parameter)
            gradients[parameter] = self._sums.of(parameter) if parameter in self._sums else grad
        return Look(self._read(optimizer, gradients, statistics), parameters, inverse)

    def _quick_look(self, optimizer: Optimizer, inverse: Tensor | None, steps_next: bool) -> Look:
        """Without asking each of a thousand parameters more than its gradient."""
        collected = optimizer.collect() if steps_next and isinstance(optimizer, FusedOptimizer) else None
        if collected and self._home().type == collected[0][0].params[0].device.type:
            look = self._look_at_collected(collected, inverse)
            if look is not None:
                return look
        parameters, gradients = present_in(list(parameters_of(optimizer)))
        if set(map(_LAYOUT, gradients)) - {torch.strided}:
            return self._long_look(optimizer, inverse, False)
        return Look(read(gradients, device=self._home()), parameters, inverse)

    def _look_at_collected(self, collected: Collected, inverse: Tensor | None) -> Look | None:
        """In the lists of the step that follows; None if they have to be read one by one."""
        parameters = list(chain.from_iterable(bucket.params for bucket, _ in collected))
        gradients = chained([own for _, own in collected])
        if not gradients.strided:
            return None
        reading = read(gradients, device=self._home())
        if len(gradients) != len(parameters):  # on a CPU, where some are packed
            if reading.found.item():
                return None
            none = reading.nonfinite.new_zeros(len(parameters))
            reading = Reading(reading.found, reading.norm, none, sum(map(Tensor.numel, parameters)))
        return Look(reading, parameters, inverse, collected=collected)

    def _agreement(self, optimizer: Optimizer) -> Agreement | None:
        """With whom what is read of an optimizer's gradients has to be agreed, if with anybody."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._agreements.get(optimizer)
        if known is None or known[0] != count:
            agreement = Agreement(list(parameters_of(optimizer)), self._group)
            known = self._agreements[optimizer] = (count, agreement if agreement.needed else None)
        return known[1]

    def _read(self, optimizer: Optimizer, gradients: Mapping[Parameter, Tensor], statistics: bool) -> Reading:
        agreement, home = self._agreement(optimizer), self._home()
        if agreement is None:
            return read(list(gradients.values()), statistics=statistics, device=home)
        return agreement.read([gradients.get(p) for p in parameters_of(optimizer)], statistics=statistics).on(home)

    def _norm_of(self, optimizer: Optimizer, order: float = 2.0) -> Tensor:
        """Of the gradients as they lie there."""
        agreement = self._agreement(optimizer)
        if agreement is None:
            return global_norm(gradients_of(optimizer), order, device=self._home())
        return agreement.norm([p.grad for p in parameters_of(optimizer)], order).to(self._home())

    def make_true(self, optimizer: Optimizer) -> None:
        """Unscale and clip an optimizer's gradients, once; low parameters get float32 ones, and their masters in."""
        look = self._looks[optimizer]
        if look.true:
            return
        self._masters.refresh_before_step(look.parameters)
        present, _ = present_in(look.parameters)  # of those that were read; some may have been thrown away since
        wide = {p: self._sums.of(p) for p in self._masters.among(present)}
        look.kept = [p for p in wide if self._sums.forget(p)]
        factor = look.factor
        if factor is not None:
            others = [p for p in present if p not in wide] if wide else present
            multiply_([*wide.values(), *present_in(others)[1]], factor)
        self._masters.swap_in(wide, wide)
        look.norm, look.true = self.norm(optimizer) if look.clip is not None else None, True

    def rest(self, optimizers: Iterable[Optimizer]) -> None:
        """Let gradients be as backward leaves them, so that more can be added, with all that was done to them since.

        What was thrown away stays away, by whichever call. A step that comes after it reads them anew.
        """
        self.collect_strays()
        for optimizer in optimizers:
            look = self._looks.pop(optimizer, None)
            if look is None:
                continue
            if not look.true:
                self._shrink(look)
                continue
            scale = None if look.inverse is None else reciprocal(look.inverse)
            totals = {p: p.grad for p in look.kept if p.grad is not None}
            others = [p for p in look.parameters if p not in self._masters]
            self._strays += self._masters.swap_out(look.parameters, scale, changed=look.clip is not None)
            if scale is not None:
                multiply_(present_in(others)[1], scale)
            for parameter, total in totals.items():
                self._sums.show(parameter, total)
        if not any(look.true for look in self._looks.values()):
            self._masters.swap_out()  # those that an interrupt has left

    def _shrink(self, look: Look) -> None:
        """Apply the clipping that a step would, to gradients that were not thrown away or written since."""
        if look.clip is None:
            return
        known = dict(zip(*look.clipped, strict=True))
        rest = []
        for parameter in present_in(look.parameters)[0]:
            grad = parameter.grad
            assert grad is not None
            if known.get(id(grad)) != grad._version:
                continue
            if parameter in self._sums:
                self._sums.show(parameter, self._sums.of(parameter) * look.clip.to(grad.device))
            else:
                rest.append(grad)
        multiply_(rest, look.clip)

    def carry(self, gradients: Mapping[Parameter, Tensor]) -> None:
        """Put true gradients here, of low parameters also in float32."""
        for parameter, true in gradients.items():
            if parameter in self._masters:
                self._sums.show(parameter, true.float())
            else:
                parameter.grad = true

    def scale_carried(self, parameters: Iterable[Parameter], scaled: Callable[[Tensor], Tensor]) -> None:
        """Bring those that are still here to the scale of what will be added to them."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = scaled(self._sums.of(parameter)).to(dtype_of_gradient(parameter))
            self._sums.forget(parameter)

    def true_for_good(self, optimizers: Iterable[Optimizer], inverse: Tensor | None) -> dict[Parameter, Tensor]:
        """Multiply resting gradients by `inverse`. Those of parameters with masters are returned, in float32."""
        present = present_in([p for optimizer in optimizers for p in parameters_of(optimizer)])[0]
        wide = {p: self._sums.of(p) for p in self._masters.among(present)}
        if inverse is not None:
            multiply_([*wide.values(), *present_in([p for p in present if p not in wide])[1]], inverse)
        return wide

    def collect_strays(self) -> None:
        """Add gradients that a backward pass left where a parameter was when its forward pass ran."""
        for parameter, other in self._strays:
            if other.grad is not None:
                late, other.grad = other.grad.to(parameter.dtype), None
                parameter.grad = late if parameter.grad is None else parameter.grad + late
        self._strays.clear()

    def clip(self, optimizers: Sequence[Optimizer], coefficient: Tensor) -> None:
        """Shrink optimizers' gradients by what their common norm asks: at once if they are true, else by their factor.

        One that is not finite makes that norm so, and shrinking by it would spoil the others': they skip together.
        """
        looks = [self._looks[each] for each in optimizers]
        found = torch.stack([look.reading.found for look in looks]).amax() if len(looks) > 1 else None
        for each, look in zip(optimizers, looks, strict=True):
            if look.true:
                multiply_(gradients_of(each), coefficient)
            else:
                look.clip = coefficient if look.clip is None else look.clip * coefficient
                gradients = gradients_of(each)
                look.clipped = list(map(id, gradients)), list(map(_VERSION, gradients))
            if found is not None:
                look.reading = replace(look.reading, found=found)

    def step_low(self, optimizer: FusedOptimizer, found: Tensor | None) -> None:
        """Have an optimizer step that takes 16-bit gradients and masters as they are."""
        look = self._looks[optimizer]
        self._masters.refresh_before_step(look.parameters, again=True)
        optimizer.step_with(factor=look.factor, found=found, collected=look.collected)

    def backward_apart(
        self, run: Callable[[], None], inverse: Tensor | None, optimizers: Iterable[Optimizer], statistics: bool
    ) -> dict[Optimizer, Reading]:
        """Run a backward pass, unscale what it adds by `inverse`, and add that to the true gradients so far.

        Returns what was read for each optimizer that got gradients from it. Whatever happens in `run`, the gradients
        that were there before stay.
        """
        optimizers = list(optimizers)
        parameters = {p: None for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad}
        before = {p: p.grad for p in parameters}
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = None
            else:
                self._sums.forget(parameter)  # zeroed since: what was kept for it is void
        try:
            run()
        except BaseException:
            for parameter, grad in before.items():
                parameter.grad = grad
            raise
        self.collect_strays()
        added: dict[Parameter, Tensor] = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                grad = grad.coalesce() if grad.layout is torch.sparse_coo else placed_as(grad, parameter)
                added[parameter] = grad.float() if parameter in self._masters else grad
        readings = {}
        scaled = dict(added)
        for optimizer in optimizers:
            own = {p: scaled.pop(p) for p in parameters_of(optimizer) if p in scaled}
            if own or self._agreement(optimizer) is not None:
                readings[optimizer] = self._read(optimizer, own, statistics)
                if inverse is not None:
                    multiply_(own.values(), inverse)
        for parameter, grad in before.items():
            parameter.grad = grad
            if parameter in added:
                self._add(parameter, added[parameter])
        return readings

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        if parameter not in self._masters:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return
        self._sums.show(parameter, gradient if parameter.grad is None else self._sums.of(parameter) + gradient)

    def norm(self, optimizer: Optimizer) -> Tensor:
        """L2 norm of an optimizer's true gradients, before clipping."""
        look = self._looks[optimizer]
        if look.norm is None:
            if look.true:  # somebody may have changed them since they were read
                look.norm = self._norm_of(optimizer)
            else:
                look.norm = look.reading.norm if look.inverse is None else look.reading.norm * look.inverse
        return look.norm

    def norm_read(self, optimizer: Optimizer) -> tuple[Tensor, bool]:
        """`norm`, or where nobody has asked for it that of the gradients as they were read, and True if scaled."""
        look = self._looks[optimizer]
        scaled = look.norm is None and not look.true and look.inverse is not None
        return (look.reading.norm if scaled else self.norm(optimizer)), scaled

    def norm_now(self, optimizer: Optimizer, order: float) -> Tensor:
        """The norm that an optimizer's true gradients have now, after the clipping so far; of any order."""
        look = self._looks[optimizer]
        if look.clip is None and not look.true and order == 2.0:
            return self.norm(optimizer)
        if look.true or order != 2.0:
            norm = self._norm_of(optimizer, order)
            return norm if look.factor is None else norm * look.factor
        return look.reading.norm if look.factor is None else look.reading.norm * look.factor

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or its gradients were thrown away."""
        look = self._looks.pop(optimizer, None)
        if self._masters.swapped_in:
            scale = None if look is None or look.inverse is None else reciprocal(look.inverse)
            self._masters.swap_out(parameters_of(optimizer), scale)
        self._strays.clear()
