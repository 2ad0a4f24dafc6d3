"""Hugging Face directories into the policy and out of it again; started by run_ranks.

Usage: huggingface_job.py FOLDER [LAYOUT ...]. On one rank: FOLDER/MODEL is read, its logits on FOLDER/tokens.pt are
computed, it is written to FOLDER/out/MODEL; every directory of FOLDER/bad is tried; models that look ahead are written,
too. On four ranks: every layout that is named after the folder reads and streams. Writes
FOLDER/report-WORLD_SIZE-RANK.pt.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch.distributed as dist  # noqa: E402
from huggingface_models import (  # noqa: E402
    AHEAD,
    BY_EXPERT,
    EPS,
    IN_FP8,
    IN_MXFP4,
    LAYOUTS,
    LR,
    MODELS,
    SEQUENCES,
    VOCAB,
    WITH_MTP,
)
from megatron.core import parallel_state  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.megatron.packed import PackedTokens  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402
from grpo_mega.types import pack_tokens  # noqa: E402
from grpo_mega.weights import directory  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402
from grpo_mega.weights.stream import Traffic, hf_buckets  # noqa: E402

BUDGETS = (1, 5000, 10**9)


def policy_of(model: ModelConfig, layout: LayoutConfig, topology: Topology) -> Policy:
    policy = Policy(model, layout, VOCAB, topology, HERE)
    policy.initialize(seed=3)
    return policy


def logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    packed = PackedTokens.of_sequences(torch.tensor(SEQUENCES), 1)
    with torch.no_grad():
        return policy.head.full_logits(policy.hidden_states(tokens, packed))


def logits_ahead(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Of the multi-token prediction module."""
    packed = PackedTokens.of_sequences(torch.tensor(SEQUENCES), 1)
    packed.ahead = torch.cat([part.roll(-1) for part in tokens.split(SEQUENCES)])[None]
    hidden = policy.chunks.last(tokens[None], packed.positions[None], None, packed_seq_params=packed)
    return policy.head.full_logits(hidden[1]).detach()


