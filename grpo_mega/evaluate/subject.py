"""Subject of an evaluation: a model of a run or a Hugging Face folder, with its problems, sampling and reward."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.from_folder import TOKENIZER
from grpo_mega.config.load import compose_config, config_dir, explained, groups, load
from grpo_mega.config.read_only import LAYOUT, check_reading, without_engines
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import (
    Config,
    DataConfig,
    EnvironmentConfig,
    RewardConfig,
    RewardTerm,
    RolloutConfig,
    SourceConfig,
)
from grpo_mega.config.typed import literal
from grpo_mega.convert import source as checkpoints
from grpo_mega.data import Data, build_data, build_tokenizer
from grpo_mega.data.model_defaults import longest_lengths, prompt_format
from grpo_mega.data.problems import ONLY, load_problems
from grpo_mega.data.stored import tokenizer_of
from grpo_mega.data.tokenizer import Tokenizer, fingerprint, vocabulary
from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import begun_on
from grpo_mega.models.families.hf_folder import model_settings
from grpo_mega.models.policy import Policy
from grpo_mega.reward.scorable import has_task, why_unreachable
from grpo_mega.types import Prompt
from grpo_mega.weights import directory as huggingface

TEMPERATURE, TOP_P, TOKENS = 0.6, 0.95, 32768
"""DeepSeek-R1's sampling in evaluations (arXiv 2501.12948, section 3): the defaults for a Hugging Face folder."""


@dataclass(frozen=True)
class Asked:
    """Options of the command line.

    Attributes:
        data: Files of problems, each FILE or TASK=FILE; empty for those of the run.
        train: Number of the run's training problems to use, from the first on; None for its test problems.
        reward: An option of configs/reward, or module:function; None for the run's, or boxed.
        settings: Further settings, FIELD=VALUE.
        config: The config.yaml of the run, for a checkpoint outside of a run directory.
        role: Model of a checkpoint; None for the one that the run itself evaluates.
        out: Folder of the results; None for the default.
        trusts: Whether what the run's configuration names may be run and asked: functions, commands, services.
    """

    data: Sequence[str]
    train: int | None
    reward: str | None
    settings: Sequence[str]
    config: Path | None
    role: str | None
    out: Path | None = None
    trusts: bool = False


@dataclass(frozen=True)
class Subject:
    """A model that can be evaluated.

    Attributes:
        config: Model, layout, data, reward and sampling.
        tokenizer: Tokenizer of the model.
        prompts: The problems.
        weights: Identity of the weights.
        draw: Number of the draw, see `SamplingParams`: the step of a run, whose last evaluation used the same.
        read: Reads the weights into a policy.
        folder: Folder of the results.
        name: Description in words.
    """

    config: Config
    tokenizer: Tokenizer
    prompts: list[Prompt]
    weights: dict[str, str]
    draw: int
    read: Callable[[Policy], None]
    folder: Path
    name: str

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines samples and scores except their number, as JSON values."""
        engine = self.config.rollout.engine
        problems = repr([(p.id, p.token_ids, p.answer, p.task, p.metadata) for p in self.prompts])
        # Samples with calls are recorded as tokens, which only a model of the same vocabulary can learn.
        environment = {"environment": asdict(self.config.environment), "vocabulary": fingerprint(self.tokenizer)}
        return {
            "weights": self.weights,
            "problems": hashlib.sha256(problems.encode()).hexdigest(),
            "context": self.config.model.context,
            "dtype": self.config.model.dtype,
            "seed": self.config.run.seed,
            "draw": self.draw,
            "reward": asdict(self.config.reward),
            **(environment if self.config.environment.path else {}),
            **({"date": self.config.data.date} if self.config.data.date else {}),
            **({} if engine == "embedded" else {"engine": engine}),
        }


def subject(path: Path, wanted: Asked, world_size: int) -> Subject:
    """Subject for a path; every rank must call it.

    Raises:
        InputError: The path cannot be evaluated with these options.
        FileNotFoundError: The path or a file does not exist.
    """
    if chosen := next((word for word in wanted.settings if word.startswith("reward=")), None):
        raise InputError(chosen, "not a setting of an evaluation", f"write --reward {chosen.partition('=')[2]}")
    if wanted.train is not None and wanted.train < 1:
        raise InputError(f"--train {wanted.train}", "too few problems", "choose 1 or more")
    if wanted.train is not None and wanted.data:
        raise InputError("--train and --data", "both select the problems", "leave one of them out")
    # A checkpoint may lie beside the files of its Hugging Face export; its state says that it is a checkpoint.
    if huggingface.is_model(path) and not (path / checkpoint.STATE).is_file():
        evaluated = _of_folder(path, wanted, world_size)
    else:
        evaluated = _of_checkpoint(path, wanted, world_size)
    config = evaluated.config
    _check_problems(evaluated.prompts, config.reward.terms, config.model.context)
    return evaluated


def _of_checkpoint(path: Path, wanted: Asked, world_size: int) -> Subject:
    """A model of a run, or of a cached base model, by default with the run's own reward and test problems."""
    source = checkpoints.find(path)
    if chosen := next((word for word in wanted.settings if word.partition("=")[0] in groups()), None):
        raise InputError(chosen, "a run has its configuration already", "give single fields, such as layout.tp=2")
    layout = [word for word in wanted.settings if word.startswith(LAYOUT)]
    trained = checkpoints.configuration(source, layout, world_size, wanted.config)
    others = [word for word in wanted.settings if word not in layout]
    config = of_run(trained, wanted.reward, others)
    if not wanted.trusts:
        _refuse_foreign(source.path, wanted, config.reward, config.rollout, config.environment)
    check_reading(config, world_size)
    if config.model != trained.model:
        raise InputError("model.*", f"{source.path} is a model of another shape", "leave these settings out")
    tokenizer = build_tokenizer(config.data)
    unreachable = partial(why_unreachable, config.reward.terms)
    if wanted.data:
        prompts = _read(wanted.data, config.data, config.reward.terms, tokenizer)
    else:
        data = build_data(config, unreachable)
        prompts = data.test if wanted.train is None else training_problems(data, wanted.train)
    role = wanted.role or ("average" if config.optimizer.average_decay and source.stage is None else "policy")
    manifest = hashlib.sha256((source.path / "manifest.json").read_bytes()).hexdigest()
    return Subject(
        config,
        tokenizer,
        prompts,
        {"checkpoint": source.path.name, "manifest": manifest, "role": role},
        source.steps,
        lambda policy: checkpoints.read(source, policy, role),
        wanted.out or (source.run or Path()) / "evaluations" / f"{source.path.name}{'-train' if wanted.train else ''}",
        f"{source.path}{', training problems' if wanted.train else ''}",
    )


