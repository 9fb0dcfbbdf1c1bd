"""amp.initialize: what it prints, refuses, returns, and does to models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import DeprecatedFeatureWarning, amp
from preamp.compat.apex.amp import _amp_state
from preamp.compat.apex.fp16_utils import FP16_Optimizer
from preamp.compat.apex.parallel import LARC, DistributedDataParallel
from preamp.errors import PreampWarning

from .toys import LEVELS, batch, mlp, scaled_backward, train

HALF, FLOAT = torch.float16, torch.float32


def sgd(model: nn.Module, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, **kwargs)


def quiet(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, verbosity=0, **kwargs)


BANNER = """Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.
Defaults for this optimization level are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : True
master_weights         : True
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : True
loss_scale             : 128.0
"""


def test_banner(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    amp.initialize(model, sgd(model), opt_level="O2", keep_batchnorm_fp32="False", loss_scale="128.0")
    assert capsys.readouterr().out == BANNER
    quiet(mlp(), opt_level="O1")
    assert capsys.readouterr().out == ""


DEFAULTS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
    "O4": (None, True, None, None, 1),
    "O5": (torch.bfloat16, None, True, True, 1),
}


@pytest.mark.parametrize("level", LEVELS)
def test_options_of_levels(level: str) -> None:
    quiet(mlp(), opt_level=level)
    p = _amp_state.opt_properties
    seen = (p.cast_model_type, p.patch_torch_functions, p.keep_batchnorm_fp32, p.master_weights, p.loss_scale)
    assert seen == DEFAULTS[level]
    assert p.enabled is True and p.opt_level == level and list(p.options) == [
        "enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
        "loss_scale",
    ]  # fmt: skip


def test_positional_order() -> None:
    model = mlp()
    returned = amp.initialize(
        model, sgd(model), True, "O2", None, None, False, True, 64.0, torch.float16, 3, 0, 1.0, 2.0**10
    )
    assert returned[0] is model and returned[0][1].weight.dtype is HALF and model(batch()[0]).dtype is HALF
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [64.0] * 3
    assert _amp_state.loss_scalers[0]._min_loss_scale == 1.0 and _amp_state.loss_scalers[0]._max_loss_scale == 2.0**10
    assert _amp_state.verbosity == 0


def test_it_warns_every_time_and_names_its_category() -> None:
    for _ in range(2):
        with pytest.warns(FutureWarning) as caught:
            quiet(mlp(), enabled=False)
        assert caught[0].category is DeprecatedFeatureWarning and caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"opt_level": "02"}, RuntimeError, "Unexpected optimization level.*letter O, not the number zero"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": False}, RuntimeError, "keep_batchnorm_fp32=False has no place"),
        ({"opt_level": "O4", "master_weights": True}, RuntimeError, "master_weights=True has no place"),
        ({"opt_level": "O1", "cast_model_type": HALF}, RuntimeError, "remain FP32"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "opt_level='O1'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, AssertionError, "must be a boolean"),
        ({"opt_level": "O2", "loss_scale": "much"}, ValueError, "much"),
        ({"opt_level": "O2", "cast_model_type": "half"}, ValueError, "torch.float16"),
        ({"opt_level": "O1", "patch_torch_functions_type": FLOAT}, ValueError, "16-bit dtype of casts"),
    ],
)
def test_overrides_that_do_not_go_together(options: dict[str, Any], error: type[Exception], says: str) -> None:
    other = mlp()
    trained = quiet(other, sgd(other), opt_level="O1")[1]
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(error, match=says):
        quiet(model, optimizer, **options)
    assert model[0].weight.dtype is FLOAT and not hasattr(optimizer, "_amp_stash")
    with amp.scale_loss(torch.ones(()), trained) as scaled:  # what was begun before goes on as it was
        assert float(scaled) == 2.0**16
    quiet(model, optimizer, opt_level="O2")  # nothing stands in the way afterwards


def test_hard_override_prints_instead(capsys: pytest.CaptureFixture[str]) -> None:
    _amp_state.hard_override = True
    quiet(mlp(), opt_level="O1", keep_batchnorm_fp32=True)
    assert capsys.readouterr().out.startswith("Warning:  ")


@pytest.mark.parametrize(("given", "seen"), [("True", True), ("False", False), (True, True), (None, True)])
def test_options_as_argparse_gives_them(given: Any, seen: bool) -> None:
    model = quiet(mlp(), opt_level="O2", keep_batchnorm_fp32=given, master_weights=given)
    assert _amp_state.opt_properties.master_weights is seen
    assert (model[1].weight.dtype is FLOAT) == seen and (model[1].running_mean.dtype is FLOAT) == seen
    assert model[0].weight.dtype is HALF


def test_wrong_inputs() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="models must be either a single model or a list of models"):
        quiet((model, mlp()))
    with pytest.raises(TypeError, match="optimizers must be either a single optimizer or a list of optimizers"):
        quiet(model, (sgd(model),))
    with pytest.raises(TypeError):
        quiet(model, "adam")
    with pytest.raises(RuntimeError, match="bare instances"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet(model, FP16_Optimizer(sgd(mlp().half()), verbose=False))
    with pytest.raises(RuntimeError, match=r"instance of torch.nn.DataParallel.*AFTER"):
        quiet(nn.DataParallel(model))
    with pytest.raises(RuntimeError, match=r"Found param 0.weight with type torch.HalfTensor(.|\n)*\.half\(\)"):
        quiet(mlp().half())
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(2, dtype=HALF))
    with pytest.raises(RuntimeError, match="Found buffer table"):
        quiet(module)
    _amp_state.allow_incoming_model_not_fp32 = True
    quiet(mlp().half(), opt_level="O2")


def test_an_optimizer_goes_through_once() -> None:
    model = mlp()
    optimizer = sgd(model)
    quiet(model, optimizer, opt_level="O2")
    with pytest.raises(RuntimeError, match="should only be passed through"):
        quiet(mlp(), optimizer)
    with pytest.raises(RuntimeError, match="once"):
        fresh = sgd(mlp())
        quiet(mlp(), [fresh, fresh])
    assert not hasattr(fresh, "_amp_stash")
    with pytest.raises(RuntimeError, match="Found param"):
        quiet(model, opt_level="O2")


def test_a_private_name_that_is_taken() -> None:
    optimizer = sgd(mlp())
    optimizer._prepare_amp_backward = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="already has _prepare_amp_backward"):
        quiet(mlp(), optimizer)


def test_return_shapes_are_those_given() -> None:
    one, two = mlp(), mlp()
    a, b = sgd(one), sgd(two)
    models, optimizers = [one, two], [a, b]
    returned = quiet(models, optimizers, opt_level="O2")
    assert returned[0] is models and returned[1] is optimizers
    assert models[0] is one and models[1] is two and optimizers[0] is a
    lone = mlp()
    assert quiet(lone) is lone
    listed = [mlp()]
    assert quiet(listed) is listed
    model = mlp()
    assert quiet(model, []) == (model, [])
    optimizer = sgd(model)
    assert quiet([model], optimizer)[1] is optimizer
    assert quiet(model, enabled=False) is model
    assert quiet((1, 2), (3,), enabled=False) == ((1, 2), (3,))  # untouched, unchecked


def test_disabled_leaves_all_alone() -> None:
    model = mlp()
    optimizer = sgd(model)
    before = dict(vars(optimizer)), type(model)
    quiet(model, optimizer, enabled=False, opt_level="O2")
    assert (dict(vars(optimizer)), type(model)) == before
    loss = model(batch()[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    with pytest.raises(AttributeError):
        amp.state_dict()


def test_cudnn_has_to_be_on() -> None:
    with torch.backends.cudnn.flags(enabled=False), pytest.raises(RuntimeError, match="cudnn"):
        quiet(mlp())


class Everything(nn.Module):
    """Layers that are cast, and those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False)
        self.ln = nn.LayerNorm(4)
        self.rnn = nn.LSTM(4, 4)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return kwargs.get("result", args[0] if args else None)


