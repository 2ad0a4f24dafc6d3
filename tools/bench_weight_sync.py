r"""Measures the bytes, time and memory of a weight sync, and computes the bytes for 671B parameters.

    torchrun --nproc-per-node 2 tools/bench_weight_sync.py experiment=tiny_sglang layout=ep2
    torchrun --nproc-per-node 2 tools/bench_weight_sync.py experiment=tiny_sglang layout=ep2 \
        rollout.sglang.tp=2 rollout.sglang.arguments.ep_size=2
    python tools/bench_weight_sync.py --plan

It streams the weights of a configured model to every rank, in buckets, as before a generation, and drops them: all of
them, or with engines under expert parallelism only the experts that the engine's rank keeps. Bytes are exact on every
platform; seconds and memory are of this machine. The engine's own work is not included: `time/sync` in metrics.jsonl of
a run has both.

The plan needs no model and no GPU. It counts the tensors of DeepSeek-V3 without its prediction module: the bytes that
every rank of an engine receives when each gets everything, and when routed experts are sent only to the ranks that own
them (with the server argument ep_size), in bf16 and in fp8 (`rollout.sglang.fp8`).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import check_backend, check_layout

GIB = 2**30
EXPERT_RANKS = (1, 8, 16, 32, 64)


def plan() -> None:
    """Prints the table for 671B parameters."""
    platform.start()
    from grpo_mega.rollout.sglang.arguments import expected_weights
    from grpo_mega.weights.names import entries

    model = compose_config(["experiment=r1zero_671b"]).model
    assert model.vocab_size, "the preset of a released model has it"
    tensors = entries(replace(model, mtp_layers=0), model.vocab_size)
    parameters = sum(entry.bytes // entry.dtype.itemsize for entry in tensors)
    experts = sum(entry.bytes for entry in tensors if entry.expert is not None)
    others = sum(entry.bytes for entry in tensors if entry.expert is None)
    print(f"DeepSeek-V3: {parameters / 1e9:.1f}B parameters in {len(tensors):,} tensors, bf16")
    print(f"routed experts {experts / GIB:,.1f} GiB, all else {others / GIB:,.1f} GiB")
    config = compose_config(["experiment=r1zero_671b_h200"])
    config.model.mtp_layers = 0
    in_fp8 = expected_weights(config.model, True, model.vocab_size, None).values()
    size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in in_fp8)
    print(f"in fp8 with scales {size / GIB:,.1f} GiB, {len(in_fp8):,} tensors\n")
    print("expert ranks of an engine   everything to every rank   own experts only   of it")
    for ranks in EXPERT_RANKS:
        own = others + experts / ranks
        everything = others + experts
        print(f"{ranks:>24}   {everything / GIB:>20,.1f} GiB   {own / GIB:>12,.1f} GiB   {own / everything:>5.1%}")


def bench(overrides: list[str]) -> None:
    """Times three syncs of the configured model on the ranks of this job."""
    here = platform.start()
    platform.join_processes(here)
    import torch.distributed as dist

    from grpo_mega.data import build_data
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout, leave_layout
    from grpo_mega.rollout.sglang.arguments import own_experts
    from grpo_mega.weights.stream import Traffic, hf_buckets

    try:
        config = compose_config(overrides)
        check_layout(config, dist.get_world_size())
        check_backend(config.layout, dist.get_backend())
    except ValueError as error:
        platform.refuse(f"error: {error}")
    vocab_size = build_data(config).tokenizer.vocab_size
    topology = join_layout(config.layout, config.run.seed)
    policy = Policy(config.model, config.layout, vocab_size, topology, here, lora=config.lora)
    policy.initialize(config.run.seed)
    sglang = config.rollout.sglang
    experts = own_experts(sglang, config.model.moe.experts, dist.get_rank() % sglang.tp)
    for sync in range(3):
        traffic, largest = Traffic(), 0
        dist.barrier()
        begun = time.perf_counter()
        for bucket in hf_buckets(policy, config.rollout.sglang.bucket_bytes, experts, traffic):
            largest = max(largest, sum(tensor.nbytes for _, tensor in bucket))
            # Freed before the next bucket is made, as in a run.
            del bucket
        dist.barrier()
        seconds = time.perf_counter() - begun
        lines: list = [None] * dist.get_world_size()
        dist.all_gather_object(lines, _line(traffic, largest, platform.peak_memory_bytes(here)))
        if dist.get_rank() == 0:
            print(f"sync {sync}: {seconds:.3f} s on {here.device.type}, {dist.get_world_size()} ranks")
            print("\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(lines)))
    leave_layout()


def _line(traffic: object, largest: int, peak: int) -> str:
    moved = vars(traffic)
    return (
        f"{moved['tensors']:,} tensors, {moved['bytes']:,} bytes handed out, {moved['received_bytes']:,} received, "
        f"{moved['sent_bytes']:,} sent; largest bucket {largest:,} bytes, {largest / peak:.2%} of peak memory"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print the plan for 671B parameters, run nothing")
    parser.add_argument(
        "overrides", nargs="*", help="configuration overrides, such as experiment=tiny_sglang layout=ep2"
    )
    options = parser.parse_args()
    plan() if options.plan else bench(options.overrides)


if __name__ == "__main__":
    main()