def _refuse_foreign(
    path: Path, wanted: Asked, reward: RewardConfig, rollout: RolloutConfig, environment: EnvironmentConfig
) -> None:
    """Raises InputError when a run's configuration would make the evaluation run programs or call services.

    Another person may have written its config.yaml.
    """

    def runs(term: RewardTerm) -> str:
        outside = term.options.get("url") or shlex.join(map(str, term.options.get("command", [])))
        unconfined = "programs without a sandbox" if term.options.get("run_without_isolation") else ""
        return term.function or outside or unconfined

    given = [word.partition("=")[0].lstrip("+") for word in wanted.settings]
    names_reward = wanted.reward is not None or any(name.startswith("reward.terms") for name in given)
    named = [f"{term.name} ({what})" for term in reward.terms if (what := runs(term)) and not names_reward]
    sglang = rollout.sglang.arguments if rollout.engine == "sglang" else {}
    named += [f"rollout.sglang.arguments.{name}" for name in sglang if f"rollout.sglang.arguments.{name}" not in given]
    if environment.path and not {"environment", "environment.path"} & {*given}:
        named.append(f"environment.path={environment.path}")
    if named:
        raise InputError(
            f"the configuration of {path}",
            f"runs programs or calls services: {', '.join(named)}",
            "add --trust-run if you trust these; or choose --reward, and environment.path=null",
        )


def training_problems(data: Data, count: int) -> list[Prompt]:
    """The first training problems of the run.

    Raises:
        InputError: The run has fewer different problems.
    """
    prompts = data.train.take(count)
    different = {prompt.id.rpartition("#")[0] for prompt in prompts} if data.problems else prompts
    if len(different) < count:
        what = f"after {len(different)} problems some are repeated"
        raise InputError(f"--train {count}", what, f"choose {len(different)} or fewer")
    return prompts


def of_run(trained: Config, reward: str | None, settings: Sequence[str]) -> Config:
    """Configuration for evaluating a run's model, with these settings; by default with the embedded engine.

    Args:
        trained: The configuration of the run.
        reward: An option of configs/reward, or module:function; None for the run's.
        settings: Further settings, FIELD=VALUE.

    Raises:
        InputError: The settings cannot be used.
    """
    engines = [word.partition("=")[2] for word in settings if word.startswith("rollout.engine=")]
    stays = engines and engines[-1] != "embedded"
    return _changed(trained if stays else without_engines(trained), reward, settings)


