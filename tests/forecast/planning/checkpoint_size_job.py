"""Sizes of checkpoints, saved and planned, and parameters; started by run_ranks on one rank.

Usage: checkpoint_size_job.py saved FOLDER, or planned; prints as JSON {case: [bytes of all tensors, parameters]}.
"""

import json
import math
import sys
from pathlib import Path

from composed import composed

from grpo_mega import platform
from grpo_mega.config.schema import Config, OptimizerConfig

DENSE = ["experiment=tiny_dense", "layout=single", "model.vocab_size=64"]
LORA = ["base=none", "run.init_from=elsewhere", "lora.rank=4"]
AVERAGE = "optimizer.average_decay=0.9"
CASES = {
    "plain": [],
    "bf16": ["model.dtype=bf16"],
    "average": [AVERAGE, "model.dtype=bf16", "algorithm.kl_coef=0.1"],
    "average_frozen": [AVERAGE, "model.dtype=bf16", "base=none", "run.init_from=elsewhere", "optimizer.frozen=[mlp]"],
    "lora": [*LORA, AVERAGE, "algorithm.kl_coef=0.1"],
    "experts": ["model=tiny_mla_moe", "model.mtp_layers=1"],
}


def saved(config: Config, folder: Path, here: platform.Platform) -> list[int]:
    from grpo_mega.checkpoint import checkpoint
    from grpo_mega.checkpoint.safe_load import INDEX, read_index
    from grpo_mega.models.average import AveragedPolicy
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.reference import ReferencePolicy
    from grpo_mega.models.topology import join_layout, leave_layout

    platform.join_processes(here)
    topology = join_layout(config.layout, seed=0)
    policy = Policy(
        config.model, config.layout, 64, topology, here, OptimizerConfig(frozen=config.optimizer.frozen), config.lora
    )
    policy.initialize(seed=3)
    policy.initialize_adapters(seed=4)
    policy.use_optimizer(config.optimizer)
    models = [policy]
    models += [ReferencePolicy(policy)] if config.algorithm.kl_coef else []
    models += [AveragedPolicy(policy, config.optimizer.average_decay)] if config.optimizer.average_decay else []
    checkpoint.save(folder, models, {})
    parameters = policy.parameters()
    leave_layout()
    tensors = [e for file in folder.rglob(INDEX) for e in read_index(file).state_dict_metadata.values()]
    return [sum(math.prod(e.size) * e.properties.dtype.itemsize for e in tensors if hasattr(e, "size")), parameters]


def planned(config: Config) -> list[int]:
    platform.start_planning()
    from grpo_mega.forecast.planning.plan import plan

    found = plan(config)
    return [found["checkpoint"], found["parameters"] + found["prediction_parameters"]]


if __name__ == "__main__":
    outcome, here = {}, platform.start() if sys.argv[1] == "saved" else None
    for case, words in CASES.items():
        config = composed(*DENSE, *words)
        outcome[case] = saved(config, Path(sys.argv[2]) / case, here) if here else planned(config)
    print(json.dumps(outcome))
