"""Writes models with adapters as `peft` wants them, and as whole models; started by run_ranks.

Usage: adapters_job.py FOLDER MODEL... ; MODEL is one of huggingface_models.py, NAME-TARGET for one whose adapters are
of this target alone. Writes FOLDER/MODEL/base, merged, and adapter or, into a file, why it is refused.
"""

import sys
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch
from huggingface_models import MODELS, VOCAB

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from grpo_mega.config.schema import Config, LayoutConfig, LoRAConfig, RunConfig  # noqa: E402
from grpo_mega.convert.export import write_adapter  # noqa: E402
from grpo_mega.models.adapters import B  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.shards import named_box, shards  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402
from grpo_mega.weights.directory import save  # noqa: E402


def write(folder: Path, name: str, topology: Topology) -> None:
    """A model and adapters that change what it computes."""
    model_name, _, targets = name.partition("-")
    model = MODELS[model_name]
    if model.moe.experts:
        model = replace(model, moe=replace(model.moe, bias_update_rate=0.0, frozen_bias=model.moe.score == "sigmoid"))
    lora = LoRAConfig(rank=4, alpha=6.0, targets=[targets] if targets else ["attention", "mlp", "experts"])
    for kind in ("base", "merged"):
        policy = Policy(model, LayoutConfig(), VOCAB, topology, HERE, lora=None if kind == "base" else lora)
        policy.initialize(seed=5)
        for shard in shards(policy.chunks):
            key, _ = named_box(shard)
            if key.endswith(B):
                generator = torch.Generator().manual_seed(crc32(key.encode()))
                shard.data.copy_(torch.randn(shard.data.shape, generator=generator) / 4)
        save(folder / name / kind, policy)
    config = Config(run=RunConfig(init_from=str(folder / name / "base")))
    try:
        write_adapter(folder / name / "adapter", policy, config.run.init_from)
    except ValueError as error:
        (folder / name / "refused").write_text(str(error))


if __name__ == "__main__":
    here = join_layout(LayoutConfig(), seed=0)
    for one in sys.argv[2:]:
        write(Path(sys.argv[1]), one, here)
    torch.distributed.destroy_process_group()
