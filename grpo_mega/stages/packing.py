"""Packs prompts and their sampled completions into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_mega.types import Batch, Prompt, Sample, pack_tokens


@dataclass(frozen=True)
class PackedAnswer:
    """The part of a sample that a batch needs, as tensors.

    Attributes:
        prompt: Prompt of the completion.
        token_ids: [n] int32.
        logprobs: [n] float32.
        experts: See `Sample`.
    """

    prompt: Prompt
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    experts: torch.Tensor | None = None

    @classmethod
    def of(cls, sample: Sample) -> PackedAnswer:
        """Completion of a sample, with tensors that share the sample's memory."""
        token_ids, logprobs = np.asarray(sample.token_ids, np.int32), np.asarray(sample.logprobs, np.float32)
        return cls(sample.prompt, torch.from_numpy(token_ids), torch.from_numpy(logprobs), sample.experts)


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Packs samples that are all on this rank, numbered from 0 in order."""
    number = number_prompts([sample.prompt.token_ids for sample in samples])
    return pack([PackedAnswer.of(sample) for sample in samples], range(len(samples)), number)


def pack(completions: Sequence[PackedAnswer], numbers: Sequence[int], number_of: dict[tuple[int, ...], int]) -> Batch:
    """Packs completions with their prompts, which may be shared; completions are masked in, with rollout log-probs.

    `numbers` are the numbers of the sequences in the global batch, `number_of` those of its prompts, so that parts
    packed on several replicas can be joined again.
    """
    prompts = [completion.prompt.token_ids for completion in completions]
    lengths = [len(prompt) for prompt in prompts]
    whole = [
        np.concatenate([np.asarray(prompt, np.int32), completion.token_ids.numpy()])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    batch = pack_tokens(whole, lengths)
    rollout = torch.zeros(len(batch.tokens))
    rollout[batch.mask] = torch.cat([torch.zeros(0), *(completion.logprobs for completion in completions)])
    packed = batch.with_(
        rollout_logprob=rollout,
        numbers=torch.tensor(numbers, dtype=torch.int64),
        prompts=torch.tensor([number_of[prompt] for prompt in prompts], dtype=torch.int64),
        prompt_lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    return packed.with_(experts=_packed_experts([completion.experts for completion in completions], packed))


def number_prompts(prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Numbers the distinct prompts: token ids -> number, from 0 in the order of appearance."""
    return {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}


def _packed_experts(experts: Sequence[torch.Tensor | None], batch: Batch) -> torch.Tensor | None:
    """Experts of all tokens; those of a prompt are its first sample's, because it may be computed once for all."""
    known = [each for each in experts if each is not None]
    if not known:
        return None
    packed = torch.full((len(batch.tokens), *known[0].shape[1:]), -1, dtype=torch.int16)
    first: dict[int, torch.Tensor] = {}
    starts, prompts, lengths = (x.tolist() for x in (batch.cu_seqlens[:-1], batch.prompts, batch.prompt_lengths))
    for each, start, prompt, length in zip(experts, starts, prompts, lengths, strict=True):
        if each is not None:
            packed[start : start + len(each)] = each
            packed[start : start + length] = first.setdefault(prompt, each[:length])
    return packed
