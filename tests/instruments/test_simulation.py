"""`benchmarks.simulation`: SASS is read and carried out, and the processor takes the time that one can tell by hand."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.simulation import processor
from benchmarks.simulation.block import Event
from benchmarks.simulation.processor import LAUNCH, Device, simulate
from benchmarks.simulation.sass import Instruction, read_sass

SNIPPET = """
\t\tFunction : adam
        /*0030*/                   LDG.E R2, desc[UR8][R2.64] ;                          /* 0x0000000802027981 */
                                                                                         /* 0x002ea4000c1e1900 */
        /*0040*/                   FSETP.GT.AND P0, PT, R2, RZ, PT ;                     /* 0x000000ff0200720b */
                                                                                         /* 0x004fda0003f04000 */
        /*0050*/              @!P0 EXIT ;                                                /* 0x000000000000894d */
                                                                                         /* 0x001fea0003800000 */
        /*2ae0*/                   BRA 0x2ae0;                                           /* 0xfffffffc00fc7947 */
                                                                                         /* 0x000fc0000383ffff */
"""


def test_instructions_are_read_with_their_control_bits() -> None:
    assert list(read_sass(SNIPPET).values()) == [
        Instruction(0x30, "", "LDG.E", ("R2", "desc[UR8][R2.64]"), 2, write=2, read=None, waits=(1,)),
        Instruction(0x40, "", "FSETP.GT.AND", ("P0", "PT", "R2", "RZ", "PT"), 13, write=None, read=None, waits=(2,)),
        Instruction(0x50, "!P0", "EXIT", (), 5, write=None, read=None, waits=(0,)),
        Instruction(0x2AE0, "", "BRA", ("0x2ae0",), 0, write=None, read=None, waits=()),
    ]


FAST = Device("one", 1e3, processors=1, clock=1.0)
"""A thousand bytes a cycle: memory is not what one waits for."""


@pytest.fixture(autouse=True)
def latencies_do_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "SPREAD", 0.0)


def step(name: str, stall: int = 1, write: int | None = None, waits: tuple[int, ...] = (), moved: int = 0) -> Event:
    return Event(Instruction(0, "", name, (), stall, write, None, waits), True, "row 0" if moved else "", moved)


LOADS = [step("LDG.E.128", write=0, moved=512)] * 8
END = [step("EXIT", waits=(0,))]


def test_independent_loads_attain_the_bandwidth() -> None:
    device = Device("one", 16.0, processors=1, clock=1.0)
    result = simulate([LOADS + END] * 8, 8, device, 700)
    assert result.moved == 8 * 8 * 512
    assert result.moved / result.cycles == pytest.approx(device.share, rel=0.02)


@pytest.mark.parametrize("latency", [650, 850])
def test_a_chain_of_loads_takes_its_latencies(latency: int) -> None:
    chain = [step("LDG.E", write=0, waits=(0,), moved=128)] * 5
    result = simulate([chain + END], 1, FAST, latency, rounds=10)
    assert result.cycles == pytest.approx(5 * latency + LAUNCH, abs=10)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["Adam: float32 masters, float16", "Adam: float32", "reading float16 gradients"])
def test_a_kernel_leaves_in_memory_what_it_should(part: str) -> None:
    """From Python to the ratio of bandwidths; that the numbers are right shows that the code was understood."""
    pytest.importorskip("triton")
    from benchmarks.simulation.__main__ import row_of
    from benchmarks.simulation.kernels import CASES, SCALARS, before, make

    case = next(case for case in CASES if case.name.startswith(part))
    _, memory = make(case)
    rows = [before(case, row).astype(np.float64) for row in range(len(case.rows))]
    if case.kernel.__name__ == "read_kernel":
        (values,) = rows
        assert memory.values("squares", np.float64)[0] == pytest.approx(np.sum(values**2), rel=1e-5)
        assert memory.values("tops", np.float32)[0] == values.max()
    else:
        param, grad, first, second = rows[:4]
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        param = SCALARS[4] * param - SCALARS[2] * first / (np.sqrt(second) * SCALARS[3] + 1e-8)
        for row, wanted in enumerate((param, None, first, second)):
            if wanted is not None:
                np.testing.assert_allclose(memory.values(f"row {row}", np.float32), wanted, rtol=1e-5)
        if len(rows) == 5:
            np.testing.assert_allclose(memory.values("row 4", np.float16), param, rtol=1e-3)
    shares = [share for each in row_of(case)["attained"].values() for share in each]
    assert all(0 < share < 1.02 for share in shares)
