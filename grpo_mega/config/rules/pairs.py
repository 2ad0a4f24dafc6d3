"""Rules about the training of a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from grpo_mega.config.rules.problems import at_most
from grpo_mega.config.schema import REWARD_MODELS, Config, PairsConfig, files_in


def pairs_problems(config: Config) -> Iterator[str]:
    """A message for each violated rule about a reward model's training, and each setting without effect there."""
    if config.run.trains not in REWARD_MODELS:
        for field in fields(PairsConfig):
            if (value := getattr(config.pairs, field.name)) != getattr(PairsConfig(), field.name):
                yield (
                    f"pairs.{field.name}={value} has no effect with run.trains={config.run.trains}; set that to "
                    f"reward_model, or leave pairs.{field.name} out"
                )
        return
    yield from _files_problems(config.pairs, config.run.trains)
    yield from _separators_problems(config.pairs, config.run.trains)
    yield from _settings_of_policies(config)
    if config.pairs.max_tokens:
        yield from at_most(config, "pairs.max_tokens", "model.context")


def _files_problems(pairs: PairsConfig, trains: str) -> Iterator[str]:
    for name, paths in (("pairs.path", pairs.path), ("pairs.replay_path", pairs.replay_path)):
        if not (paths is None or isinstance(paths, str) or _are_names(paths)):
            yield f"{name}={paths!r}: write one file, or a list of files"
    if not files_in(pairs.path):
        yield f"pairs.path is not set, and run.trains={trains} learns from it; give pairs.path=FILE.jsonl"
    if pairs.test_path and pairs.test_size:
        yield (
            f"pairs.test_path={pairs.test_path} and pairs.test_size={pairs.test_size} both say what is held out; leave "
            "one of them out"
        )
    if not files_in(pairs.replay_path) and pairs.replay_share != PairsConfig.replay_share:
        yield f"pairs.replay_share={pairs.replay_share} is about pairs.replay_path; give that, or leave the share out"


def _separators_problems(pairs: PairsConfig, trains: str) -> Iterator[str]:
    if trains == "reward_model" and pairs.separators != PairsConfig().separators:
        yield (
            f"pairs.separators={pairs.separators} divide the steps of answers, which run.trains=reward_model does not "
            "read; set that to process_reward_model, or leave pairs.separators out"
        )
    elif not pairs.separators or "" in pairs.separators:
        yield f"pairs.separators={pairs.separators}: list one text or more that divides steps, none of them empty"


def _are_names(paths: object) -> bool:
    return isinstance(paths, list) and all(isinstance(path, str) and path for path in paths)


def _settings_of_policies(config: Config) -> Iterator[str]:
    """A message for each setting about a policy, which a reward model's run does not have."""
    set_to = {
        "base.train": (config.base.train, "base=none, and name the model in run.init_from"),
        "sft.steps": (config.sft.steps, "sft.steps=0"),
        "sft.epochs": (config.sft.epochs, "sft.epochs=0"),
        "reward.model.path": (
            config.reward.model.path,
            "reward.model.path=null; run.init_from names what it begins with",
        ),
        "distill.teacher": (config.distill.teacher, "distill.teacher=null"),
        "lora.rank": (config.lora.rank, "lora.rank=0: the whole reward model is trained"),
        "optimizer.frozen": (config.optimizer.frozen, "optimizer.frozen=[]: the whole reward model is trained"),
        "optimizer.average_decay": (config.optimizer.average_decay, "optimizer.average_decay=0"),
        "run.export_every": (config.run.export_every, "run.export_every=0: no language model is trained"),
    }
    for name, (value, fix) in set_to.items():
        if value:
            yield f"{name}={value} does not go with run.trains={config.run.trains}; set {fix}"
