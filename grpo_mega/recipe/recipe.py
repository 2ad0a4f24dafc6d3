"""A recipe: its stages, read from a file of `configs/recipe`, and what the words of their commands mean."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_mega.config.load import config_dir

KINDS = ("run", "samples", "choose")
"""run: a training run; samples: a pool that tools/evaluate.py generates; choose: tools/rejection_sample.py."""
NAME = re.compile(r"[a-z][a-z0-9_]*")
REFERENCE = re.compile(r"(?<!\$)\{([a-z][a-z0-9_]*)\}")
"""A stage's name in braces; braces with anything else in them, and ${...}, are for the settings."""
NOT_STAGES = ("prompt",)
"""Names in braces that settings have themselves (data.template, data.question)."""
RESERVED = (*NOT_STAGES, "stages", "set_aside", "recipe", "slurm")
"""What no stage may be called: a recipe's own folders have these names."""
OWN = {"run": ("run.name", "run.root"), "samples": ("--out",), "choose": ("--output",)}
"""Words that name where a product lies, which the recipe decides."""


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe.

    Attributes:
        name: Its name, which later stages write as {name} for what it makes.
        kind: One of `KINDS`.
        words: The words of its command, without those that say where its product lies.
        about: What it is for, in a sentence.
        processes: How many processes share its work; 1 for `choose`.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    about: str
    processes: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the stages whose products it reads, each once, in the order of its words."""
        names = (name for word in self.words for name in REFERENCE.findall(word) if name not in NOT_STAGES)
        return tuple(dict.fromkeys(names))

    def with_products(self, products: Mapping[str, str]) -> list[str]:
        """The words with products in the places of their stages' names."""
        return [REFERENCE.sub(lambda match: products.get(match[1], match[0]), word) for word in self.words]


@dataclass(frozen=True)
class Recipe:
    """A chain of stages; each reads products of earlier ones only.

    Attributes:
        name: The name of its file.
        root: The folder in which all products lie.
        stages: Name -> stage, in order.
    """

    name: str
    root: Path
    stages: dict[str, Stage]

    def stage(self, name: str) -> Stage:
        """The stage of this name. Raises ValueError when there is none."""
        if name not in self.stages:
            raise ValueError(f"the recipe {self.name} has no stage {name}; it has {', '.join(self.stages)}")
        return self.stages[name]

    def after(self, name: str, kept: Collection[str] = ()) -> list[Stage]:
        """The stage of this name, and all that depend on what it makes, directly or not, and not by way of `kept` ones.

        Raises ValueError when there is no such stage.
        """
        chosen = {self.stage(name).name}
        for stage in self.stages.values():
            if chosen & {*stage.inputs} and stage.name not in kept:
                chosen.add(stage.name)
        return [stage for stage in self.stages.values() if stage.name in chosen]


def file_of(named: str) -> Path:
    """The file that a name of configs/recipe, or the path of a YAML file, means."""
    path = Path(named)
    return path if path.suffix in (".yaml", ".yml") else config_dir() / "recipe" / f"{named}.yaml"


