"""Loads a checked `Config` from the command line; importing this module registers the schema with hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from grpo_mega.config.from_folder import date_of_run, use_folder
from grpo_mega.config.recorded import families_named, in_todays_words, plain, recorded
from grpo_mega.config.rules import check_complete, check_config
from grpo_mega.config.rules.shared import unknown
from grpo_mega.config.schema import (
    REWARD_MODELS,
    Config,
    DataConfig,
    RewardTerm,
    RolloutConfig,
    SGLangConfig,
    StateConfig,
)
from grpo_mega.config.schema.terms import OPTIONS
from grpo_mega.config.typed import as_meant, at_home, literal, with_chosen_sizes, with_escapes
from grpo_mega.errors import InputError
from grpo_mega.models.families import FAMILIES


def _open() -> dict[str, Any]:
    """An empty mapping whose keys the command line may choose."""
    return cast(dict[str, Any], DictConfig({}, flags={"struct": False}))


@dataclass
class _DataOfWords(DataConfig):
    sources: dict[str, Any] = field(default_factory=_open)
    template_options: dict[str, Any] = field(default_factory=_open)


@dataclass
class _SGLangOfWords(SGLangConfig):
    arguments: dict[str, Any] = field(default_factory=_open)


@dataclass
class _RolloutOfWords(RolloutConfig):
    sglang: _SGLangOfWords = field(default_factory=_SGLangOfWords)


@dataclass
class _ConfigOfWords(Config):
    """Schema for hydra, which cannot create typed entries in a mapping; `load` checks those of sources and options."""

    data: _DataOfWords = field(default_factory=_DataOfWords)
    rollout: _RolloutOfWords = field(default_factory=_RolloutOfWords)


ConfigStore.instance().store(name="config_schema", node=_ConfigOfWords)

RECIPES = "recipe"
"""Folder of `configs/` whose files are not options of a run; see `grpo_mega/recipes`."""
# A resumed run may change only what is listed here and below, so that a new setting must stay unless it is added.
# `identity` says what the listed ones have in common.
_MAY_CHANGE = frozenset({
    "run.steps",
    "run.eval_every",
    "run.save_every",
    "base.save_every",
    "base.max_steps",
    "sft.save_every",
    "pairs.save_every",
    "run.async_save",
    "run.keep_checkpoints",
    "run.keep_every",
    "run.keep_traces",
    "run.profile_steps",
    "run.export_every",
    "run.print_every",
    "run.report_every",
    "run.sample_groups_per_step",
    "run.followed_problems",
    "run.tensorboard",
    "run.tracker_project",
    "run.prometheus",
    "run.root",
    "run.name",
    "run.fork",
    "reward.timeout_seconds",
    "reward.on_error",
    "rollout.concurrent_sequences",
    "environment.seconds",
    "environment.at_once",
    "optimizer.overlap",
    "optimizer.state.on_host",
    "data.shared_test_problems",
    "distill.timeout_seconds",
})  # fmt: skip
_MAY_CHANGE_WHOLE = ("layout.", "cluster.", "rollout.sglang.", "eval.", "alarms.", "run.stop_on", "run.trackers")
_OF_SERVICES = re.compile(r"reward\.terms\[\d+\]\.options\.(?:url|key|cache|batch|at_once|retries|backoff|boxes)")
"""Settings of reward services (address, retries), which may also change."""


_ELSEWHERE = {family.formerly: f"model.family={family.name}" for family in FAMILIES.values() if family.formerly} | {
    "learning_rate": "optimizer.lr",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.clip_grad",
    "train_batch_size": "algorithm.prompts_per_step",
    "num_generations": "algorithm.group_size",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "clip_ratio": "algorithm.clip_low algorithm.clip_high",
    "epsilon": "algorithm.clip_low algorithm.clip_high",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "model.context",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "num_train_epochs": "run.steps",
    "total_epochs": "run.steps",
    "model_name_or_path": "run.init_from",
    "train_files": "data.train_path",
    "val_files": "data.test_path",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "expert_model_parallel_size": "layout.ep",
    "output_dir": "run.root",
    "experiment_name": "run.name",
    "save_freq": "run.save_every",
    "save_steps": "run.save_every",
    "test_freq": "run.eval_every",
    "eval_steps": "run.eval_every",
}
"""Names of settings in TRL, verl and Megatron-LM -> those here."""
_MISMATCHES = {
    "could not be converted to Integer": "not a whole number",
    "could not be converted to Float": "not a number",
    "is not a valid bool": "neither true nor false",
    "is not a ListConfig": "not a list",
}
"""Part of a sentence of OmegaConf -> the same in the field's words."""
_OTHERWISE = {
    "experiment": ", or leave it out for none",
    "reward": ", or a function of your own as reward=module:function",
    "environment": ", or set environment.path=module:Class for one of your own",
}
"""Group -> what to write instead of one of its options."""


