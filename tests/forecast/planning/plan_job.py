"""Plans many runs in one process and prints the plans as JSON: {name: plan}. Started by test_plan.py."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from composed import composed

from grpo_mega import platform
from grpo_mega.config.load import to_yaml

platform.start_planning()

from grpo_mega.forecast.planning.inventory import Role, take_stock, total  # noqa: E402
from grpo_mega.forecast.planning.memory import Trainer, held, in_table, leaves, memory, most_skewed  # noqa: E402
from grpo_mega.forecast.planning.plan import checkpoint, gpus_of, plan, roles_of  # noqa: E402
from grpo_mega.models.schedule import cells_per_token  # noqa: E402
from grpo_mega.rollout.contract import EngineError  # noqa: E402
from grpo_mega.rollout.sglang.memory import mem_fraction_static, work  # noqa: E402

EXPERIMENTS = (
    "r1zero_671b", "r1zero_671b_h200", "deepseek_v3_lora", "qwen3_30b_a3b", "qwen3_30b_a3b_lora", "moonlight_16b",
    "deepseekmath_7b",
)  # fmt: skip
GPT_OSS = ["experiment=qwen3_30b_a3b", "rollout.engine=embedded", "rollout.sglang.tp=1"]
SHORTER = ["model.context=65536", "layout.micro_batch_tokens=65536", "rollout.longer_max_new_tokens=64000"]
ENGINES = {
    "deepep": ["+rollout.sglang.arguments={moe_a2a_backend: deepep, moe_dense_tp_size: 1, mem_fraction_static: 0.7}"],
    "fp8_cache": ["+rollout.sglang.arguments.kv_cache_dtype=fp8_e4m3"],
    "one_cache": ["rollout.sglang.arguments.enable_dp_attention=false", "rollout.sglang.arguments.dp_size=1"],
    "many_requests": ["rollout.sglang.arguments.cuda_graph_max_bs_decode=301"],
    "dp_lm_head": ["+rollout.sglang.arguments.enable_dp_lm_head=true"],
    "short_pieces": ["rollout.sglang.arguments.chunked_prefill_size=1024"],
    "own_share": ["+rollout.sglang.arguments.mem_fraction_static=0.5", "rollout.sglang.bucket_bytes=1000000000"],
    "tp8": ["rollout.sglang.tp=8", "rollout.sglang.arguments.ep_size=8"],
}
TAUGHT = {"single": [], "pp2": ["layout=pp2"], "ep2": ["layout.ep=2"], "tp2": ["layout=tp2"]}
LAYOUTS = {
    "whole": ["layout.ep=1"],
    "ep4": ["layout.ep=4"],
    "tp2_pp2": ["layout=tp2_pp2"],
    "pp2_vpp2_cp2": ["layout=pp2", "layout.vpp=2", "layout.cp=2", "model.layers=4"],
    "whole_4_layers": ["layout=single", "model.layers=4"],
}


SKEWED = {"33000 and 4 x 8000": (5, 33_000, 8125), "60000 and 3 x 2500": (4, 60_000, 9375)}
"""Sequences, tokens of the longest, rows of it on the first of four context parallel ranks."""


def skewed(found: dict) -> dict[str, float]:
    """Bytes beyond what is static on R1-Zero's last stage, with a mask of bits."""
    trainer, lines = Trainer.of(composed("experiment=r1zero_671b")), found["memory"][-1]
    rest = lines["activations kept"] + lines["one layer, saved"]
    return {
        name: rest + in_table(trainer, sequences, longest, rows) + sequences * longest * rows
        for name, (sequences, longest, rows) in SKEWED.items()
    }