def read_recipe(path: Path, root: Path | None = None, settings: Sequence[str] = (), processes: int = 0) -> Recipe:
    """Reads a recipe.

    Args:
        path: A YAML file: `stages`, a mapping from names to {KIND: words, about: text}, and `processes`.
        root: Where the products lie; None for runs/NAME, by the name of the file.
        settings: Added to the words of training runs: FIELD=VALUE to those of all, STAGE:FIELD=VALUE to those of one.
            For other stages STAGE:WORD adds a word.
        processes: Of every stage but `choose`, whatever the file says; 0 for what it says.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Something in it cannot be used; names file, stage and fix, all that is wrong at once.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such recipe; name a file such as configs/recipe/r1_tiny.yaml")
    try:
        read: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    problems = list(_of_file(read))
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    usual = read.get("processes", 1)
    stages = {
        name: _stage(name, entry, processes or entry.get("processes", usual)) for name, entry in read["stages"].items()
    }
    stages = _with_settings(stages, settings)
    problems = [problem for stage in stages.values() for problem in _of_words(stage, stages)]
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return Recipe(path.stem, (root or Path("runs") / path.stem).absolute(), stages)


def _of_file(read: Any) -> list[str]:
    """What is wrong with the form of a file."""
    if not isinstance(read, dict) or not isinstance(read.get("stages"), dict) or not read["stages"]:
        return ["it needs `stages:`, a mapping from names to {KIND: words, about: text}"]
    unknown = sorted(map(str, read.keys() - {"processes", "stages"}))
    problems = [f"{key} is not known; a recipe has processes and stages" for key in unknown]
    if not _is_count(read.get("processes", 1)):
        problems.append(f"processes={read['processes']}: choose a whole number from 1 on")
    for name, entry in read["stages"].items():
        if not NAME.fullmatch(str(name)) or name in RESERVED:
            taken = f", and is none of {', '.join(RESERVED)}"
            problems.append(f"stage {name!r}: a name has small letters, digits and _, a letter first{taken}")
        if not isinstance(entry, dict):
            problems.append(f"stage {name}: write KIND: words, where KIND is {', '.join(KINDS)}")
            continue
        kinds = [kind for kind in KINDS if kind in entry]
        if len(kinds) != 1 or not isinstance(entry[kinds[0]], str):
            problems.append(
                f"stage {name}: it needs one of {', '.join(KINDS)}, with the words of its command as a text"
            )
        else:
            problems += _unreadable(name, entry[kinds[0]])
        if unknown := sorted(map(str, entry.keys() - {*KINDS, "about", "processes"})):
            problems.append(f"stage {name}: {unknown[0]} is not known; it has {', '.join(KINDS)}, about, processes")
        if not _is_count(entry.get("processes", 1)):
            problems.append(f"stage {name}: processes={entry['processes']}: choose a whole number from 1 on")
    return problems


def _unreadable(name: str, words: str) -> list[str]:
    """Why a text cannot be divided into words as a shell does; nothing when it can."""
    try:
        shlex.split(words)
    except ValueError as error:
        return [f"stage {name}: {error} in {words!r}"]
    return []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _stage(name: str, entry: dict[str, Any], processes: int) -> Stage:
    kind = next(kind for kind in KINDS if kind in entry)
    words = tuple(shlex.split(entry[kind]))
    return Stage(name, kind, words, str(entry.get("about", "")), 1 if kind == "choose" else processes)


def _with_settings(stages: dict[str, Stage], settings: Sequence[str]) -> dict[str, Stage]:
    """The stages with further words; see `read_recipe`."""
    added: dict[str, list[str]] = {name: [] for name in stages}
    for setting in settings:
        name, colon, word = setting.partition(":")
        if colon and "=" not in name:
            if name not in stages:
                raise ValueError(f"{setting}: the recipe has no stage {name}; it has {', '.join(stages)}")
            added[name].append(word)
        elif "=" in setting:
            for stage in stages.values():
                added[stage.name] += [setting] * (stage.kind == "run")
        else:
            raise ValueError(f"{setting!r} is no setting: write FIELD=VALUE, or STAGE:FIELD=VALUE for one stage")
    return {
        name: Stage(name, stage.kind, (*stage.words, *added[name]), stage.about, stage.processes)
        for name, stage in stages.items()
    }


def _of_words(stage: Stage, stages: dict[str, Stage]) -> list[str]:
    """What is wrong with the words of a stage."""
    earlier = list(stages)[: list(stages).index(stage.name)]
    problems = [
        f"stage {stage.name}: {{{name}}} is no earlier stage; there are {', '.join(earlier) or 'none'}"
        for name in stage.inputs
        if name not in earlier
    ]
    for word in stage.words:
        if word.partition("=")[0] in OWN[stage.kind]:
            problems.append(f"stage {stage.name}: {word}: the recipe decides where its product lies; leave it out")
    return problems
