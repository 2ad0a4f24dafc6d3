"""Composition, typing and the command line, the last in real processes."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import composed
from forks import run_python
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpo_mega.config.load import compose_config, config_dir, groups, identity, identity_in, load, prepare, to_yaml
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import Config, ModelConfig, PartsConfig, RewardTerm
from grpo_mega.errors import ConfigError, InputError

OPTIONS = sorted(f"{group}/{option}" for group, options in groups().items() for option in options)
LAYOUTS = {"single": 1, "tp2": 2, "pp2": 2, "ep2": 2, "tp2_pp2": 4}
EXPERIMENTS = ("tiny", "tiny_dense", "tiny_ppo", "tiny_sft", "tiny_sglang", "tiny_code", "tiny_mixture", "tiny_tool",
               "tiny_python", "tiny_guess", "tiny_distill", "r1_tiny", "r1_tiny_student")  # fmt: skip
LARGE = {
    "r1zero_671b": 512,
    "r1zero_671b_h200": 256,
    "deepseek_v3_lora": 64,
    "qwen3_30b_a3b": 16,
    "qwen3_30b_a3b_lora": 8,
    "moonlight_16b": 8,
    "deepseekmath_7b": 8,
    "r1_671b": 512,
    "gsm8k_0.5b": 1,
    "countdown_1b": 1,
}
"""Experiments of models that need GPUs, and how many of them."""
OWN = (
    "tiny_process_reward_model", "own_model", "tiny_reward_model", "r1_tiny_reward_model", "r1_671b_sft",
    "r1_671b_all", "r1_671b_reward_model",
    "r1_distilled_1_5b",
)  # fmt: skip
"""Experiments with a model and problems of the user's own."""
MODELS_OF_REWARD = ("tiny_reward_model", "tiny_process_reward_model", "r1_tiny_reward_model")
NEEDS = {
    **{f"experiment/{name}": ["pairs.path=pairs.jsonl"] for name in MODELS_OF_REWARD},
    **{f"experiment/{name}": ["sft.path=rows.jsonl"] for name in ("r1_671b_sft", "r1_distilled_1_5b")},
    "experiment/r1_671b_all": ["reward.model.path=runs/reward_model"],
    "data/jsonl": ["base=none", "data.train_path=train.jsonl", "data.test_path=test.jsonl"],
    "data/gsm8k": ["base=none", "data.sources.gsm8k.path=gsm8k/main", "data.tokenizer=models/x"],
    "data/boxed": ["base=none", "data.train_path=a.jsonl", "data.test_path=b.jsonl", "data.tokenizer=models/x"],
    "data/asks_for_box": ["base=none", "data.train_path=a.jsonl", "data.test_path=b.jsonl", "data.tokenizer=models/x"],
    "data/r1zero": ["base=none", "data.train_path=a.jsonl", "data.test_path=b.jsonl", "data.tokenizer=models/x"],
    "data/chat": ["base=none", "data.train_path=a.jsonl", "data.test_path=b.jsonl", "data.tokenizer=models/x"],
    "reward/environment": ["environment=calculator"],
    "model/tiny_dense": ["layout=single"],
    "experiment/own_model": ["model=qwen3_30b_a3b", "model.context=4096", "data.train_path=a", "data.tokenizer=b"],
    "model/from_folder": [f"model.{size}=8" for size in ("layers", "heads", "kv_heads", "ffn_hidden")]
    + ["model.hidden=16", "model.context=128", "layout=single"],
    "model/deepseek_v3": ["layout.micro_batch_tokens=163840"],
    "model/qwen3_30b_a3b": ["layout.micro_batch_tokens=40960"],
    "model/deepseekmath_7b": ["layout=single"],
    "model/qwen2_5_0_5b": ["layout=single", "layout.micro_batch_tokens=32768"],
    "model/qwen2_5_1_5b": ["layout=single", "layout.micro_batch_tokens=131072"],
    "reward/last_number": ["algorithm=grpo"],
    "reward/countdown": ["algorithm=grpo"],
    "model/kimi_k2": ["layout.micro_batch_tokens=131072"],
    **{
        f"model/qwen3_{size}": ["layout=single", "layout.micro_batch_tokens=40960"]
        for size in ("0_6b", "1_7b", "4b", "8b", "14b", "32b")
    },
    "model/gpt_oss_20b": ["layout.micro_batch_tokens=131072"],
    "model/gpt_oss_120b": ["layout.micro_batch_tokens=131072"],
    "layout/tp4_pp4_cp4_ep64": ["model=deepseek_v3", "model.context=67584"],
    "layout/tp4_pp2_cp2_ep32": ["model=deepseek_v3", "model.context=16384"],
    "layout/tp4_ep8": ["model=moonlight_16b_a3b"],
    "layout/tp2_ep8": ["model=moonlight_16b_a3b"],
}
"""What else the command line has to say for an option to make sense with experiment=tiny."""