def others() -> list[dict[str, float]]:
    """Micro-batches of tables as large as they may be, of all widths, beside the one that is planned."""
    found = []
    for name in ("r1zero_671b", "qwen3_30b_a3b", "moonlight_16b"):
        config = composed(f"experiment={name}")
        trainer = Trainer.of(config)
        budget, most = config.layout.micro_batch_tokens, in_table(trainer, *most_skewed(trainer))
        cells, held = cells_per_token(config.layout.cp) * budget, budget // config.layout.cp
        for longest in range(256, config.model.context + 1, 1024):
            size = in_table(trainer, cells // longest, longest, min(longest, held))
            found.append({"name": name, "longest": longest, "bytes": size, "most": most})
    return found


def with_more_models() -> dict[str, Any]:
    """A critic that is trained and a reward model that is not, beside policy and reference policy."""
    config = composed("experiment=qwen3_30b_a3b", "algorithm.kl_coef=0.1")
    vocab_size, gpus, trainer = config.model.vocab_size, gpus_of(config.cluster), Trainer.of(config)
    scalar = take_stock(config.model, config.layout, vocab_size, gpus, scalar=True)
    fewer = roles_of(config, vocab_size, gpus)
    more = [*fewer, Role("critic", True, True, scalar), Role("reward model", False, False, scalar)]
    return {
        "vocab": vocab_size,
        "hidden": config.model.hidden,
        "stages": [{"dense": stage.dense, "experts": stage.experts} for stage in scalar],
        "replicas": [(stage.replicas, stage.expert_replicas) for stage in scalar],
        "policy": [stage.dense for stage in fewer[0].stages],
        "tp": config.layout.tp,
        "memory": {len(roles): memory(config, roles, config.layout.pp - 1, vocab_size) for roles in (fewer, more)},
        "leaves": {len(roles): leaves(held(trainer, roles, config.layout.pp - 1)) for roles in (fewer, more)},
        "checkpoint": {len(roles): checkpoint(trainer, roles) for roles in (fewer, more)},
        "parameters": sum(total(scalar)),
    }


def taught() -> dict[str, Any]:
    """A dense student with a teacher that has experts and four layers, under layouts that split both."""
    own = composed("experiment=tiny", "layout=single", "model.layers=4", "model.dtype=bf16")
    found = {}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(to_yaml(own))
        for name, overrides in TAUGHT.items():
            words = ["experiment=tiny_distill", f"distill.teacher={folder}", *overrides]
            found[name] = plan(composed(*words))
    alone = plan(composed("experiment=tiny_distill", "distill.teacher=null", "algorithm.group_size=2"))
    return {"teacher": plan(own), "student": alone, **found}


def scored() -> dict[str, Any]:
    """A dense policy that learns from a reward model with experts and four layers; what that takes where it is trained;
    and the layouts that cannot split it."""
    own = ["model.layers=4", "pairs.path=pairs.jsonl", "layout=single"]
    with TemporaryDirectory() as folder:
        trained = composed("experiment=tiny_reward_model", *own)
        (Path(folder) / "config.yaml").write_text(to_yaml(trained))
        words = ["experiment=tiny_dense", "layout=single", f"reward.model.path={folder}"]
        three = [*words, "layout.pp=3", "model.layers=3"]
        return {
            "alone": plan(trained),
            "beside": plan(composed(*words)),
            "refused": refused(lambda: plan(composed(*three))),
        }


def no_vocabulary() -> None:
    unknown = composed("experiment=tiny")
    unknown.data.tokenizer = "models/elsewhere"
    plan(unknown)


def no_room() -> None:
    mem_fraction_static(composed("experiment=r1zero_671b").rollout.sglang, free=12e9, capacity=24e9)


def refused(case: Callable[[], None]) -> str:
    try:
        case()
    except (ValueError, EngineError) as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    asked = {name: [f"experiment={name}"] for name in (*EXPERIMENTS, "tiny", "tiny_ppo")}
    asked["r1zero_16k"] = ["experiment=r1zero_671b", *SHORTER]
    asked["qwen3_interleaved"] = ["experiment=qwen3_30b_a3b", "layout.pp=4", "layout.vpp=2", "cluster.nodes=8"]
    asked["qwen3_one_node"] = ["experiment=qwen3_30b_a3b", "cluster.nodes=1"]
    asked["qwen3_on_host"] = [*asked["qwen3_one_node"], "optimizer.state.on_host=true"]
    asked["qwen3_narrow"] = [*asked["qwen3_one_node"], "optimizer.state.moments=bf16"]
    asked |= {f"tiny_{name}": ["experiment=tiny", *overrides] for name, overrides in LAYOUTS.items()}
    asked |= {f"r1zero_{name}": ["experiment=r1zero_671b", *overrides] for name, overrides in ENGINES.items()}
    asked["moonlight_keeps_all"] = ["experiment=moonlight_16b", "layout.recompute=none"]
    asked["moonlight_keeps_tables"] = [*asked["moonlight_keeps_all"], "layout.attention=padded"]
    asked["r1zero_16k_padded"] = [*asked["r1zero_16k"], "layout.attention=padded"]
    asked["moonlight_frozen"] = ["experiment=moonlight_16b", "optimizer.frozen=[embedding,experts]"]
    asked |= {name: [*GPT_OSS, f"model={name}"] for name in ("gpt_oss_20b", "gpt_oss_120b")}
    asked["kimi_k2"] = ["experiment=r1zero_671b", "model=kimi_k2"]
    asked |= {
        f"qwen3_{size}": ["experiment=gsm8k_0.5b", f"model=qwen3_{size}", "model.context=4096"]
        for size in ("0_6b", "8b", "32b")
    }
    asked |= {name: [f"experiment={name}"] for name in ("gsm8k_0.5b", "countdown_1b")}
    asked |= {"qwen2.5_1.5b": ["experiment=r1_distilled_1_5b", "sft.path=x"]}
    asked["lora_with_reference"] = ["experiment=qwen3_30b_a3b_lora", "algorithm.kl_coef=0.1"]
    asked["qwen3_tp8"] = ["experiment=qwen3_30b_a3b", "rollout.sglang.tp=8"]
    eight = ["cluster.gpus_per_node=8", "optimizer.distributed=true", "optimizer.overlap=true"]
    asked |= {f"{name} on eight": [f"experiment={name}", *eight] for name in ("gsm8k_0.5b", "countdown_1b")}
    asked["tiny_on_h100"] = ["experiment=tiny", "layout=tp2", "cluster=h100"]
    asked["tiny_reward_model"] = ["experiment=tiny_reward_model", "pairs.path=pairs.jsonl"]
    asked["tiny_scored"] = ["experiment=tiny", "reward.model.path=runs/tiny_reward_model"]
    configs = {name: composed(*overrides) for name, overrides in asked.items()}
    found = {name: plan(config) for name, config in configs.items()}
    about = {
        name: [
            asdict(stage)
            for stage in take_stock(
                config.model,
                config.layout,
                config.model.vocab_size,
                found[name]["gpus"],
                lora=config.lora,
                counted=True,
            )
        ]
        for name, config in configs.items()
        if config.model.vocab_size and config.run.trains == "policy"
    }
    shares = [
        {
            "name": name,
            "free": free,
            "capacity": capacity,
            "share": mem_fraction_static(config.rollout.sglang, free, capacity),
        }
        | {"work": work(config.rollout.sglang, capacity), "bucket": config.rollout.sglang.bucket_bytes}
        for name in EXPERIMENTS
        for config in [composed(f"experiment={name}")]
        for capacity in (int(config.cluster.gpu_memory_mib) * 2**20,)
        for free in (capacity - int(held * 1e9) for held in (0, 0.5, 2, 8, 16))
    ]
    said = {
        "plans": found,
        "shares": shares,
        "scored": scored(),
        "refused": [refused(case) for case in (no_vocabulary, no_room)],
    }
    print(
        json.dumps(
            said
            | {
                "about": about,
                "skewed": skewed(found["r1zero_671b"]),
                "others": others(),
                "more": with_more_models(),
                "taught": taught(),
            }
        )
    )
