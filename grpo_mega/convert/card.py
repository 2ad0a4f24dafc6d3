"""Model card (README.md) of an exported folder: model, data, training and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf

import grpo_mega
from grpo_mega.config.derived import last_stage
from grpo_mega.config.schema import (
    GENERATED_TASKS,
    AlgorithmConfig,
    BaseConfig,
    Config,
    DataConfig,
    DistillConfig,
    RewardConfig,
    SFTConfig,
)
from grpo_mega.observe.metrics import HELD_OUT, METRICS, read_metrics

VALIDATION = "eval/"
"""Prefix of the names of results on the validation problems, see `HELD_OUT`."""
NO_TOKENIZER = (
    "the built-in tokenizer of characters (data.tokenizer=chars) has no files: transformers loads the model, and token "
    "ids come from grpo_mega/data/tokenizer.py"
)
_ALGORITHMS = {
    "grpo": "GRPO (arXiv 2402.03300)",
    "ppo": "PPO with a critic (arXiv 1707.06347)",
    "distill": "on-policy distillation (arXiv 2306.08543, 2306.13649)",
}
"""Last stage of a run -> its algorithm and paper."""
_TAGS = {"grpo": "reinforcement-learning", "ppo": "reinforcement-learning", "distill": "knowledge-distillation"}
_OWN_SETTINGS = {"ppo": ("critic",), "distill": ("distill",)}


@dataclass(frozen=True)
class Facts:
    """Facts for a model card that are not in the configuration.

    Attributes:
        role: Role of the model, "policy" or "reference".
        stage: Stage that trained it last, "pretrain" or "sft"; None for the last stage of the run.
        steps: Steps of this stage.
        architecture: The class of transformers.
        parameters: Parameters of the whole model.
        dtype: Dtype of the weights in the folder, "fp32" or "bf16".
        versions: {package: version} used in training.
        command: Command that wrote the folder.
        run: Run directory with evaluations of this model, or None.
    """

    role: str
    stage: str | None
    steps: int
    architecture: str
    parameters: int
    dtype: str
    versions: dict[str, str]
    command: str
    run: Path | None = None


def card(config: Config, facts: Facts) -> str:
    """Text of README.md, with the header for the Hugging Face hub."""
    name = config.run.name if facts.role == "policy" else f"{config.run.name} ({facts.role})"
    stage = facts.stage or last_stage(config.algorithm, config.distill)
    supervised = stage != "pretrain" and bool(config.sft.path or config.sft.steps)
    learned = stage in _ALGORITHMS and facts.steps > 0
    # A run of supervised training alone has a last stage too, of 0 steps.
    alone = supervised and stage in _ALGORITHMS and not learned
    # The run's results are shown only for the model that it evaluates: the average if there is one, else the policy.
    evaluated = "average" if config.optimizer.average_decay else "policy"
    trained_by = "supervised steps" if alone else f"{facts.steps} steps of {stage}"
    lines = _lines(config.data, config.base, config.run.init_from, config.sft if supervised else None)
    lines += _algorithm(config.algorithm, config.distill, config.reward, stage) if learned else []
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"tags: [grpo_mega{f', {_TAGS[stage]}' if learned else ''}]",
            "---",
            f"# {name}",
            "",
            f"{facts.architecture}, {facts.parameters:,} parameters in {facts.dtype}: the {facts.role} after "
            f"{trained_by}, trained with grpo_mega {grpo_mega.__version__}.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in lines),
            *([] if config.data.tokenizer != "chars" else ["", f"No tokenizer: {NO_TOKENIZER}."]),
            *_results(results_of(facts.run, facts.steps) if facts.run and facts.role == evaluated else []),
            "",
            "## Settings",
            "",
            "```yaml",
            _settings(config, supervised, stage if learned else None).rstrip(),
            "```",
            "",
            "## Made with",
            "",
            *(f"- {package} {version}" for package, version in facts.versions.items()),
            "",
            "```",
            facts.command,
            "```",
            "",
        ]
    )


def results_of(run: Path, step: int) -> list[tuple[str, dict[str, float]]]:
    """Results of evaluations up to this step: held-out results, and the last ones on validation problems."""
    file = run / METRICS
    found: dict[tuple[str, int], dict[str, float]] = {}
    for record in read_metrics(file) if file.is_file() else []:
        held_out = {name.removeprefix(HELD_OUT): x for name, x in record.items() if name.startswith(HELD_OUT)}
        others = {name.removeprefix(VALIDATION): x for name, x in record.items() if name.startswith(VALIDATION)}
        if record["step"] <= step and held_out:
            found["held-out", record["step"]] = held_out
        elif record["step"] <= step and others:
            # Of results on validation problems only the latest is kept; held-out results are few, and all are shown.
            found = {key: values for key, values in found.items() if key[0] != "validation"}
            found["validation", record["step"]] = others
    return [(f"{split}, step {at}", values) for (split, at), values in found.items()]


def _lines(
    data: DataConfig, base: BaseConfig, init_from: str | None, supervised: SFTConfig | None
) -> list[tuple[str, str]]:
    """Lines about the model's origin and training data; `supervised` is None without supervised steps."""
    paths = [data.train_path, *(source.path or source.reasoning_gym for source in data.sources.values())]
    files = ", ".join(f"`{path}`" for path in paths if path)
    file = f"problems of the task {data.task}" if data.task in GENERATED_TASKS else files
    began = f"`{init_from}`" if init_from else "random weights"
    lines = [("trained from", "a base model, from random weights" if base.train else began), ("problems", file)]
    if tested := [path for path in (data.test_path, *(source.test_path for source in data.sources.values())) if path]:
        lines.append(("held-out problems", ", ".join(f"`{path}`" for path in tested)))
    if supervised:
        lines.append(("supervised steps", f"`{supervised.path}`" if supervised.path else "traces of the task"))
    return lines


