"""Plans, tables of addresses, and what may be walked together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preamp.kernels.lists import TensorList, chained, count_writes, split_by_walk, walk_of
from preamp.kernels.triton.tables import chunks_of, parts_of

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(0, 50), max_size=8), chunk=st.sampled_from([1, 4, 16, 64]))
def test_a_plan_covers_every_element_once(sizes: list[int], chunk: int) -> None:
    chunks = chunks_of(tuple(sizes), chunk, CPU)
    seen = [
        (int(tensor), int(block) * chunk + k)
        for tensor, block in zip(chunks.tensor_of, chunks.block_of, strict=True)
        for k in range(chunk)
        if int(block) * chunk + k < sizes[int(tensor)]
    ]
    assert sorted(seen) == [(i, k) for i, size in enumerate(sizes) for k in range(size)]
    assert chunks.count == len(chunks.tensor_of) == int(chunks.first[-1])
    for i in range(len(sizes)):
        assert chunks.tensor_of[chunks.first[i] : chunks.first[i + 1]].eq(i).all()
    assert chunks_of(tuple(sizes), chunk, CPU) is chunks


def test_parts_hold_addresses_and_positions() -> None:
    flat = torch.zeros(100)
    tensors = [torch.zeros(0), torch.zeros(5), flat[1:40], torch.zeros(3000)]
    states = [torch.zeros_like(t) for t in tensors]
    aligned, odd = parts_of([tensors, states], 1024)
    assert aligned.aligned and not odd.aligned
    assert aligned.table.tolist() == [
        [tensors[1].data_ptr(), tensors[3].data_ptr()], [states[1].data_ptr(), states[3].data_ptr()], [1, 3],
    ]  # fmt: skip
    assert odd.table.tolist() == [[tensors[2].data_ptr()], [states[2].data_ptr()], [2]]
    assert parts_of([tensors, states], 1024) == (aligned, odd)
    moved = [*states[:3], torch.zeros(3000)]
    assert parts_of([tensors, moved], 1024)[0] is not aligned
    assert parts_of([tensors, states], 1024, [9, 8, 7, 6])[0].table[2].tolist() == [8, 6]
    assert parts_of([[torch.zeros(0)]], 1024) == ()


def test_walks() -> None:
    plain = torch.zeros(4, 3, 5, 5)
    last = plain.to(memory_format=torch.channels_last)
    assert walk_of(plain) == walk_of(torch.zeros(())) == walk_of(torch.zeros(0, 3)) == ()
    assert walk_of(last) == walk_of(torch.ones_like(last)) == (75, 1, 15, 3)
    assert walk_of(torch.zeros(3, 4).t()) == (1, 4) and walk_of(torch.zeros(5, 1, 7).transpose(0, 2)) == (1, 7)
    assert walk_of(torch.zeros(4, 6)[:, ::2]) is None and walk_of(torch.zeros(3, 1).expand(3, 4)) is None
    one = torch.zeros(4, 3, 1, 1)
    assert walk_of(one) == walk_of(one.to(memory_format=torch.channels_last)) == ()
    cut = plain[:, :2]
    assert split_by_walk([TensorList([last, one]).walks] * 2) == ([0, 1], [])
    assert split_by_walk([TensorList([plain, one, cut]).walks, TensorList([last, one, cut]).walks]) == ([1], [0, 2])


RUNS = """
import sys, torch
from preamp.kernels import triton_runs_on
import preamp.kernels
before = "triton" in sys.modules
print(triton_runs_on(torch.device("cpu")), triton_runs_on(torch.device("cuda")), before, "triton" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "False True False True"),
        ({"TRITON_INTERPRET": "1"}, "True True False True"),
        ({"TRITON_INTERPRET": "1", "PREAMP_NO_TRITON": "1"}, "False False False False"),
    ],
)
def test_where_triton_runs(variables: dict[str, str], said: str) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PREAMP_NO_TRITON")}
    environment |= variables
    without = "import sys; sys.modules['triton'] = None\n" + RUNS.replace("before =", "before = False and")
    for code, wanted in ((RUNS, said.split()), (without, ["False", "False"])):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split()[: len(wanted)] == wanted


def test_lists_one_behind_the_other_know_what_these_know() -> None:
    lists = [TensorList([torch.zeros(2), torch.zeros(3)]), TensorList([torch.zeros(5, dtype=torch.bfloat16)])]
    both = chained(lists)
    assert chained(lists[:1]) is lists[0]
    plain = TensorList(both)
    for what in ("addresses", "sizes", "dtypes", "strided", "contiguous", "together"):
        assert getattr(both, what) == getattr(plain, what), what


def test_of_many_tables_those_of_long_ago_go() -> None:
    tensors = [[torch.zeros(8)] for _ in range(40)]
    first = parts_of([tensors[0]], 4)
    for other in tensors[1:]:
        assert parts_of([tensors[0]], 4) is first, "it is in use"
        kept = parts_of([other], 4)
        assert parts_of([other], 4) is kept
    assert parts_of([tensors[1]], 4) is not kept


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_lists_with_sparse_tensors_are_not_dense(layout: torch.layout) -> None:
    for lists in (
        [[torch.eye(3).to_sparse(layout=layout), torch.zeros(2)]],
        [[torch.zeros(2)], [torch.eye(3).to_sparse(layout=layout)]],
    ):
        found = chained(lists)
        assert not found.strided and not found.contiguous


def test_writes_are_counted_in_the_name_of_the_owners() -> None:
    held, owner = torch.zeros(2), torch.zeros(2)
    count_writes([held])
    assert (held._version, owner._version) == (1, 0)
    kept = TensorList([held])
    kept.owners = [owner]
    count_writes(kept)
    assert (held._version, owner._version) == (1, 1)
