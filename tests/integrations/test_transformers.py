"""HF Trainer under `attach`: as a plain loop with a session, bit for bit, and in runs that do not go straight."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from preamp.errors import PolicyError, SessionError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from preamp.integrations.transformers import attach  # noqa: E402

from .conftest import forget_accelerate  # noqa: E402
from .loops import CASES as EVERY_CASE  # noqa: E402
from .loops import CLIP, MAKERS, MICRO, STEPS, data, network, plain, schedule_of  # noqa: E402

CASES = [case for case in EVERY_CASE if case[0] != "O3"]  # where the model's own loss reads 16-bit labels
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x).float()
        return {"loss": nn.functional.mse_loss(out, labels.float()), "logits": out}


def rows() -> list[dict[str, Tensor]]:
    return [{"x": one, "labels": other} for x, y in data() for one, other in zip(x, y, strict=True)]


class Stream(IterableDataset[Any]):
    """The rows in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def trainer_of(model: nn.Module, kind: str, folder: Path, given: Any, steps: int = STEPS, **more: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=MICRO,
        max_grad_norm=CLIP, logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, **{"save_strategy": "no", **more},
    )  # fmt: skip
    optimizer = MAKERS[kind](model.parameters())
    schedule = schedule_of(optimizer)
    return Trainer(
        model, arguments, train_dataset=given, eval_dataset=sentences()[:16], optimizers=(optimizer, schedule)
    )


class Rates(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """The learning rate after each step, and the session's state at the end."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.state: dict[str, Any] = {}
        self.attached: Any = None

    def on_step_end(self, _: Any, state: Any, control: Any, optimizer: Any = None, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.state = copy.deepcopy(self.attached.session.state_dict())


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_its_loop_is_a_session_loop(level: str, kind: str, tmp_path: Path) -> None:
    model, seen = Network(), Rates()
    trainer = trainer_of(model, kind, tmp_path, Stream())
    trainer.add_callback(seen)
    seen.attached = attach(trainer, level)
    trainer.train()
    state, parameters, rates, _ = plain(level, kind, low=("O2", "O5"))
    named = zip(model.net.named_parameters(), parameters, strict=True)
    assert all(torch.equal(mine, state["masters"].get(name, its)) for (name, mine), its in named)
    masters = {name.removeprefix("net."): value for name, value in seen.state["masters"].items()}
    torch.testing.assert_close(masters, state["masters"], rtol=0, atol=0)
    assert {**seen.state, "masters": 0} == {**state, "masters": 0} and seen.rates == rates
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logged] == [0] + [1] * 5
    assert all(entry["loss_scale"] > 0 for entry in logged)
    assert "forward" not in vars(model) and {p.dtype for p in model.parameters()} == {torch.float32}


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": torch.randint(50, (12,), generator=generator), "labels": torch.tensor(i % 2)} for i in range(240)
    ]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_bert_resumes_bit_for_bit_and_is_saved_in_float32(level: str, tmp_path: Path) -> None:
    def trained(folder: Path, resume: Path | None) -> Any:
        forget_accelerate()
        trainer = trainer_of(bert(), "preamp", folder, sentences(), 12, save_strategy="steps", save_steps=4)
        attach(trainer, level)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = trained(tmp_path / "whole", None)
    resumed = trained(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-4")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.state.log_history[-2]["loss"] == resumed.state.log_history[-2]["loss"]
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "whole" / "checkpoint-12", dtype="auto")
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), whole.model.parameters(), strict=True))
    whole.evaluate(sentences()[:8])  # prepares a loader, and no session
    assert "forward" not in vars(whole.model) and whole.accelerator.scaler is None
    whole.save_model(str(tmp_path / "final"))
    final = BertForSequenceClassification.from_pretrained(tmp_path / "final", dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(final.parameters(), whole.model.parameters(), strict=True))
    again = whole.train()  # a second training makes a second session
    assert again.global_step == 12


def test_what_it_refuses(tmp_path: Path) -> None:
    trainer = trainer_of(Network(), "preamp", tmp_path, Stream())
    with pytest.raises(PolicyError, match="there is no level 'bf16'"):
        attach(trainer, "bf16")
    with pytest.raises(SessionError, match="release_gradients=True does not go with a Trainer"):
        attach(trainer, "O5", release_gradients=True)
    attach(trainer, "Auto")
    with pytest.raises(SessionError, match=r"a second time.*trainer\.train\(\)"):
        attach(trainer, "Auto")
    with pytest.raises(SessionError, match="takes a Trainer; this is"):
        attach(nn.Linear(2, 2), "O5")
    low = trainer_of(Network(), "preamp", tmp_path, Stream(), bf16=True)
    with pytest.raises(SessionError, match=r"TrainingArguments\(bf16=True\) casts by itself"):
        attach(low, "O5")
    rounded = trainer_of(bert().bfloat16(), "preamp", tmp_path, sentences(), 8)
    attach(rounded, "O5")
    with pytest.raises(PolicyError, match=r"is bf16 and .* with from_pretrained\(..., dtype=torch.float32\)"):
        rounded.train()


# -- runs that are interrupted, tried again, searched, loaded, on two ranks


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