def _of_folder(path: Path, wanted: Asked, world_size: int) -> Subject:
    """Subject of a Hugging Face folder, prompted as by `python -m grpo_mega.new`, and loaded as `run.init_from`."""
    if not wanted.data:
        raise InputError(str(path), "a Hugging Face folder, which has no problems", "give --data FILE")
    if wanted.role or wanted.config:
        what = f"are for checkpoints, and {path} is a Hugging Face folder"
        raise InputError("--model and --config", what, "leave them out")
    if not any((path / name).is_file() for name in TOKENIZER):
        what = f"has no tokenizer ({' or '.join(TOKENIZER)})"
        raise InputError(str(path), what, "copy those files into it, or evaluate the run that it is from")
    model_settings(path, 1)  # refuses unsupported models
    reward = wanted.reward or "boxed"
    _, template, question = prompt_format(path, reward)
    _, file = _named(wanted.data[0])
    words = [
        "experiment=own_model",
        f"run.init_from={path}",
        f"data.train_path={file}",
        f"algorithm.prompts_per_step={world_size}",
        f"rollout.max_new_tokens={TOKENS}",
        f"eval.temperature={TEMPERATURE}",
        f"eval.top_p={TOP_P}",
        *wanted.settings,
    ]
    given = {word.partition("=")[0] for word in wanted.settings}
    folder = wanted.out or Path("evaluations") / path.absolute().name
    if "data.date" not in given and (date := begun_on(folder)):
        words.append(f"data.date={date}")
    first = compose_config(words, checked=False)
    data = replace(
        first.data,
        template=first.data.template if "data.template" in given else template,
        question=first.data.question if "data.question" in given else question,
    )
    first = replace(first, data=data, reward=_reward(first.reward, reward))
    tokenizer = build_tokenizer(data)
    prompts = _read(wanted.data, data, first.reward.terms, tokenizer)
    longest, context = longest_lengths(prompts, path, first.rollout.max_new_tokens)
    context = first.model.context if "model.context" in given else context
    room = min(first.rollout.max_new_tokens, max(1, context - longest))
    fitting = [f"model.context={context}", f"rollout.max_new_tokens={room}"]
    fitting.append(f"layout.micro_batch_tokens={max(16384, context)}")  # rules of training require a sequence to fit it
    config = compose_config([*words, *fitting])
    config = replace(config, data=data, reward=_reward(config.reward, reward))
    config = _changed(config, None, [word for word in wanted.settings if word.startswith("reward.")])
    check_layout(config, world_size)
    huggingface.check_architecture(path, config.model, vocabulary(config.model, tokenizer))
    files = {file.name: f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in path.glob("*.safetensors")}
    return Subject(
        config,
        tokenizer,
        prompts,
        dict(sorted(files.items())),
        0,
        partial(huggingface.load_weights, path),
        folder,
        str(path),
    )


def _changed(config: Config, reward: str | None, settings: Sequence[str]) -> Config:
    """The configuration with another reward and settings."""
    raw = OmegaConf.create(literal(asdict(replace(config, reward=_reward(config.reward, reward)))))
    try:
        changed = OmegaConf.merge(OmegaConf.structured(Config), raw, OmegaConf.from_dotlist([*settings]))
    except (OmegaConfBaseException, ValueError) as error:
        raise explained(error, settings) from error
    return load(cast(DictConfig, changed))


def _reward(given: RewardConfig, asked: str | None) -> RewardConfig:
    """The given reward, or one with the terms that `asked` names: those of configs/reward, or a user function."""
    if asked is None:
        return given
    if ":" in asked:
        term = RewardTerm(function=asked)
        return replace(given, terms=[term], success=term.name)
    if asked not in groups()["reward"]:
        fix = f"choose {', '.join(groups()['reward'])}, or write module:function"
        raise InputError(f"--reward {asked}", "unknown", fix)
    chosen = OmegaConf.to_container(OmegaConf.load(config_dir() / "reward" / f"{asked}.yaml"))
    assert isinstance(chosen, dict)
    return replace(given, terms=[RewardTerm(**term) for term in chosen["terms"]], success=str(chosen["success"]))


def _read(files: Sequence[str], data: DataConfig, terms: Sequence[RewardTerm], tokenizer: Tokenizer) -> list[Prompt]:
    """Problems of files; a file named like a source of the run is read like that source."""
    prompts: list[Prompt] = []
    unreachable = partial(why_unreachable, terms)
    for word in files:
        name, file = _named(word)
        source = data.sources.get(name) or SourceConfig()
        asking = tokenizer_of(source, data, tokenizer)
        problems = load_problems(file, asking, unreachable, name=name, source=source, split=source.test_split)
        prompts += [problem.prompt for problem in problems]
    return prompts


def _named(word: str) -> tuple[str, str]:
    """(task, file) of FILE or TASK=FILE."""
    name, equals, file = word.partition("=")
    return (name, file) if equals and "/" not in name else (ONLY, word)


def _check_problems(prompts: Sequence[Prompt], terms: Sequence[RewardTerm], context: int) -> None:
    """Checks that there are problems, with unique ids, room for a completion, and a reward.

    Raises:
        InputError: A check fails.
    """
    if not prompts:
        raise InputError("the run", "has no test problems", "give --data FILE")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            fix = "give files names, --data TASK=FILE, or problems ids"
            raise InputError(f"problem {prompt.id!r}", "two problems have this id", fix)
        seen.add(prompt.id)
        if not any(has_task(term, prompt.task) for term in terms):
            raise InputError(
                f"problem {prompt.id!r}",
                f"no reward term has its task {prompt.task!r}",
                "choose another --reward, or give the file a task of the reward, --data TASK=FILE",
            )
        if len(prompt.token_ids) >= context:
            raise InputError(
                f"problem {prompt.id!r}",
                f"{len(prompt.token_ids)} tokens leave no room for a completion in model.context={context}",
                "drop the problem",
            )
