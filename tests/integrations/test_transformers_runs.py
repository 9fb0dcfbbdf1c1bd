"""Runs of HF Trainer that do not go straight: interrupted, tried again, searched, loaded, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preamp.errors import SessionError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

from preamp.integrations.transformers import attach  # noqa: E402

from .conftest import forget_accelerate  # noqa: E402
from .test_transformers import bert, sentences, trainer_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class At(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Raises after a step, once; and notes the types of parameters during training, and when it ends."""

    def __init__(self, step: int = -1, error: type[BaseException] = RuntimeError) -> None:
        self.step, self.error = step, error
        self.seen: list[set[torch.dtype]] = []
        self.ended: set[torch.dtype] = set()

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
        self.seen.append({p.dtype for p in model.parameters()})
        if state.global_step == self.step:
            self.step = -1
            raise self.error("CUDA out of memory.")

    def on_train_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.ended = {p.dtype for p in model.parameters()}


def of(folder: Path, at: At, level: str = "O5", **more: Any) -> Any:
    trainer = trainer_of(bert(), "preamp", folder, sentences(), 8, **more)
    trainer.add_callback(at)
    attach(trainer, level)
    return trainer


def assert_as_before(trainer: Any) -> None:
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32} and "forward" not in vars(trainer.model)
    assert trainer.accelerator.scaler is None and type(trainer.optimizer) is AcceleratedOptimizer


ROOT = Path(__file__).resolve().parents[2]
LOW = {torch.float32, torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_training_closes_and_can_go_on(error: type[BaseException], tmp_path: Path) -> None:
    at = At(3, error)
    trainer = of(tmp_path, at)
    with pytest.raises(error):
        trainer.train()
    assert_as_before(trainer)
    trainer.train()
    assert_as_before(trainer)
    assert at.seen == [LOW] * 11 and at.ended == {torch.float32}


@pytest.mark.slow
def test_a_batch_that_was_too_large_is_tried_again_with_a_session(tmp_path: Path) -> None:
    at = At(3)
    trainer = of(tmp_path, at, auto_find_batch_size=True)
    trainer.train()
    assert at.seen == [LOW] * 11 and trainer._train_batch_size < 4
    assert_as_before(trainer)


def test_the_best_weights_are_loaded_in_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = of(
        tmp_path, At(), **saving, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True
    )
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert {value.dtype for value in best.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in best.values())
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in best.items())


def test_a_trial_of_a_search_has_a_session_though_its_accelerator_is_new(tmp_path: Path) -> None:
    at = At()
    trainer = of(tmp_path, at)
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert at.seen == [LOW] * 8
    assert_as_before(trainer)


def test_evaluation_before_training_is_no_reason_to_refuse(tmp_path: Path) -> None:
    trainer = trainer_of(bert(), "preamp", tmp_path, sentences(), 8)
    trainer.evaluate(sentences()[:8])
    attach(trainer, "O5")
    trainer.train()
    assert_as_before(trainer)
    with pytest.raises(SessionError, match="call it before"):
        attach(trainer, "O5")


@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_in_backward_are_refused(name: str, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to=[])
    with pytest.raises(SessionError, match="steps parameters during backward"):
        attach(transformers.Trainer(nn.Linear(2, 2), arguments), "O5")


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(bert(), "preamp", tmp_path, sentences())
    trainer.args._n_gpu = 2
    with pytest.raises(SessionError, match="start it with torchrun"):
        attach(trainer, "O5")


TWO = """
import contextlib, copy, sys, torch
from pathlib import Path
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
import preamp
from preamp.integrations.transformers import attach
from tests.integrations import loops
from tests.integrations.test_transformers import Network, rows, trainer_of
from torch.utils.data import IterableDataset

level, folder, steps = sys.argv[1], Path(sys.argv[2]), 16

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows() * 2)

def trained(resume=None):
    model = Network()
    trainer = trainer_of(model, "preamp", folder, Stream(), steps, save_strategy="steps", save_steps=8,
                         ddp_backend="gloo", accelerator_config={"dispatch_batches": False})
    attached, kept = attach(trainer, level), {}
    class Keep(TrainerCallback):
        def on_step_end(self, *_, **__):
            kept.update(copy.deepcopy(attached.session.state_dict()))
    trainer.add_callback(Keep())
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.model_wrapped) is DistributedDataParallel
    return [p.detach().clone() for p in model.parameters()], kept

whole, state = trained()
resumed, _ = trained(str(folder / "checkpoint-8"))
model = Network()
optimizer = loops.MAKERS["preamp"](model.parameters())
schedule, wrapped = loops.schedule_of(optimizer), DistributedDataParallel(model)
data = rows() * 2
with preamp.prepare(wrapped, optimizer, level=level) as session:
    for step in range(steps):
        for part in range(loops.MICRO):
            last = part == loops.MICRO - 1
            begin = ((step * loops.MICRO + part) * 2 + dist.get_rank()) * 4
            batch = {key: torch.stack([row[key] for row in data[begin : begin + 4]]) for key in ("x", "labels")}
            with contextlib.nullcontext() if last else session.no_sync():
                with session.autocast():
                    loss = wrapped(**batch)["loss"]
                session.backward(loss.float() / loops.MICRO, sync=last)
        session.unscale_()
        torch.nn.utils.clip_grad_norm_(model.parameters(), loops.CLIP)
        if not session.step().skipped:
            schedule.step()
        session.zero_grad()
    wanted = copy.deepcopy(session.state_dict())
assert wanted["skipped"] == state["skipped"] == 1, (wanted["skipped"], state["skipped"])
assert wanted["losses"] == state["losses"] and wanted["steps"] == state["steps"] == steps
torch.testing.assert_close(whole, [p.detach() for p in model.parameters()], rtol=0, atol=0)
torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_two_ranks_are_a_plain_loop_with_a_session(level: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(script), level, str(tmp_path / "out")], capture_output=True, text=True, env=environment,
        timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    forget_accelerate()