def config_dir() -> Path:
    """Folder of hydra groups, next to the package.

    Raises:
        FileNotFoundError: The package was installed without the repository around it.
    """
    folder = Path(__file__).resolve().parents[2] / "configs"
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder}/config.yaml is missing; run from a clone, installed with `pip install -e .`")
    return folder


@cache
def _schema() -> DictConfig:
    """The schema as an OmegaConf object; cached, as it takes longer to create than to fill."""
    return OmegaConf.structured(Config)


def load(raw: DictConfig, checked: bool = True) -> Config:
    """Typed configuration from hydra's composed one; unless `checked`, it may violate rules.

    Raises:
        InputError: A field is not in the schema; or, as a ConfigError that lists all of them, required fields are not
            set or rules are violated.
    """
    try:
        # Hydra lets `+model.new=1` through; merging into a fresh schema refuses it.
        # Interpolations are resolved here, once. `literal` makes the results plain text, so that a `${` in a value, for
        # example in a chat template, is not taken for another interpolation.
        values = literal(at_home(OmegaConf.to_container(raw, resolve=True)))
        typed = cast(DictConfig, OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise explained(error) from error
    if typed.run.trains in REWARD_MODELS:
        # A reward model's run does not use these required fields: they get values without effect.
        unused = {"run.steps": 0, "optimizer.lr": typed.pairs.lr, "reward.terms": [], "data.task": "jsonl"}
        for name, value in unused.items():
            if OmegaConf.select(typed, name) is None:
                OmegaConf.update(typed, name, value)
    # Lists all required fields that are missing, where `to_object` would raise at the first.
    check_complete(typed)
    config = cast(Config, OmegaConf.to_object(typed))
    if config.layout.undecided:
        # The layout is chosen later, but rules are checked now, and a lean state needs this.
        config.optimizer.distributed |= config.optimizer.state != StateConfig()
    if not config.layout.chosen_for:
        before = recorded(config.run.root, config.run.name, config.run.fork)
        if before.get("layout", {}).get("chosen_for"):
            # The choice of the layout may have turned it on, and a resumed run must keep its optimizer.
            config.optimizer.distributed |= before["optimizer"]["distributed"]
    for asked in (config.data, *config.data.sources.values()):
        for name in ("template", "question", "system"):
            setattr(asked, name, with_escapes(getattr(asked, name)))
    config.data.date = date_of_run(config.data, config.run)
    if checked:
        check_config(config)
    return config


def load_recorded(values: Mapping[str, Any]) -> Config:
    """Typed configuration from the values that a run has recorded, see `load`; nothing in them is resolved."""
    return load(OmegaConf.create(literal(in_todays_words(values))))


def compose_config(overrides: list[str], checked: bool = True) -> Config:
    """Composes the configuration that the entry point would get with `overrides` as its command line.

    Unless `checked`, it has all required fields but may violate rules.

    Raises:
        InputError: `load` fails, hydra refuses the overrides, or `run.init_from` is not a supported model.
    """
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            raw = composed(with_chosen_sizes(as_meant(overrides)))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise explained(error, overrides) from error
        return load(raw, checked)


def prepare(arguments: Sequence[str]) -> DictConfig | None:
    """Registers the settings of `run.init_from`; the entry point calls it before hydra composes.

    Args:
        arguments: The command line, including hydra's options such as --cfg.

    Returns:
        The configuration of a plain command line, so that hydra need not compose it twice more; None for command lines
        that only hydra itself can handle.

    Raises:
        InputError: The folder cannot be used, see `use_folder`.
    """
    words = [word for word in arguments if is_override(word)]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        found = use_folder(words)
    # Options such as --cfg and --multirun, and settings of hydra itself, have effects beyond the configuration.
    if found is None or len(words) < len(arguments) or any(word.lstrip("+~").startswith("hydra") for word in words):
        return None
    # What `hydra.main` would do; `words` reads the command line from there.
    HydraConfig.instance().set_config(found)
    return _without_hydra(found)


def composed(words: Sequence[str]) -> DictConfig:
    """What hydra composes from a command line; call it where hydra is initialized."""
    found = use_folder(words)
    return compose("config", [*words]) if found is None else _without_hydra(found)


def _without_hydra(found: DictConfig) -> DictConfig:
    """The configuration without hydra's settings, as hydra passes it to an entry point."""
    with open_dict(found):
        del found["hydra"]
    return found


def is_override(word: str) -> bool:
    """Whether a word of a command line is an override, such as run.steps=20 or ~reward.model, not an option."""
    return word[:1] == "~" or (word[:1] != "-" and "=" in word)


def explained(error: Exception, words: Sequence[str] = ()) -> InputError:
    """The error of hydra or OmegaConf as one that names the setting, and what to write instead.

    Args:
        error: The exception that hydra or OmegaConf raised.
        words: The command line, for errors that do not name the setting.
    """
    if isinstance(error, InputError):
        return error
    # Something in a file of `configs/`, whose name hydra's message begins with.
    if (begin := re.match("In '(.*?)': ", str(error))) and isinstance(error.__context__, OmegaConfBaseException):
        found, file = explained(error.__context__), begin[1]
        return InputError(found.where, f"{found.what}, in configs/{file}.yaml", found.fix)
    # A file of `configs/` that does not exist, or a word that is not an override.
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).partition("/")
        if group in groups():
            return _no_option(f"{group}={option}")
        missing = " ".join(str(error).partition("Config search path")[0].split())
        return InputError(str(error.missing_cfg_file), missing, "choose a file of configs/")
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    # A setting that does not exist.
    cause = error.__cause__ or error
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return _unknown(str(cause.full_key), cause.object_type)
    # A group that is set to something other than a name. Hydra raises a plain ValueError without the group's name, so
    # the word is searched for.
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        for word in words:
            name, equals, _ = word.partition("=")
            # Words that name no group are not parsed: they may be what hydra could not read.
            if not equals or name not in groups():
                continue
            if not isinstance(OverridesParser.create().parse_override(word).value(), (str, list)):
                return _no_option(word)
        return InputError(" ".join(words), str(error), f"{_help_of('')} lists the settings")
    # A value that does not fit its setting.
    message, _, override = str(error).splitlines()[0].partition("Error merging override ")
    if "Ambiguous value" in message:
        name = message.partition("'")[2].partition("=")[0]
        fix = f"write a list in brackets, a text with a comma in quotes, as in \"{name}='one, two'\""
        if name in groups():
            return InputError(override or name, "several options of a group", "choose one")
        return InputError(name, "text with a comma, or a list?", fix)
    key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else ""
    name = override or key
    if "Could not delete" in message:
        name = "~" + message.split("'")[1]
        if "The value of" in message:
            return InputError(name, "has another value than the one to remove", f"write {name}")
        return InputError(name, "removes what is not set", "leave it out")
    if not name:
        return InputError("configuration", message, f"{_help_of('')} lists the settings")
    known = _help_of(re.split(r"[.=]", name.lstrip("+~"))[0])
    if setting := _setting_in(key):
        return InputError(name, f"{key} is a group of settings", f"give {setting}=VALUE; {known} lists them")
    why = str(cause).splitlines()[0]
    why = next((plain for part, plain in _MISMATCHES.items() if part in why), why)
    return InputError(name, "needs a value" if "is not Optional" in why else why, f"{known} shows its values")