def test_which_parts_are_cast() -> None:
    model = Everything()
    identity = {name: id(p) for name, p in model.named_parameters()}
    model.linear.weight.grad = torch.ones(4, 4)
    quiet(model, opt_level="O2")
    assert {name: id(p) for name, p in model.named_parameters()} == identity
    assert model.linear.weight.dtype is HALF and model.linear.weight.grad.dtype is HALF
    assert model.bn.weight.dtype is FLOAT and model.bn.running_var.dtype is FLOAT
    assert model.plain_bn.running_var.dtype is HALF and model.ln.weight.dtype is HALF  # type: ignore[union-attr]
    assert model.count.dtype is torch.int64
    model.rnn(torch.randn(2, 1, 4).half())  # its weights lie together again


@pytest.mark.parametrize("level", LEVELS)
def test_complex_parameters_stay_complex(level: str) -> None:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.tensor([1.0 + 2.0j]))  # type: ignore[assignment]
    quiet(model, sgd(model), opt_level=level)
    assert torch.equal(model.phase, torch.tensor([1.0 + 2.0j]))  # type: ignore[arg-type]


def test_what_the_casting_forward_takes_and_gives() -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, dtype: torch.dtype) -> Batch:
            return Batch(self.x.to(dtype))

    class Output(OrderedDict[str, Tensor]):
        @property
        def logits(self) -> Tensor:
            return self["logits"]

    Pair = namedtuple("Pair", "a b")
    model = quiet(Everything(), opt_level="O2")
    x, ints, array = torch.randn(2), torch.arange(2), np.zeros(2)
    result = Output(logits=torch.ones(1, dtype=HALF))
    returned = model(
        x, ints, "text", array, None, 3, [x], {"k": (x, ints)}, Pair(x, 1), Batch(x), x.double(), model.ln,
        extra=x, result=result,
    )  # fmt: skip
    args, kwargs = model.seen
    assert args[0].dtype is HALF and args[1] is ints and args[2] == "text" and args[3] is array and args[5] == 3
    assert args[6][0].dtype is HALF and args[7]["k"][0].dtype is HALF and args[7]["k"][1] is ints
    assert type(args[8]) is Pair and args[8].a.dtype is HALF and args[9].x.dtype is HALF and args[10].dtype is HALF
    assert args[11] is model.ln and kwargs["extra"].dtype is HALF
    assert type(returned) is Output and returned.logits.dtype is FLOAT


