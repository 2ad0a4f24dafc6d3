"""Files and directories that a run reads, by the field that names them, to be checked before anything is read."""

from __future__ import annotations

from grpo_mega.config.recorded import begun
from grpo_mega.config.schema import REWARD_MODELS, Config, files_in


def inputs(config: Config) -> dict[str, str]:
    """{field: path} of everything that must exist."""
    named: dict[str, str | None] = {}
    if config.run.trains in REWARD_MODELS:
        named["pairs.test_path"] = config.pairs.test_path
        for name, paths in (("pairs.path", config.pairs.path), ("pairs.replay_path", config.pairs.replay_path)):
            files = files_in(paths)
            named |= {name if len(files) == 1 else f"{name}[{i}]": file for i, file in enumerate(files)}
    else:
        named |= {"data.train_path": config.data.train_path, "data.test_path": config.data.test_path}
        for name, source in config.data.sources.items():
            named |= {f"data.sources.{name}.path": source.path, f"data.sources.{name}.test_path": source.test_path}
        named |= {"sft.path": config.sft.path, "reward.model.path": config.reward.model.path}
        named |= {} if config.distill.served else {"distill.teacher": config.distill.teacher}
    named |= {} if config.base.train else {"run.init_from": config.run.init_from}
    # A run reads the checkpoint that it forks from only once; it may be deleted after the run has checkpoints itself.
    named |= {} if begun(config.run.root, config.run.name) else {"run.fork": config.run.fork}
    named |= {} if config.data.tokenizer == "chars" else {"data.tokenizer": config.data.tokenizer}
    return {name: path for name, path in named.items() if path}