def _unreadable(word: str) -> InputError:
    """The error about a word that is not an override, usually because the shell removed its quotes; shows the fix."""
    name, equals, value = word.partition("=")
    if not equals:
        experiment = word in groups()["experiment"]
        example = f"experiment={word}" if experiment else "FIELD=VALUE, such as run.steps=20"
        return InputError(word, "not a setting", f"write {example}; {_help_of('')} lists the settings")
    # The shell has split the word at its first space, so the rest of it is in other words.
    if "{" in value and value.startswith("["):
        return InputError(word, "incomplete", f"put the whole word in quotes, '{name}=[...]'")
    written = f"{name}='{value}'"
    if value.startswith("["):
        # The shell has removed the quotes around the items; what remains between commas is taken for text.
        items = [item.strip().strip("'\"") for item in value.strip("[]").split(",")]
        written = f"{name}=[{','.join(map(repr, items))}]"
    try:
        OverridesParser.create().parse_override(written)
    except HydraException:
        return InputError(word, "has special characters", f"write {name}='...', within double quotes")
    shown = shlex.quote(written) if set(written) & set('"$`!\\') else f'"{written}"'
    return InputError(word, "special characters need quotes, and the shell removes one pair", f"write {shown}")


def _unknown(name: str, owner: Any) -> InputError:
    """The error about a field that is not in the schema, or in the dataclass `owner`, with similar field names."""
    # Of an entry of a list OmegaConf does not say in which list it is.
    if owner is RewardTerm:
        last = name.rpartition(".")[2]
        if any(last == field.name for kind in OPTIONS.values() for field in fields(kind)):
            what = f"{last!r} is an option of a kind of term"
            return InputError("reward.terms", what, f"write it as options: {{{last}: VALUE}} in the term")
        return unknown("reward.terms", last, [field.name for field in fields(RewardTerm)])
    known = {one: one.rpartition(".")[2] for one in settings()}
    section, last = name.partition(".")[0], name.rpartition(".")[2]
    # Names in other frameworks take precedence: TRL's max_steps is run.steps, and the closest spelling is
    # base.max_steps. A name without a section is looked for in all.
    close = [*_ELSEWHERE.get(last, "").split()]
    # Of a misspelt section OmegaConf says no more than its name.
    if "." not in name and name not in known.values():
        close = close or get_close_matches(name, [field.name for field in fields(Config)], n=1, cutoff=0.75)
    own = {one: of for one, of in known.items() if one.startswith(f"{section}.")}
    for among, cutoff in ((own, 0.75), (own, 0.6), (known, 0.75)):
        like = get_close_matches(last, among.values(), cutoff=cutoff)
        close = close or [one for one, of in among.items() if of in like]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return InputError(name, "not a setting", f"{meant}{_help_of(section if '.' in name else '')} lists the settings")


