"""Every GPU is measured with partners that have others too, so that a slow link is known by the node that has it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from forks import Program, free_port, start, wait_for
from limits import limit

from grpo_mega.forecast.doctor import links, preflight


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 63, 64])
def test_whoever_meets_me_i_meet_and_nobody_twice(nodes):
    met: dict[int, list[int]] = {node: [] for node in range(nodes)}
    for turn in range(nodes - 1 + nodes % 2):
        for node in range(nodes):
            other = links.partner(node, nodes, turn)
            if other is not None:
                assert links.partner(other, nodes, turn) == node
                met[node].append(other)
    assert all(sorted(others) == [other for other in range(nodes) if other != node] for node, others in met.items())


def test_three_nodes_of_two_processes_are_measured_and_the_slow_one_is_named(tmp_path):
    (tmp_path / "token").write_text("12\n")
    common = os.environ | {"WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    where = [{"RANK": str(n), "LOCAL_RANK": str(n % 2), "SLURMD_NODENAME": "abc"[n // 2]} for n in range(6)]
    program = Program([links.__file__, "--folder", str(tmp_path)], str(tmp_path), common, *[str(tmp_path / "said")] * 2)
    ranks = [fork for rank in where for fork in start(replace(program, environment=common | rank))]
    assert wait_for(ranks, limit(200)) == [0] * 6
    for node in "abc":
        rates = [json.loads((tmp_path / f"{node}.link-{gpu}.json").read_text()) for gpu in (0, 1)]
        assert rates[0]["GPU 0 link GB/s"] > 0 < rates[1]["GPU 1 link GB/s"]
        report = preflight.check(tmp_path, gpus=0, free=0, token="12", node=node)
        (tmp_path / f"{node}.json").write_text(json.dumps(report))
        for gpu in (0, 1):
            rate = 1.0 if (node, gpu) == ("b", 1) else 45.0
            (tmp_path / f"{node}.link-{gpu}.json").write_text(json.dumps({f"GPU {gpu} link GB/s": rate}))
    found = preflight.judge(tmp_path, ["a", "b", "c"], report["clock"])
    assert found == {"a": "ok", "b": "unfit: GPU 1 link GB/s: 1, the job's median is 45", "c": "ok"}
