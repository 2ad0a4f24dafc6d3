"""Folders of every family become checkpoints, which layouts read; started by run_ranks.

Usage: import_job.py FOLDER. On one rank: every FOLDER/MODEL is imported as FOLDER/imported/MODEL. On four ranks: each
is read under two layouts, one of them in another precision, and rank 0 prints, as JSON, the tensors that differ from
the folder's.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from huggingface_models import IN_FP8, IN_MXFP4, LAYOUTS, MODELS, VOCAB, WITH_MTP

from grpo_mega import platform
from grpo_mega.config.schema import LayoutConfig

EVERY = {**MODELS, "mtp": WITH_MTP, "fp8": IN_FP8, "mxfp4": IN_MXFP4}


def import_all(folder: Path) -> None:
    platform.start_planning()
    here = platform.Platform(torch.device("meta"), "gloo", transformer_engine=False)
    platform.join_processes(here)
    from grpo_mega.convert import ingest
    from grpo_mega.models.topology import join_layout

    ingest.BYTES_OF_A_FILE = 30_000  # several files each
    join_layout(LayoutConfig(), seed=0)
    for name, model in EVERY.items():
        ingest.import_folder(folder / name, folder / "imported" / name, model, VOCAB, here)


def differing(folder: Path) -> list[str]:
    here = platform.start()
    platform.join_processes(here)
    from megatron.core import parallel_state

    from grpo_mega.checkpoint import checkpoint
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout
    from grpo_mega.weights import directory
    from grpo_mega.weights.stream import hf_buckets

    found = []
    for layout_name in ("tp2_pp2", "ep2_pp2"):
        layout = LAYOUTS[layout_name]
        topology = join_layout(layout, seed=0)
        for name, model in {**EVERY, "qwen3": replace(MODELS["qwen3"], dtype="bf16")}.items():
            if layout.ep > 1 and not model.moe.experts:
                continue
            policies = [Policy(model, layout, VOCAB, topology, here) for _ in range(2)]
            for policy in policies:
                policy.initialize(seed=3)
            checkpoint.load_weights(folder / "imported" / name, policies[0])
            directory.load_weights(folder / name, policies[1])
            imported, read = (dict(pair for b in hf_buckets(policy, 10**9) for pair in b) for policy in policies)
            assert imported.keys() == read.keys()
            found += [f"{layout_name} {name} {key}" for key in read if not torch.equal(imported[key], read[key])]
            if name != "fp8" and model.dtype == "fp32":
                assert all(
                    torch.equal(read[key], t) for key, t in load_file(folder / name / "model.safetensors").items()
                )
        parallel_state.destroy_model_parallel()
    return found


if __name__ == "__main__":
    if os.environ["WORLD_SIZE"] == "1":
        import_all(Path(sys.argv[1]))
    else:
        print(json.dumps(differing(Path(sys.argv[1]))))