def _help_of(section: str) -> str:
    """The command that lists the settings of a section, or of all."""
    known = section if section in {field.name for field in fields(Config)} else ""
    return f"`python -m grpo_mega.train --help{' ' + known if known else ''}`"


def _setting_in(name: str) -> str:
    """How a setting in this part of the schema is written, such as run.NAME or data.sources.NAME.FIELD; else empty."""
    parts = name.split(".")
    for one in (setting.split(".") for setting in settings()):
        if len(parts) < len(one) and all(part in (own, "NAME") for own, part in zip(parts, one, strict=False)):
            return f"{name}.NAME.FIELD" if one[len(parts)] == "NAME" else f"{name}.NAME"
    return ""


def _no_option(word: str) -> InputError:
    """The error about a group of `configs/` that is set to something that is not one of its options."""
    name, _, given = word.partition("=")
    otherwise = _OTHERWISE.get(name, "")
    meant = "".join(f"did you mean {close}? " for close in get_close_matches(given, groups()[name], 1))
    return InputError(word, "no such option", f"{meant}choose one of {', '.join(groups()[name])}{otherwise}")


def groups() -> dict[str, list[str]]:
    """{group: its options}, from the folders and files of `configs/`, except recipes."""
    folders = sorted(path for path in config_dir().iterdir() if path.is_dir() and path.name != RECIPES)
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def settings(node: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields of the schema; NAME stands for the key of a mapping's entry."""
    hints = get_type_hints(node)
    for name in (one.name for one in fields(node)):
        if is_dataclass(hints[name]):
            yield from settings(hints[name], f"{prefix}{name}.")
            continue
        yield prefix + name
        if get_origin(hints[name]) is dict and is_dataclass(get_args(hints[name])[1]):
            yield from settings(get_args(hints[name])[1], f"{prefix}{name}.NAME.")


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, with every field."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(asdict(config))), resolve=True)


def words() -> list[str]:
    """The command line that hydra composed the configuration from, such as ["experiment=tiny"]; may be empty."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def identity(config: Config) -> dict[str, object]:
    """{dotted name: value} of every field that must not change when a run is resumed.

    The run's length, name and directory, its evaluation, tolerances, reports and checkpoints may change, and so may
    settings that change numbers by rounding at most (layout, machines, batching of generation and reduction, operation
    of engines). List items are named by position, for example `reward.terms[0].weight`; all values fit in JSON.
    """
    return must_stay(dict(_flat(asdict(config), "")))


def identity_in(text: str) -> dict[str, object]:
    """`identity` of a configuration in YAML, as written by `to_yaml`.

    Raises:
        ValueError: The text is not a configuration.
    """
    config = plain(text)
    if not isinstance(config.get("model"), dict):
        raise ValueError("not the configuration of a run")
    return must_stay(dict(_flat(config, "")))


def defaults() -> dict[str, object]:
    """`identity` of the schema's defaults: the values in runs of earlier releases that lack these settings."""
    schema = OmegaConf.to_container(_schema())
    assert isinstance(schema, dict)
    return must_stay({name: value for name, value in _flat(schema, "") if value != MISSING})


def must_stay(values: Mapping[str, object]) -> dict[str, object]:
    """The entries of {dotted name: value} that must not change, under their current names."""
    values = families_named({**values}, "model.")
    return {
        name: value
        for name, value in values.items()
        if name not in _MAY_CHANGE
        and not name.startswith(_MAY_CHANGE_WHOLE)
        and not _OF_SERVICES.fullmatch(name)
        # The model on a teacher's server is compared, not its address.
        and not (name == "distill.teacher" and str(value).startswith("http"))
    }


def _flat(node: object, name: str) -> list[tuple[str, object]]:
    if isinstance(node, dict):
        return [leaf for key, child in node.items() for leaf in _flat(child, f"{name}.{key}".lstrip("."))]
    if isinstance(node, list):
        return [leaf for index, child in enumerate(node) for leaf in _flat(child, f"{name}[{index}]")]
    return [(name, node)]
