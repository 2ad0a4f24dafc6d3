"""Logits of a checkpoint, read as a run would; started by run_ranks on one rank.

Usage: logits_job.py CHECKPOINT CONFIG.YAML OUT V: writes [V, V] logits of the tokens 0, 1, ..., V - 1.
"""

import sys
from pathlib import Path

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch.distributed as dist  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig  # noqa: E402
from grpo_mega.models.megatron.packed import PackedTokens  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402

path, config, out, vocabulary = *map(Path, sys.argv[1:4]), int(sys.argv[4])
model = OmegaConf.to_object(OmegaConf.merge(ModelConfig, OmegaConf.load(config).model))
policy = Policy(model, LayoutConfig(), vocabulary, join_layout(LayoutConfig(), seed=0), HERE)
checkpoint.load_weights(path, policy)
tokens = torch.arange(vocabulary)
with torch.no_grad():
    hidden = policy.hidden_states(tokens, PackedTokens.of_sequences(torch.tensor([vocabulary]), 1))
    torch.save(policy.head.full_logits(hidden), out)
dist.destroy_process_group()
