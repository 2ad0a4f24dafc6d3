"""Plans many runs in one process and prints the plans as JSON: {name: plan}. Started by test_plan.py."""

import json
import os
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from grpo_mega import platform
from grpo_mega.config.load import compose_config

platform.start_planning()

from grpo_mega.plan import plan  # noqa: E402

EXPERIMENTS = ("r1zero_671b", "r1zero_671b_h200", "qwen3_30b_a3b", "moonlight_16b", "deepseekmath_7b", "tiny")
SHORTER = ["model.context=65536", "layout.micro_batch_tokens=65536", "rollout.longer_max_new_tokens=64000"]
LAYOUTS = {
    "whole": ["layout.ep=1"],
    "ep4": ["layout.ep=4"],
    "tp2_pp2": ["layout=tp2_pp2"],
    "pp2_vpp2_cp2": ["layout=pp2", "layout.vpp=2", "layout.cp=2", "model.layers=4"],
    "whole_4_layers": ["layout=single", "model.layers=4"],
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    asked = {name: [f"experiment={name}"] for name in EXPERIMENTS}
    asked["r1zero_16k"] = ["experiment=r1zero_671b", *SHORTER]
    asked["qwen3_interleaved"] = ["experiment=qwen3_30b_a3b", "layout.pp=4", "layout.vpp=2", "cluster.nodes=8"]
    asked["qwen3_one_node"] = ["experiment=qwen3_30b_a3b", "cluster.nodes=1"]
    asked |= {f"tiny_{name}": ["experiment=tiny", *overrides] for name, overrides in LAYOUTS.items()}
    found = {name: plan(compose_config(overrides)) for name, overrides in asked.items()}
    unknown = compose_config(["experiment=tiny"])
    unknown.data.tokenizer = "models/elsewhere"
    try:
        plan(unknown)
    except ValueError as error:
        print(json.dumps({"plans": found, "refused": str(error)}))