ENTRY = """
import logging, os
import hydra
from grpo_mega.config.load import config_dir, load

@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(raw):
    config = load(raw)
    print(f"RAN {config.run.name} tp={config.layout.tp} handlers={len(logging.getLogger().handlers)} in {os.getcwd()}")

if __name__ == "__main__":
    main()
"""


def compose_raw(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides)


def test_a_plain_command_line_is_composed_once_as_hydra_composes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    plain = ["experiment=tiny", "layout=single", "run.seed=3"]
    assert prepare(plain) == compose_raw(plain)
    assert HydraConfig.get().overrides.task == plain


@pytest.mark.parametrize(
    "more", [["--cfg", "job"], ["hydra.job.name=own"], ["+hydra.job.env_set.A=1"], ["run.seed=1,2"]]
)
def test_hydra_composes_where_a_command_line_is_more_than_settings(more: list[str]) -> None:
    assert prepare(["experiment=tiny", *more]) is None


PARTS = {group: names for group, names in groups().items() if group != "experiment"}


@pytest.mark.parametrize("number", range(max(map(len, PARTS.values()))))
def test_options_on_the_command_line_win_over_the_experiment(number: int) -> None:
    """One option of each group, whether or not they fit together; the next test is about that."""
    chosen = {group: names[number] for group, names in PARTS.items() if number < len(names)}
    words = [f"{group}={name}" for group, name in chosen.items()]
    if chosen.get("model") == "from_folder":
        words += [word for word in NEEDS["model/from_folder"] if word.startswith("model.")]
    found = asdict(composed("experiment=tiny", *words, checked=False))
    for group, name in chosen.items():
        assert_holds(found[group], written_in(f"{group}/{name}", found), f"{group}/{name}")


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_on_the_command_line_wins_over_the_experiment_and_can_run(option: str) -> None:
    group, name = option.split("/")
    experiment = ["experiment=tiny"] if group != "experiment" else []
    found = asdict(composed(*experiment, f"{group}={name}", *NEEDS.get(option, [])))
    assert_holds(found if group == "experiment" else found[group], written_in(option, found), option)


def written_in(option: str, found: dict[str, Any]) -> dict[str, Any]:
    """What the file of an option sets; references to settings are those found."""
    raw = OmegaConf.create(found | {"written": OmegaConf.load(config_dir() / f"{option}.yaml")})
    resolved = OmegaConf.to_container(raw, resolve=True)
    assert isinstance(resolved, dict)
    return {name: value for name, value in resolved["written"].items() if name != "defaults"}


