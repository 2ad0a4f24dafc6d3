"""One of four ranks that share engines; prints the results of their collectives on all of them.

Usage: sglang_ranks_job.py RANKS_OF_AN_ENGINE
"""

import json
import sys

import torch.distributed as dist

from grpo_mega.rollout.sglang.ranks import ranks_of_engines

if __name__ == "__main__":
    dist.init_process_group("gloo")
    tp, me = int(sys.argv[1]), dist.get_rank()
    ranks = ranks_of_engines(tp)
    results = {
        "scattered": [ranks.from_owner([f"{me} to {me + i}" * times for i in range(tp)]) for times in (1, 0, 10**5)],
        "sums": ranks.sum([me, me == 2, False]),
    }
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    dist.destroy_process_group()
    print(json.dumps(gathered))
