"""Hugging Face directories into the policy and out of it again; started by run_ranks.

Usage: huggingface_job.py FOLDER. On one rank: FOLDER/MODEL is read, its logits on FOLDER/tokens.pt are computed, it is
written to FOLDER/out/MODEL; every directory of FOLDER/bad is tried. On four ranks: every layout reads and streams.
Writes FOLDER/report-WORLD_SIZE-RANK.pt.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch.distributed as dist  # noqa: E402
from huggingface_models import LAYOUTS, MODELS, SEQUENCES, VOCAB, WITH_MTP  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from grpo_mega.checkpoint.huggingface import directory  # noqa: E402
from grpo_mega.checkpoint.huggingface.names import entries  # noqa: E402
from grpo_mega.colocation.weight_stream import Traffic, hf_buckets  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig  # noqa: E402
from grpo_mega.policy.packed import PackedTokens  # noqa: E402
from grpo_mega.policy.policy import Policy  # noqa: E402
from grpo_mega.policy.topology import Topology, join_layout  # noqa: E402

BUDGETS = (1, 5000, 10**9)


def policy_of(model: ModelConfig, layout: LayoutConfig, topology: Topology) -> Policy:
    policy = Policy(model, layout, VOCAB, topology, HERE)
    policy.initialize(seed=3)
    return policy


def logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    packed = PackedTokens.of_sequences(torch.tensor(SEQUENCES), 1)
    with torch.no_grad():
        return policy.head.full_logits(policy.hidden_states(tokens, packed))


def refusal(path: Path, policy: Policy) -> str | None:
    """What is said about a directory; nothing of the policy may have changed."""
    before = [p.detach().clone() for p in policy.gpt.parameters()]
    try:
        directory.load_weights(path, policy)
    except ValueError as error:
        assert all(torch.equal(p, q) for p, q in zip(policy.gpt.parameters(), before, strict=True))
        return str(error)
    return None


def one_rank(folder: Path) -> dict:
    topology = join_layout(LayoutConfig(), seed=0)
    report: dict = {"logits": {}, "shapes": {}, "buckets": {}, "bad": {}}
    tokens = torch.load(folder / "tokens.pt")
    for name, model in MODELS.items():
        policy = policy_of(model, LayoutConfig(), topology)
        directory.load_weights(folder / name, policy)
        report["logits"][name] = logits(policy, tokens)
        report["shapes"][name] = {entry.name: entry.shape for entry in entries(model, VOCAB)}
        report["buckets"][name] = {budget: [*hf_buckets(policy, budget)] for budget in BUDGETS}
        directory.save(folder / "out" / name, policy, byte_budget=20000)
    rounded = policy_of(replace(MODELS["deepseek_v3"], dtype="bf16"), LayoutConfig(), topology)
    directory.load_weights(folder / "deepseek_v3", rounded)
    report["rounded"] = [pair for bucket in hf_buckets(rounded, 10**9) for pair in bucket]
    for path in sorted((folder / "bad").iterdir()):
        model = MODELS[path.name.split("-")[0]]
        report["bad"][path.name] = refusal(path, policy_of(model, LayoutConfig(), topology))
    ahead = policy_of(WITH_MTP, LayoutConfig(), topology)
    directory.save(folder / "mtp", ahead)
    return report


def four_ranks(folder: Path) -> dict:
    report: dict = {}
    for layout_name, layout in LAYOUTS.items():
        topology = join_layout(layout, seed=0)
        for name, model in {**MODELS, "mtp": WITH_MTP}.items():
            if layout.ep * layout.etp > 1 and not model.moe.experts:
                continue
            policy = policy_of(model, layout, topology)
            directory.load_weights(folder / name, policy)
            traffic = Traffic()
            found = {"all": [*hf_buckets(policy, 5000, traffic=traffic)], "traffic": asdict(traffic)}
            if model.moe.experts:
                each = Traffic()
                mine = range(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
                found["mine"] = [*hf_buckets(policy, 5000, experts_of=mine, traffic=each)]
                found["uneven"] = [*hf_buckets(policy, 5000, experts_of=range(dist.get_rank(), 2 * dist.get_rank()))]
                found["mine_traffic"] = asdict(each)
            report[name, layout_name] = found
        if layout_name == "tp2_pp2":
            directory.save(folder / "out" / "tp2_pp2", policy, byte_budget=30000)
        parallel_state.destroy_model_parallel()
    return report


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    world_size = dist.get_world_size()
    found = one_rank(folder) if world_size == 1 else four_ranks(folder)
    torch.save(found, folder / f"report-{world_size}-{dist.get_rank()}.pt")
    dist.destroy_process_group()
