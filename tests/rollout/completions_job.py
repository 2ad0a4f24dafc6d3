"""One of several ranks that share completions made at random; prints whether each got what all of them had.

Usage: completions_job.py
"""

import json
import random

import torch
import torch.distributed as dist

from grpo_mega.rollout.completions import REASONS, Completion, from_all_ranks

CASES = 40
LETTERS = "a 7\n€漢🙂\x00"


def completion(rng: random.Random) -> Completion:
    """Any, an empty one or one without text included; log-probs are fp32's."""
    length = rng.choice((0, 1, rng.randrange(50)))
    logprobs = torch.tensor([-rng.expovariate(1.0) for _ in range(length)]).tolist()
    text = "".join(rng.choices(LETTERS, k=rng.randrange(9)))
    experts = torch.randint(256, (length + 3, 2, 4), dtype=torch.int16) if rng.random() < 0.7 else None
    return Completion(tuple(rng.choices(range(200_000), k=length)), tuple(logprobs), rng.choice(REASONS), text, experts)


def said(completions: dict[int, Completion]) -> dict[int, tuple]:
    """In a form that can be compared."""
    return {
        number: (*c[:4], None if c.experts is None else (c.experts.dtype, c.experts.tolist()))
        for number, c in completions.items()
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wrong = []
    for case in range(CASES):
        rng = random.Random(case)
        torch.manual_seed(case)
        whole = {number: completion(rng) for number in rng.sample(range(10**6), k=rng.choice((0, 1, 9)))}
        owner = {number: rng.randrange(dist.get_world_size()) for number in whole}
        mine = {number: whole[number] for number in whole if owner[number] == dist.get_rank()}
        if said(from_all_ranks(mine, dist.group.WORLD)) != said(whole):
            wrong.append(case)
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wrong)
    dist.destroy_process_group()
    print(json.dumps(everywhere))