def assert_holds(found: Any, written: Any, name: str) -> None:
    """Every setting that is written is found."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_holds(found[key], value, f"{name}.{key}")
    elif isinstance(written, list):
        for number, (there, value) in enumerate(zip(found, written, strict=True)):
            assert_holds(there, value, f"{name}[{number}]")
    else:
        assert found == written, name


@pytest.mark.parametrize("path", sorted(config_dir().rglob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_file_says_what_it_is_for(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line != "# @package _global_"]
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert not lines[1].startswith("#")


def test_every_group_is_in_the_defaults_list() -> None:
    defaults = yaml.safe_load((config_dir() / "config.yaml").read_text())["defaults"]
    listed = {key for entry in defaults if isinstance(entry, dict) for key in entry if not key.startswith("override")}
    assert listed == {option.split("/")[0] for option in OPTIONS}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_run_on_two_processes(experiment: str) -> None:
    config = composed(f"experiment={experiment}")
    check_layout(config, 2)
    assert config.run.name == experiment


def test_no_experiment_leaves_its_layout_to_a_choice_but_that_of_a_model_of_one_s_own() -> None:
    words = {name: [f"experiment={name}", *NEEDS.get(f"experiment/{name}", [])] for name in groups()["experiment"]}
    assert [name for name in words if composed(*words[name]).layout.undecided] == ["own_model"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiny_experiment_runs_in_every_layout(layout: str) -> None:
    check_layout(composed("experiment=tiny", f"layout={layout}"), LAYOUTS[layout])


def test_no_two_options_of_a_group_say_the_same() -> None:
    for group, options in groups().items():
        contents = [OmegaConf.to_yaml(OmegaConf.load(config_dir() / group / f"{name}.yaml")) for name in options]
        assert len({*contents}) == len(options), f"configs/{group} has an option under two names"


def test_the_layout_of_a_lone_process_is_data_parallel_with_more() -> None:
    for processes in (1, 2, 8):
        check_layout(composed("experiment=tiny_dense", "layout=single"), processes)


@pytest.mark.parametrize("experiment", LARGE)
def test_a_large_experiment_fits_the_gpus_it_names(experiment: str) -> None:
    config = composed(f"experiment={experiment}")
    assert config.cluster.nodes
    assert config.cluster.nodes * config.cluster.gpus_per_node == LARGE[experiment]
    check_layout(config, LARGE[experiment])
    assert config.run.name == experiment
    with pytest.raises(ConfigError, match="world size"):
        check_layout(config, 3)


def test_all_experiments_and_layouts_are_covered_above() -> None:
    assert {option for option in OPTIONS if option.startswith("experiment/")} == {
        f"experiment/{e}" for e in (*EXPERIMENTS, *LARGE, *OWN)
    }
    large = {"tp4_pp4_cp4_ep64", "tp4_pp2_cp2_ep32", "tp4_ep8", "tp2_ep8"}  # too many ranks for tiny
    assert {option for option in OPTIONS if option.startswith("layout/")} == {
        f"layout/{name}" for name in ("auto", *LAYOUTS, *large)
    }


def test_r1_zero_is_what_deepseek_published() -> None:
    """Nature 645, 633: 8,192 outputs per rollout, an update on 32 questions x 16 outputs, 10,400 updates."""
    for name in ("r1zero_671b", "r1zero_671b_h200"):
        config = composed(f"experiment={name}")
        algorithm, rollout = config.algorithm, config.rollout
        outputs = algorithm.prompts_per_step * algorithm.group_size
        assert (outputs, outputs // algorithm.mini_batches, algorithm.epochs) == (8192, 32 * 16, 1)
        assert config.run.steps * algorithm.mini_batches == 10_400
        assert algorithm.reference_refresh * algorithm.mini_batches == 400
        assert rollout.longer_from_step
        assert rollout.longer_from_step * algorithm.mini_batches == 8192
        assert (rollout.max_new_tokens, rollout.longer_max_new_tokens) == (32_768, 65_536)
        assert (config.optimizer.lr, algorithm.kl_coef, algorithm.kl_estimator) == (3e-6, 0.001, "k3")
        assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, 0)
        assert {term.name: term.weight for term in config.reward.terms} == {"accuracy": 1.0, "format": 1.0}


def test_the_cold_start_experiment_keeps_the_answer_format_out_of_the_base_model() -> None:
    config = composed("experiment=tiny_sft")
    assert (config.base.train, config.base.tagged, config.sft.steps) == (True, 0.0, 50)


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def another(name: str, value: Any) -> Any:
    """A value of the field's type that differs from `value`."""
    if name == "reward.terms":
        options = {"words": ["x", "y"], "more": {"bonus": 0.5}}
        term = {"name": "mine", "weight": 2.5, "function": "a.b:c", "kind": "k", "tasks": ["t"], "options": options}
        return [term]
    if isinstance(value, bool):
        return not value
    return {int: 7_777, float: 0.123, list: ["x", "y"], dict: {"log_level": "info"}}.get(type(value), "other")


