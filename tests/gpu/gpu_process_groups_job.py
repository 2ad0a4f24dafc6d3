"""Ranks with a GPU each, whose process groups are suspended and resumed; prints what was found."""

from __future__ import annotations

import json

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from grpo_mega.platform import process_groups  # noqa: E402

ranks = dist.get_world_size()
groups = [dist.group.WORLD, dist.new_group([*range(ranks)]), dist.new_group([*range(ranks)], backend="gloo")]
never_used = dist.new_group([*range(ranks)])
ones = torch.ones(2**26, device=HERE.device)
for group in groups:
    dist.all_reduce(ones if group is not groups[2] else torch.ones(1), group=group)
torch.cuda.synchronize()
free, _ = torch.cuda.mem_get_info(HERE.device)
suspended: list = []
process_groups.suspend(HERE.device, suspended)
report = {"suspended": len(suspended), "freed": torch.cuda.mem_get_info(HERE.device)[0] - free}
process_groups.resume(suspended)
for group in (*groups[:2], never_used):
    ones.fill_(1.0)
    dist.all_reduce(ones, group=group)
    assert ones.min() == ones.max() == ranks
dist.destroy_process_group()
print(json.dumps(report))