def _algorithm(
    algorithm: AlgorithmConfig, distill: DistillConfig, reward: RewardConfig, stage: str
) -> list[tuple[str, str]]:
    """Lines about the algorithm of the run's last stage, its teacher and its rewards."""
    sizes = f"{algorithm.prompts_per_step} prompts x {algorithm.group_size} samples a step"
    lines = [("algorithm", f"{_ALGORITHMS[stage]}, objective {algorithm.objective}: {sizes}")]
    lines += [("teacher", f"`{distill.teacher}`")] if distill.teacher else []
    rewards = ", ".join(f"{term.name} x {term.weight:g}" for term in reward.terms)
    measured = " (only measured)" if distill.teacher and not distill.reward_coef else ""
    return [*lines, ("rewards", rewards + measured)]


def _results(results: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    if not results:
        return []
    names = [*dict.fromkeys(name for _, values in results for name in values)]
    rows = [
        f"| {when} | " + " | ".join("" if values.get(name) is None else f"{values[name]:.4g}" for name in names) + " |"
        for when, values in results
    ]
    return ["", "## Results", "", f"| | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|", *rows]


def _settings(config: Config, supervised: bool, stage: str | None) -> str:
    """Settings of the configuration that describe the training, as YAML; `stage` is one of `_ALGORITHMS`, or None."""
    sampling = ("temperature", "top_p", "top_k", "max_new_tokens", "stop")
    learned = ("algorithm", *_OWN_SETTINGS.get(stage, ()), "reward", "optimizer") if stage else ()
    sections = {name: asdict(getattr(config, name)) for name in (*learned, "data")}
    sections["rollout"] = {name: getattr(config.rollout, name) for name in sampling}
    sections["run"] = {"seed": config.run.seed, "steps": config.run.steps}
    sections |= {"lora": asdict(config.lora)} if config.lora.rank else {}
    sections |= {"base": asdict(config.base)} if config.base.train else {}
    sections |= {"sft": asdict(config.sft)} if supervised else {}
    return OmegaConf.to_yaml(OmegaConf.create(sections))
