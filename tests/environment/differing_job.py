"""Ranks whose environments answer differently: each prints its openings, and the replies to the samples that it holds
in the end."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import torch.distributed as dist
from composed import composed

from grpo_mega import platform
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.conversation import conversation_of
from grpo_mega.platform.collectives import from_all_ranks
from grpo_mega.types import Prompt, Sample

environment = [
    *("environment.path=made_environments:Differs", "environment.open=''", "environment.close='='"),
    "environment.at_once=1",
]
config, tokenizer = composed("experiment=tiny", *environment), CharTokenizer()
CALL = array("i", tokenizer.encode("1="))


def called(sample: Sample) -> Sample:
    """The sample after another call."""
    ids = sample.token_ids + CALL
    return replace(sample, token_ids=ids, logprobs=array("f", [-1.0] * len(ids)), finish_reason="stop")


platform.join_processes(platform.start())
with conversation_of(config, tokenizer) as conversation:
    assert conversation
    prompts = [Prompt(f"p/{number}", (1, 4), "<bos>1", "5", "t", asked="1") for number in range(16)]
    prompts = conversation.opened(prompts)
    # Each rank holds half of the samples.
    samples = [
        called(Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), "", number=number))
        for number, prompt in enumerate(prompts)
    ][dist.get_rank() :: 2]
    samples = conversation.go_on(samples, 20)
    # In between, an engine gives them to other ranks.
    of_ranks = from_all_ranks(lambda: samples)
    samples = conversation.go_on([called(sample) for sample in of_ranks[1 - dist.get_rank()]], 20)
    replies = {
        sample.number: "".join(tokenizer.decode(sample.token_ids[first:end]) for first, end in sample.given)
        for sample in samples
    }
    print(json.dumps({"openings": [prompt.opening for prompt in prompts], "replies": replies}))
