"""The tool that counts what a weight sync moves."""

from __future__ import annotations

import re

import pytest
from forks import run_python
from ranks import REPOSITORY, run_ranks

TOOL = REPOSITORY / "tools" / "bench_weight_sync.py"


def test_bytes_are_those_of_the_model_on_every_rank() -> None:
    output = run_ranks(TOOL, 2, ["experiment=tiny_sglang", "layout=ep2"])[0]
    handed_out = {
        line.split(" bytes handed out")[0].split()[-1] for line in output.splitlines() if "handed out" in line
    }
    # 26 tokens; attention 96 -> (4 + 2 * 2 + 4) * 24 with two norms of 24; a router and 4 experts of 3 x 96 x 64
    layer = 96 * 24 * (4 + 2 + 2 + 4) + 2 * 24 + 2 * 96 + 4 * 96 + 4 * 3 * 96 * 64
    assert handed_out == {f"{4 * (2 * 26 * 96 + 2 * layer + 96):,}"}
    # Of the experts half are elsewhere.
    assert output.count(f" {4 * 2 * 2 * 3 * 96 * 64:,} received") == 6, "three syncs of two ranks"


@pytest.mark.long
def test_ranks_that_share_an_engine_are_handed_their_own_experts() -> None:
    engine = ["rollout.sglang.tp=2", "+rollout.sglang.arguments.ep_size=2"]
    output = run_ranks(TOOL, 2, ["experiment=tiny_sglang", "layout=ep2", *engine])[0]
    layer = 96 * 24 * (4 + 2 + 2 + 4) + 2 * 24 + 2 * 96 + 4 * 96 + 2 * 3 * 96 * 64
    assert output.count(f" {4 * (2 * 26 * 96 + 2 * layer + 96):,} bytes handed out, 0 received") == 6


@pytest.mark.long
def test_the_plan_counts_671_billion_parameters() -> None:
    done = run_python(TOOL, "--plan")
    assert "671.0B parameters" in done.stdout
    in_fp8 = float(re.search(r"in fp8 with scales ([\d,.]+) GiB", done.stdout)[1].replace(",", ""))
    assert 625 < in_fp8 < 640, "671 GB, all but 1 % in 8 bits, is 625 GiB"
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(row[0]) for row in rows] == [1, 8, 16, 32, 64]
    assert rows[0][1] == rows[0][3]
    assert rows[-1][1] == rows[0][1]
    experts = 58 * 256 * 3 * 7168 * 2048 * 2 / 2**30  # GiB: layers, experts, matrices of 7168 x 2048, bytes
    for row in rows:
        ranks, everything, own = (float(row[column].replace(",", "")) for column in (0, 1, 3))
        assert own == pytest.approx(everything - experts * (1 - 1 / ranks), abs=0.1)