@pytest.mark.parametrize(("outputs", "expected"), [(None, FLOAT), (HALF, HALF)])
def test_cast_model_outputs(outputs: torch.dtype | None, expected: torch.dtype) -> None:
    for level in ("O0", "O2", "O3"):
        assert quiet(mlp(), opt_level=level, cast_model_outputs=outputs)(batch()[0]).dtype is expected
    model = quiet(mlp(), opt_level="O2", cast_model_type=False, cast_model_outputs=outputs)
    assert model(batch()[0]).dtype is expected and model[0].weight.dtype is FLOAT


def test_cast_model_type_false_at_any_level() -> None:
    for level in LEVELS:
        model = quiet(mlp(), opt_level=level, cast_model_type=False)
        assert model[0].weight.dtype is FLOAT and type(model) is nn.Sequential
        amp.close()


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_saved_models_are_whole(level: str) -> None:
    """A copy runs its own forward, a pickled model comes back casting, a replica of DataParallel is itself."""
    model = mlp()
    optimizer = sgd(model)
    quiet(model, optimizer, opt_level=level)
    train(model, optimizer, 3)
    model.eval()
    x = batch()[0]
    expected = model(x)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    replica = model._replicate_for_data_parallel()
    for other in (twin, read, replica):
        assert torch.equal(other(x), expected) and type(other).__name__ == "Sequential"
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(x), expected) and not torch.equal(twin(x), expected)
    assert isinstance(model, nn.Sequential) and [type(m) for m in twin] == [type(m) for m in mlp()]
    assert all(v.dtype is FLOAT for v in twin.state_dict().values() if v.is_floating_point())


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_validating_in_float32_and_going_on(level: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    quiet(model, optimizer, opt_level=level)
    train(model, optimizer, 2)
    low = next(model.parameters()).dtype
    model.float().eval()
    assert copy.deepcopy(model)(batch()[0]).dtype is FLOAT and model(batch()[0]).dtype is FLOAT
    model.to(low).train()
    model[1].float()
    assert all(map(np.isfinite, train(model, optimizer, 2)))


def test_a_copy_is_made_of_what_the_model_gives_to_be_copied() -> None:
    """A lock, say, is left out by `__getstate__`."""
    model = HoldsLock()
    quiet(model, opt_level="O2")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.lock is not model.lock and twin(torch.ones(1, 2)).dtype is FLOAT


class HoldsLock(nn.Linear):
    """What cannot be pickled with all of its attributes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_a_forward_that_somebody_replaced_on_the_instance() -> None:
    model = nn.Linear(2, 2)
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    quiet(model, opt_level="O2")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    amp.close()
    assert type(model) is nn.Linear and torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_state_dict_is_float32_and_loads_anywhere(level: str) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 1}

    model = nn.Sequential(Extra(6, 6), nn.BatchNorm1d(6))
    quiet(model, opt_level=level)
    saved = model.state_dict()
    assert saved["0._extra_state"] == {"version": 1}
    assert {v.dtype for k, v in saved.items() if "extra" not in k} == {FLOAT, torch.int64}
    assert all(v.dtype is FLOAT for v in model[0].state_dict().values() if isinstance(v, Tensor))
    plain = nn.Sequential(Extra(6, 6), nn.BatchNorm1d(6))
    plain.load_state_dict(saved)
    model.load_state_dict(saved)
    assert next(model.parameters()).dtype is not FLOAT


def test_unusual_optimizers_are_taken() -> None:
    model = mlp()
    larc = LARC(sgd(model, momentum=0.9))
    assert quiet(model, larc, opt_level="O2")[1] is larc
    assert train(model, larc, 5)[-1] < 10
    assert all(p.dtype is FLOAT for p in amp.master_params(larc))


def test_wrapped_models_with_distributed_said(tmp_path: Any) -> None:
    """As a tutorial has it: DDP first, then initialize(..., distributed=True). Sound at O1: no parameter changes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            quiet(model, opt_level="O1")
        optimizer = sgd(model)
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            quiet(model, optimizer, opt_level="O2", distributed=True)
        model, optimizer = quiet(model, optimizer, opt_level="O1", distributed=True)
        train(model, optimizer, 2)
        # Before the group: the last to let go of it waits for gloo's thread, and torch's reducer does so with the GIL.
        del model, optimizer
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_model_in_apexs_own_wrapper_trains_with_a_warning(tmp_path: Any, level: str) -> None:
    """Apex meant to refuse it and never did; a toolkit that resumes relies on that."""

    def losses(wrap: bool) -> list[float]:
        model = DistributedDataParallel(mlp()) if wrap else mlp()
        optimizer = sgd(model)
        with pytest.warns(PreampWarning, match="AFTER") if wrap else nullcontext():
            model, optimizer = quiet(model, optimizer, opt_level=level)
        found = train(model, optimizer, 3)
        amp.close()
        return found

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert losses(True) == losses(False)
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()


def test_close_takes_everything_back() -> None:
    model = mlp()
    optimizer = sgd(model)
    before = dict(vars(optimizer))
    quiet(model, optimizer, opt_level="O0")
    train(model, optimizer, 2)
    amp.close()
    assert type(model) is nn.Sequential and "_amp_casts" not in vars(model)
    after = dict(vars(optimizer))
    after.pop("_opt_called", None)
    assert after.keys() == before.keys()
    with pytest.raises(RuntimeError, match="has not been initialized"), amp.scale_loss(torch.zeros(()), optimizer):
        pass
    quiet(model, optimizer, opt_level="O2")  # and again
    train(model, optimizer, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("whole", [True, False], ids=["as a whole", "in part"])
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 4))])
def test_compiled_models_are_one_clear_error_where_the_forward_casts(compiled: Any, whole: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = compiled(inner) if whole else nn.Sequential(compiled(inner), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for level in ("O0", "O2", "O3", "O5"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="all was compiled" if whole else "the part '0' was compiled"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert not hasattr(optimizer, "_amp_stash")
    for level in ("O1", "O4"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        scaled_backward(model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
        amp.close()
    assert all(before[name].dtype is value.dtype for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["O0", "O1", "O2", "O4", "O5", "FP16_Optimizer"])  # O3's states have 16 bits
def test_what_is_frozen_at_first_trains_as_the_others_once_it_is_not(how: str) -> None:
    """Stage by stage: the last layers first. Under a scale of 1024 a scaled gradient would be seen at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[:2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    if how == "FP16_Optimizer":
        model[0].bfloat16(), model[3].bfloat16()
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=1024.0, verbose=False)
    else:
        model, optimizer = quiet(model, optimizer, opt_level=how, loss_scale=1024.0)
    reference = torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-3)
    for step in range(8):
        if step == 3:
            for each in (model, plain):
                each[:2].requires_grad_(True)
        x, y = batch(step)
        optimizer.zero_grad(), reference.zero_grad()
        if how == "FP16_Optimizer":
            hidden = model[2](model[1](model[0](x.bfloat16()).float()))
            optimizer.backward(nn.functional.cross_entropy(model[3](hidden.bfloat16()).float(), y))
        else:
            scaled_backward(nn.functional.cross_entropy(model(x), y), optimizer)
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step(), reference.step()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.float() - wanted).norm() <= 0.02 * wanted.norm() + 0.01