def as_override(value: Any) -> str:
    """`value` in hydra's override grammar: JSON, but keys without quotes."""
    if isinstance(value, list):
        return f"[{','.join(as_override(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_override(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def test_every_field_can_be_set_from_the_command_line() -> None:
    config = compose_config(
        [
            "experiment=tiny",
            "algorithm.dual_clip=3.0",
            "algorithm.off_policy_mask=0.5",
            "model.head_dim=24",
            "model.vocab_size=30",
            "model.window=8",
            "model.window_rope_base=100",
            "model.query_pre_attn_scalar=24",
            "rollout.longer_from_step=3",
            "rollout.longer_max_new_tokens=64",
            "rollout.slice_tokens=16",
            "rollout.in_flight=9",
            "rollout.stop=[a]",
            "rollout.engine=sglang",
            "rollout.sglang.first_gpu=1",
            "rollout.sglang.transport=disk",
            "eval.temperature=0.5",
            "eval.top_p=0.9",
            "sft.path=rows.jsonl",
            "sft.epochs=1",
            "sft.max_tokens=64",
            "cluster.nodes=1",
            "cluster.gpu_memory_mib=1000",
            "cluster.host_memory_gib=100",
            "layout.pp=2",
            "layout.chosen_for=4",
            "data.train_size=4",
            "layout.first_stage_layers=1",
            "layout.last_stage_layers=1",
            "optimizer.decay_steps=5",
            "sft.decay_steps=5",
            "pairs.decay_steps=5",
            "pairs.max_tokens=64",
            *(f"optimizer.parts.{field.name}.weight_decay=0.1" for field in fields(PartsConfig)),
        ],
        checked=False,  # together they make no sense
    )
    # `experiment` chooses a group and holds nothing.
    wanted = {name: another(name, value) for name, value in leaves(config)}
    # Hydra lets a free dictionary grow only by "+".
    raw = compose_raw([f"{'+' * isinstance(v, dict)}{name}={as_override(v)}" for name, v in wanted.items()])
    plain = OmegaConf.create(OmegaConf.to_container(raw))
    assert {name: OmegaConf.select(plain, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("override", "where", "words"),
    [
        ("model.layesr=3", "model.layesr", ["not a setting", "did you mean model.layers?"]),
        ("+model.new=1", "model.new", ["not a setting", "--help model`"]),
        ("+run.wandb=true", "run.wandb", ["not a setting", "--help run`"]),
        ("+new=1", "new", ["not a setting", "--help`"]),
        ("base.steps=3", "base.steps", ["did you mean base.max_steps"]),
        ("algorithm.groupsize=3", "algorithm.groupsize", ["did you mean algorithm.group_size?"]),
        ("lr=1e-4", "lr", ["not a setting", "optimizer.lr or base.lr or sft.lr"]),
        ("model=huge", "model=huge", ["choose one of", "tiny_moe"]),
        ("+layout=nope", "layout=nope", ["choose one of auto, ", "single"]),
        ("layout=[single,nope]", "layout=nope", ["choose one of auto, "]),
        ("experiment=nope", "experiment=nope", ["choose one of countdown_1b, ", "leave it out for none"]),
        ("experiment=tinny", "experiment=tinny", ["did you mean tiny? choose one of"]),
        ("experiment=null", "experiment=null", ["choose one of", "tiny_dense", "leave it out for none"]),
        ("model=5", "model=5", ["choose one of", "tiny_moe"]),
        ("layout=true", "layout=true", ["choose one of", "single"]),
        ("run=5", "run=5", ["run is a group of settings; give run.NAME=VALUE", "--help run` lists them"]),
        ("run=nope", "run=nope", ["run is a group of settings; give run.NAME=VALUE"]),
        ("run=null", "run=null", ["run is a group of settings; give run.NAME=VALUE"]),
        ("rollout.sglang=x", "rollout.sglang=x", ["is a group of settings; give rollout.sglang.NAME=VALUE"]),
        ("data.sources=5", "data.sources", ["is a group of settings; give data.sources.NAME.FIELD=VALUE"]),
        ("data.sources.a=x", "data.sources.a", ["is a group of settings; give data.sources.a.NAME=VALUE"]),
        ("run={steps:many}", "run={steps:many}", ["not a whole number"]),
        ("run.steps=many", "run.steps=many", ["not a whole number"]),
        ("algoritm.kl_coef=1", "algoritm", ["did you mean algorithm?"]),
        ("reward.terms=[{name:accuracy,wieght:1.0}]", "reward.terms", ["'wieght' is unknown", "did you mean weight?"]),
        ("reward.terms=[{name:length,low:3}]", "reward.terms", ["'low' is an option", "options: {low: VALUE}"]),
        ("model.gpt_oss=true", "model.gpt_oss", ["did you mean model.family=gpt_oss?"]),
        ("algorithm=grpo,dapo", "algorithm", ["several options of a group", "choose one"]),
        ("~rollout.sglang.arguments.x", "~rollout.sglang.arguments.x", ["removes what is not set", "leave it out"]),
        ("optimizer.lr=3e-", "optimizer.lr=3e-", ["not a number"]),
        ("rollout.ahead=maybe", "rollout.ahead=maybe", ["neither true nor false"]),
        ("rollout.stop=3", "rollout.stop=3", ["not a list"]),
        ("run.steps=1,2", "run.steps", ["write a list in brackets"]),
        ("data.template=one, two", "data.template", ["write a list in brackets"]),
        ("reward.terms=[{name:", "reward.terms=[{name:", ["the whole word in quotes, 'reward.terms=[...]'"]),
        ("run.name=${nothing}", "run.name", ["'nothing' not found"]),
        ("reward=mine", "reward=mine", ["choose one of boxed", "a function of your own as reward=module:function"]),
        ("environment=mine", "environment=mine", ["set environment.path=module:Class for one of your own"]),
        ("tiny", "tiny", ["not a setting", "write experiment=tiny"]),
        ("main", "main", ["not a setting", "write FIELD=VALUE"]),
        ("30", "30", ["not a setting", "write FIELD=VALUE"]),
    ],
)
def test_unknown_fields_options_and_types_are_refused(override: str, where: str, words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        compose_config(["experiment=tiny", override])
    assert refused.value.where == where
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)
    assert "full_key" not in str(refused.value)
    assert "Lexer" not in str(refused.value)


@pytest.mark.parametrize(
    "typed",
    [
        "rollout.stop=['<|im_end|>']",
        "rollout.stop=['<|im_end|>','</s>']",
        "run.init_from=models/mine (copy)",
        "data.template={prompt}!",
        "data.template=Sum: {prompt} = $",
    ],
)
def test_text_that_lost_its_quotes_to_the_shell_comes_back_with_the_command_that_keeps_them(typed: str) -> None:
    arrived = typed.replace("'", "")  # what a shell hands on
    with pytest.raises(InputError) as refused:
        compose_config(["experiment=tiny", arrived])
    (written,) = shlex.split(refused.value.fix.removeprefix("write "))
    value = OverridesParser.create().parse_override(written).value()
    assert value == (arrived.partition("=")[2].strip("[]").split(",") if "[" in arrived else arrived.partition("=")[2])


def test_load_gives_typed_objects() -> None:
    config = load(compose_raw(["experiment=tiny"]))
    assert type(config) is Config
    assert type(config.model) is ModelConfig
    assert config.reward.terms == [RewardTerm("accuracy", 1.0), RewardTerm("format", 0.2)]


def test_load_lists_what_is_not_set_with_a_way_to_set_it() -> None:
    with pytest.raises(ConfigError) as error:
        compose_config([])
    for name in ("run.name", "run.steps", "optimizer.lr"):
        (problem,) = (one for one in error.value.problems if one.field == name)
        assert problem.fix.startswith(f"give {name}=")


def test_load_checks_the_rules() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.group_size=1"):
        compose_config(["experiment=tiny", "algorithm.group_size=1"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_yaml_holds_the_whole_configuration(experiment: str) -> None:
    config = composed(f"experiment={experiment}", "optimizer.eps=1e-9")
    read = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(to_yaml(config)))
    assert OmegaConf.to_object(read) == config


def test_identity_is_flat_and_fits_in_json() -> None:
    values = identity(composed("experiment=tiny"))
    assert json.loads(json.dumps(values)) == values
    assert values["reward.terms[1].weight"] == 0.2
    assert values["rollout.stop"] is None
    assert identity(composed("experiment=tiny", "rollout.stop=[a,b]"))["rollout.stop[1]"] == "b"
    assert values["model.moe.experts"] == 4


@pytest.mark.parametrize("experiment", ["tiny", "tiny_sglang", "r1zero_671b"])
def test_identity_can_be_read_from_what_was_written(experiment: str) -> None:
    config = composed(f"experiment={experiment}", "optimizer.lr=1e-5", "rollout.stop=[a, b]")
    assert identity_in(to_yaml(config)) == identity(config)


@pytest.mark.parametrize("text", ["", "text", "[1]", "model: mine", "a: [", "a: &a [*a]", "\x00"])
def test_what_is_no_configuration_has_no_identity(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        identity_in(text)


MAY_CHANGE = (
    "run.steps=99", "run.eval_every=3", "run.save_every=3", "base.save_every=3", "sft.save_every=3",
    "run.keep_checkpoints=9", "run.print_every=1", "run.report_every=0",
    "run.sample_groups_per_step=0", "run.followed_problems=0",
    "run.tensorboard=false", "layout=tp2_pp2", "layout.micro_batch_tokens=128",
    "run.async_save=true", "optimizer.overlap=true", "cluster.nodes=3", "reward.timeout_seconds=5",
    "reward.on_error=leave_out",
    "run.name=other", "data.shared_test_problems=3",
)  # fmt: skip
MAY_NOT_CHANGE = {
    "run.seed": "run.seed=1",
    "optimizer.lr": "optimizer.lr=1e-3",
    "model.moe.experts": "model.moe.experts=8",
    "rollout.max_new_tokens": "rollout.max_new_tokens=40",
    "reward.terms[1].weight": "reward.terms.1.weight=0.3",
}
"""{name in the identity: what sets it}."""


def test_a_continued_run_may_change_this() -> None:
    before, now = composed("experiment=tiny"), composed("experiment=tiny", *MAY_CHANGE, checked=False)
    for name in (word.split("=")[0] for word in MAY_CHANGE):
        assert attrgetter(name)(before) != attrgetter(name)(now)
    assert identity(before) == identity(now)


def test_a_continued_run_may_not_change_that() -> None:
    before = identity(composed("experiment=tiny"))
    now = identity(composed("experiment=tiny", *MAY_NOT_CHANGE.values()))
    assert {name for name in before if before[name] != now[name]} == MAY_NOT_CHANGE.keys()
    assert identity(composed("experiment=tiny", "rollout.stop=[]")) != before


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["rollout.slice_tokens=8"], {"rollout.slice_tokens"}),
        (["rollout.in_flight=64"], {"rollout.in_flight"}),
        (["rollout.order=submitted"], {"rollout.order"}),
        (["algorithm.correction=mask"], {"algorithm.correction"}),
        (["rollout.slice_tokens=null", "rollout.in_flight=null"], {"rollout.slice_tokens", "rollout.in_flight"}),
    ],
)
def test_a_run_with_samples_in_flight_continues_with_the_same_slices(more: list[str], names: set[str]) -> None:
    sliced = ["experiment=tiny", "algorithm.correction=truncate", "rollout.slice_tokens=16", "rollout.in_flight=40"]
    before, now = identity(composed(*sliced)), identity(composed(*sliced, *more))
    assert {name for name in before if before[name] != now[name]} == names


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """An empty working directory, with an entry point like the product's importable from beside it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "entry.py").write_text(ENTRY)
    (tmp_path / "work").mkdir()
    return tmp_path


def start(entry: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = (entry / "code", config_dir().parent)
    return run_python("-m", *command, folder=entry / "work", paths=paths, environment={"HYDRA_FULL_ERROR": "0"})


def test_the_command_line_shows_the_resolved_run(entry: Path) -> None:
    done = start(entry, "entry", "experiment=tiny", "layout=tp2_pp2", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    shown = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(done.stdout)))
    assert shown == composed("experiment=tiny", "layout=tp2_pp2")


def test_hydra_leaves_folders_working_directory_and_logging_alone(entry: Path) -> None:
    done = start(entry, "entry", "experiment=tiny", "layout=tp2_pp2")
    assert done.stdout == f"RAN tiny tp=2 handlers=0 in {entry / 'work'}\n", done.stderr
    assert list((entry / "work").iterdir()) == []


@pytest.mark.long
def test_every_process_of_torchrun_composes_the_same_run(entry: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = start(entry, *torchrun, "entry", "experiment=tiny_dense", "run.name=two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"RAN two tp=1 handlers=0 in {entry / 'work'}"] * 2
    assert list((entry / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layesr=3", "layesr"),
        ("+model.new=1", "new"),
        ("model=huge", "huge"),
        ("algorithm.group_size=0", "algorithm.group_size=0: out of range; choose a value in [1, inf)"),
    ],
)
def test_the_command_line_refuses_what_is_wrong(entry: Path, override: str, message: str) -> None:
    done = start(entry, "entry", "experiment=tiny", override)
    assert done.returncode != 0
    assert message in done.stderr
    assert "RAN" not in done.stdout


def test_services_may_move_and_what_they_are_asked_may_not_change() -> None:
    def judged(url: str, rubric: str) -> dict[str, object]:
        options = f"{{url:{url},model:m,rubric:{rubric},retries:{len(url)}}}"
        terms = f"reward.terms=[{{name:accuracy}},{{kind:judge,options:{options}}}]"
        return identity(composed("experiment=tiny", terms))

    before = judged("'http://a'", "'{completion}'")
    assert judged("'http://b:3000/v1'", "'{completion}'") == before
    assert judged("'http://a'", "'Good? {completion}'") != before


def test_options_of_terms_may_refer_to_other_settings() -> None:
    options = "{limit:'${rollout.max_new_tokens}',buffer:4}"
    config = composed("experiment=tiny", f"reward.terms=[{{name:accuracy}},{{kind:overlong,options:{options}}}]")
    assert config.reward.terms[1].options == {"limit": config.rollout.max_new_tokens, "buffer": 4}
    assert config.reward.terms[1].name == "overlong"
