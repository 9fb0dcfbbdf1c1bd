"""Plain `torch.autocast` is torch's, bit for bit, before, beside and after sessions: forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.autocast import MARKER, REGISTRY

KEY = "AutocastCPU"


# what torch says when a reentrant checkpoint runs inside another's forward pass
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    REGISTRY.uninstall()
    torch._dynamo.reset()
    yield
    REGISTRY.uninstall()


def kernels() -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))


class Block(nn.Module):
    """Operators for which torch's rules on a CPU are not preamp's: norms, softmax, exp, powers, sums, losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.groups = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.norm(self.first(x))
        a = torch.softmax(a @ a.T, -1) @ a
        a = self.groups(a.exp().clamp(max=9)) * a.pow(2).sum(-1, keepdim=True).rsqrt()
        logs = torch.log_softmax(self.last(a), -1)
        return F.cross_entropy(self.last(a), y) + F.nll_loss(logs, y) + a.norm() + a.cumsum(0).mean()


class Exponential(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        e = x.exp()  # in 16 bits by torch's rules, in float32 by preamp's
        return gradient.to(e.dtype) * e


Loss = Callable[[Block, Tensor, Tensor], Tensor]
Region = Callable[[], Any]


def plain_region() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def simple(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    with region():
        loss: Tensor = block(x, y)
    loss.backward()
    return loss


def backward_in_the_region(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    with region():
        loss: Tensor = block(x, y)
        loss.backward()
    return loss


def penalty(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    with region():
        loss = block(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
    loss.backward()
    return loss


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def run(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
        with region():
            loss: Tensor = checkpoint(block, x, y, use_reentrant=reentrant)
        loss.backward()
        return loss

    return run


def nested(reentrant: bool) -> Callable[..., Tensor]:
    def run(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            hidden = torch.softmax(block.first(x), -1) + x
            return checkpoint(block, hidden, y, use_reentrant=reentrant)  # type: ignore[no-any-return]

        with region():
            loss: Tensor = checkpoint(outer, x, use_reentrant=reentrant)
        loss.backward()
        return loss

    return run


def custom_function(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    with region():
        loss: Tensor = Exponential.apply(block.first(x)).sum() + block(x, y)
    loss.backward()
    return loss


def hooked(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    def hook(module: nn.Module, given: Any, gradients: Any) -> Any:
        with plain_region():
            return tuple(None if g is None else g.bfloat16().softmax(-1).float() + g for g in given)

    block.first.register_full_backward_hook(hook)
    return simple(region, block, x, y)


def compiled(region: Region, block: Block, x: Tensor, y: Tensor) -> Tensor:
    def in_region(x: Tensor, y: Tensor) -> Tensor:
        with region():
            return block(x, y)  # type: ignore[no-any-return]

    loss: Tensor = torch.compile(in_region, backend="aot_eager")(x, y)
    loss.backward()
    return loss


CASES: dict[str, Callable[[Region, Block, Tensor, Tensor], Tensor]] = {
    "simple": simple, "backward in the region": backward_in_the_region, "penalty": penalty,
    "checkpoint": checkpointed(False), "reentrant checkpoint": checkpointed(True),
    "nested checkpoints": nested(False), "nested reentrant checkpoints": nested(True),
    "custom function": custom_function, "backward hook": hooked,
    "compiled": compiled,
}  # fmt: skip


def bits(name: str, region: Region = plain_region) -> list[Tensor]:
    torch.manual_seed(2)
    torch._dynamo.reset()
    block, x, y = Block(), torch.randn(6, 16, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    loss = CASES[name](region, block, x, y)
    found = [loss.detach(), *(p.grad for p in block.parameters()), x.grad]
    return [t for t in found if t is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained(level: str) -> preamp.Session:
    """A session that has entered its region, taken steps and recomputed."""
    block = Block()
    session = preamp.prepare(block, torch.optim.SGD(block.parameters(), 0.01), level=level, scale=2.0)
    for _ in range(2):
        x, y = torch.randn(6, 16, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
        with session.autocast():
            loss = checkpoint(block, x, y, use_reentrant=False)
        session.backward(loss)
        session.step()
        session.zero_grad()
    return session


@pytest.mark.parametrize("name", CASES)
def test_before_beside_and_after_a_session(name: str) -> None:
    before = bits(name)
    with trained("O4") as session:
        assert same(bits(name), before), "beside an open session"
        other = Block()
        x, y = torch.randn(6, 16), torch.tensor([0, 1, 2, 3, 4, 0])
        with session.autocast():
            low = other(x, y)
        assert same(bits(name), before), "with a graph of a session's region waiting for its backward"
        low.backward()
    assert same(bits(name), before), "after it"
    with preamp.autocast("cpu", torch.bfloat16):
        torch.ones(2).exp()
    assert same(bits(name), before), "after a region of preamp's, whose rules stay"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "hook" not in name])
def test_preamps_own_regions_recompute_by_preamps_rules(name: str) -> None:
    """Beside plain ones, and other than those: each recomputation follows the region of its forward pass."""

    def region() -> preamp.autocast:
        return preamp.autocast("cpu", torch.bfloat16)

    alone, plain = bits(name, region), bits(name)
    assert not same(alone, plain)
    with trained("O4"):
        assert same(bits(name, region), alone)
    if "checkpoint" in name:
        assert "nested" in name or same(alone, bits("simple", region)), "a checkpoint changes no bit"


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_region_in_one_backward_pass(reentrant: bool) -> None:
    y = torch.tensor([0, 1, 2, 3, 4, 0])

    def grads(together: bool) -> list[Tensor]:
        torch.manual_seed(2)
        ours, torchs = Block(), Block()
        x, z = torch.randn(6, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
        with preamp.autocast("cpu", torch.bfloat16):
            one = checkpoint(ours, x, y, use_reentrant=reentrant)
        with plain_region():
            two = checkpoint(torchs, z, y, use_reentrant=reentrant)
        if together:
            (one + two).backward()
        else:
            one.backward()
            two.backward()
        return [p.grad for p in (*ours.parameters(), *torchs.parameters()) if p.grad is not None]

    assert same(grads(True), grads(False))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_close_leaves_nothing_behind(level: str) -> None:
    before, tag = kernels(), torch.compiler.config.cache_key_tag
    state = torch.is_autocast_enabled(MARKER), torch.get_autocast_dtype(MARKER), torch.is_autocast_cache_enabled()
    trained(level).close()
    assert kernels() == before and torch.compiler.config.cache_key_tag == tag
    assert state == (torch.is_autocast_enabled(MARKER), torch.get_autocast_dtype(MARKER), True)


def test_a_session_that_is_lost_holds_no_rules() -> None:
    import gc

    before = kernels()
    trained("O4")
    gc.collect()
    assert kernels() == before
    REGISTRY.uninstall()


def test_the_users_own_tag_of_the_compile_cache_stays() -> None:
    session = trained("O4")
    torch.compiler.config.cache_key_tag = "mine" + torch.compiler.config.cache_key_tag
    session.close()
    assert torch.compiler.config.cache_key_tag == "mine"
    torch.compiler.config.cache_key_tag = ""


def test_a_region_of_ones_own_outlives_a_session() -> None:
    """Its graph may still wait for its backward when the session closes."""
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    expected = bits("reentrant checkpoint", lambda: preamp.autocast("cpu", torch.bfloat16))
    preamp.autocast.uninstall()
    session = trained("O4")
    torch.manual_seed(2)
    block, x = Block(), torch.randn(6, 16, requires_grad=True)
    with preamp.autocast("cpu", torch.bfloat16):
        loss = checkpoint(block, x, y, use_reentrant=True)
    session.close()
    loss.backward()
    assert same([loss.detach(), *(p.grad for p in block.parameters()), x.grad], expected)  # type: ignore[list-item]