def updated(policy: Policy, tokens: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The weights after one update on the negative log-likelihood of every token after a sequence's first."""
    batch = pack_tokens([part.tolist() for part in tokens.split(SEQUENCES)], [1] * len(SEQUENCES))
    policy.use_optimizer(OptimizerConfig(lr=LR, eps=EPS, clip_grad=0.0))
    policy.update(batch.with_(weight=batch.mask / batch.mask.sum()), negative_log_likelihood, LR)
    return [pair for bucket in hf_buckets(policy, 10**9) for pair in bucket]


def said(work: Callable[[], object]) -> str:
    """The error that `work` ends with."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def refusal(path: Path, policy: Policy) -> str:
    """What is said about a directory; nothing of the policy may have changed."""
    before = [p.detach().clone() for p in policy.chunks.parameters()]
    error = said(lambda: directory.load_weights(path, policy))
    unchanged = all(torch.equal(p, q) for p, q in zip(policy.chunks.parameters(), before, strict=True))
    return error if unchanged else "weights changed"


def one_rank(folder: Path) -> dict:
    topology = join_layout(LayoutConfig(), seed=0)
    report: dict = {"logits": {}, "shapes": {}, "buckets": {}, "updated": {}, "bad": {}, "ahead": {}}
    tokens = torch.load(folder / "tokens.pt")
    for name, model in MODELS.items():
        policy = policy_of(model, LayoutConfig(), topology)
        directory.load_weights(folder / name, policy)
        report["logits"][name] = logits(policy, tokens)
        report["shapes"][name] = {entry.name: entry.shape for entry in entries(model, VOCAB)}
        report["buckets"][name] = {budget: [*hf_buckets(policy, budget)] for budget in BUDGETS}
        directory.save(folder / "out" / name, policy, byte_budget=20000)
        report["updated"][name] = updated(policy, tokens)
    rounded = policy_of(replace(MODELS["deepseek_v3"], dtype="bf16"), LayoutConfig(), topology)
    directory.load_weights(folder / "deepseek_v3", rounded)
    report["rounded"] = [pair for bucket in hf_buckets(rounded, 10**9) for pair in bucket]
    models = {**MODELS, "fp8": IN_FP8, "ahead": WITH_MTP}
    for name, paths in groupby(sorted((folder / "bad").iterdir()), lambda path: path.name.split("-")[0]):
        policy = policy_of(models[name], LayoutConfig(), topology)  # none of them changes it
        report["bad"] |= {path.name: refusal(path, policy) for path in paths}
    for name, model in AHEAD.items():
        ahead = policy_of(model, LayoutConfig(), topology)
        with torch.no_grad():  # norms other than 1, which would hide that two of them changed places
            for parameter in ahead.chunks.parameters():
                parameter.add_(0.25 * torch.randn(parameter.shape))
        directory.save(folder / name, ahead)
        report["ahead"][name] = logits_ahead(ahead, tokens)
    report["unwanted"] = refusal(folder / "mtp", policy_of(replace(WITH_MTP, mtp_layers=0), LayoutConfig(), topology))
    report["refused"] = [
        said(lambda: directory.save(folder / "mtp", ahead)),
        said(lambda: directory.save(folder / "tokens.pt" / "x", ahead)),
    ]
    return report


def of_other_tensors(models: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
    """The first of those models that have the same tensors, and differ in what they compute with them."""
    first = {repr(entries(model, VOCAB)): name for name, model in reversed(models.items())}
    return {name: models[name] for name in models if name in first.values()}


def stream(policy: Policy, experts_of: range | None = None) -> tuple[list, Traffic]:
    traffic = Traffic()
    return [*hf_buckets(policy, 20000, experts_of, traffic)], traffic


def four_ranks(folder: Path, layouts: list[str]) -> dict:
    report: dict = {"fp8": {}, "mxfp4": {}}
    rank = dist.get_rank()
    for layout_name in layouts:
        layout = LAYOUTS[layout_name]
        topology = join_layout(layout, seed=0)
        for name, model in of_other_tensors({**MODELS, **AHEAD}).items():
            if (layout.ep * layout.etp > 1 and not model.moe.experts) or (model.family == "gpt_oss" and layout.etp > 1):
                continue
            policy = policy_of(model, layout, topology)
            directory.load_weights(folder / name, policy)
            report[name, layout_name] = {"all": stream(policy)}
            if name in BY_EXPERT:
                report[name, layout_name]["mine"] = stream(policy, range(2 * rank, 2 * rank + 2))
                report[name, layout_name]["uneven"] = stream(policy, range(rank, 2 * rank))
        if layout_name == "tp2_pp2":
            policy = policy_of(WITH_MTP, layout, topology)
            directory.load_weights(folder / "mtp", policy)
            directory.save(folder / "out" / "tp2_pp2", policy, byte_budget=30000)
            report["refused"] = [
                said(lambda: [*hf_buckets(policy, 0)]),  # noqa: B023
                said(lambda: [*hf_buckets(policy, 1000 + (rank == 2))]),  # noqa: B023
                said(lambda: [*hf_buckets(policy, 1000, range(9) if rank == 3 else None)]),  # noqa: B023
                said(lambda: directory.load_weights(folder / "bad" / "qwen3-missing", policy)),  # noqa: B023
                said(lambda: directory.save(folder / "tokens.pt" / "x", policy)),  # noqa: B023
            ]
            stacked = policy_of(MODELS["gpt_oss"], layout, topology)
            report["refused"] += [said(lambda: [*hf_buckets(stacked, 1000, range(2))])]  # noqa: B023
        policy = policy_of(IN_FP8, layout, topology)
        directory.load_weights(folder / "fp8", policy)
        report["fp8"][layout_name] = stream(policy)
        if layout.etp == 1:
            policy = policy_of(IN_MXFP4, layout, topology)
            directory.load_weights(folder / "mxfp4", policy)
            report["mxfp4"][layout_name] = stream(policy)
        parallel_state.destroy_model_parallel()
    return report


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    world_size = dist.get_world_size()
    found = one_rank(folder) if world_size == 1 else four_ranks(folder, sys.argv[2:])
    torch.save(found, folder / f"report-{world_size}-{dist.get_rank()}.pt")
    dist.destroy_process_group()
