"""Lists every setting with its docstring, default and values, for `--help` and docs/configuration.md. Only the schema
is imported, so that it is fast.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from grpo_mega.config.limits import With, limits_of, needs_of
from grpo_mega.config.load import config_dir
from grpo_mega.config.schema import Config, OptimizerConfig
from grpo_mega.config.schema.optimizer import ScheduleConfig
from grpo_mega.config.schema.terms import OPTIONS


@dataclass(frozen=True)
class Setting:
    """A field of the schema.

    Attributes:
        name: Dotted name, such as run.steps.
        default: Default in the command line's notation; None when the setting is required.
        values: The allowed interval or choices, in words; empty when any value of the type is allowed.
        needs: Condition for an effect, such as "with algorithm.objective=sapo"; empty when it always has one.
        meaning: Docstring, on one line.
    """

    name: str
    default: str | None
    values: str
    needs: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A dataclass of the schema: the dotted prefix of its settings, its docstring on one line, its own settings."""

    name: str
    about: str
    settings: list[Setting]


MOST_GIVEN = (
    "run.init_from", "run.steps", "data.train_path", "data.test_path", "reward.terms", "model.context",
    "rollout.max_new_tokens", "rollout.engine", "algorithm.prompts_per_step", "algorithm.group_size", "optimizer.lr",
    "layout.micro_batch_tokens",
)  # fmt: skip
"""The twelve settings that most experiments give, in the order of a run."""


def most_given() -> list[Setting]:
    """The settings of `MOST_GIVEN`."""
    of = {name.partition(".")[0] for name in MOST_GIVEN}
    known = {s.name: s for name in of for section in sections(section_types()[name], name) for s in section.settings}
    return [known[name] for name in MOST_GIVEN]


def section_types() -> dict[str, Any]:
    """{section, such as "run": its dataclass}, in the schema's order."""
    hints = get_type_hints(Config)
    return {field.name: hints[field.name] for field in fields(Config)}


def sections(owner: Any, name: str) -> Iterator[Section]:
    """The sections of a dataclass called `name`: its own, those of its lists and mappings (with 0 or NAME for the entry
    in their names), then those of the dataclasses in it."""
    docstrings, hints = _docstrings(owner), get_type_hints(owner)
    limits = limits_of(owner)
    inner = [field for field in fields(owner) if is_dataclass(hints[field.name])]
    inherited = {field.name for base in owner.__bases__ if is_dataclass(base) for field in fields(base)}
    # What a section alone has comes first: sft.path before sft.weight_decay.
    own = sorted((field for field in fields(owner) if field not in inner), key=lambda field: field.name in inherited)
    if issubclass(owner, ScheduleConfig) and owner is not OptimizerConfig:  # the optimizer's section explains these
        docstrings |= {field.name: f"As `optimizer.{field.name}`." for field in fields(ScheduleConfig)}
    needs = {field.name: needs_of(Config).get(f"{name}.{field.name}", []) for field in own}
    # A condition that all settings of a section share is given once, in the section's own text; a setting that narrows
    # it, as pairs.separators narrows run.trains, says so itself.
    others = [{need.other for need in withs} for withs in needs.values()]
    common = [need for need in next(iter(needs.values()), []) if all(need.other in names for names in others)]
    yield Section(
        name,
        " ".join((owner.__doc__ or "").split()) + (f" Only {_words(common)}." if common else ""),
        [
            Setting(
                name=f"{name}.{field.name}",
                default=_default(field),
                values=str(limits.get(field.name, "")),
                needs=_words([need for need in needs[field.name] if need not in common]),
                meaning=docstrings[field.name],
            )
            for field in own
        ],
    )
    for field in own:
        entry = "NAME" if get_origin(hints[field.name]) is dict else "0"
        for item in filter(is_dataclass, get_args(hints[field.name])):
            yield from sections(item, f"{name}.{field.name}.{entry}")
    for field in inner:
        yield from sections(hints[field.name], f"{name}.{field.name}")


def _words(needs: list[With]) -> str:
    """The conditions in words: "with a and with b" is read as "with a and b"."""
    return " and ".join(map(str, needs)).replace("and with", "and")


def kinds() -> Iterator[Section]:
    """A section for each kind of reward term, with its options."""
    for kind, owner in OPTIONS.items():
        docstrings, limits = _docstrings(owner), limits_of(owner)
        yield Section(
            f"kind {kind}",
            " ".join((owner.__doc__ or "").split()),
            [
                Setting(field.name, _default(field), str(limits.get(field.name, "")), "", docstrings[field.name])
                for field in fields(owner)
            ],
        )


def chosen_options() -> dict[str, str | None]:
    """{group: option used by default}, from configs/config.yaml."""
    config: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "config.yaml"))
    return {group: option for entry in config["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def _docstrings(owner: type) -> dict[str, str]:
    """{field: the docstring below it} of a dataclass, inherited fields included."""
    if not is_dataclass(owner):
        return {}
    # Python drops the strings under fields, so they are read from the source.
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    inherited = {name: text for base in owner.__bases__ for name, text in _docstrings(base).items()}
    return inherited | {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def _default(field: Field[Any]) -> str | None:
    """Default value of a field in the command line's notation; None when the field is required."""
    value = field.default if field.default_factory is NO_DEFAULT else field.default_factory()
    # "???" is omegaconf.MISSING, the default of required settings; a required option of a reward term has no default.
    if value == "???" or value is NO_DEFAULT:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
