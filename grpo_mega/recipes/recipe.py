"""A recipe: its stages, read from a file of `configs/recipe`, and the references in their words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasEvent, YAMLError

from grpo_mega.config.load import config_dir
from grpo_mega.errors import ConfigError, InputError, instead_of
from grpo_mega.observe.foreign import MOST_YAML_BYTES, contents

KINDS = ("run", "samples", "choose")
"""run: a training run; samples: a pool that tools/evaluate.py generates; choose: tools/rejection_sample.py."""
NAME = re.compile(r"[a-z][a-z0-9_]*")
REFERENCE = re.compile(r"(?<!\$)\{([a-z][a-z0-9_]*)\}")
"""A stage's name in braces; other braces, and ${...}, belong to the settings."""
NOT_STAGES = ("prompt",)
"""Names in braces that settings use themselves (data.template, data.question)."""
RESERVED = (*NOT_STAGES, "stages", "set_aside", "recipe", "slurm")
"""Names that no stage may have, as a recipe's own folders use them."""
OWN = {"run": ("run.name", "run.root"), "samples": ("--out",), "choose": ("--output",)}
"""Words that set the path of a product, which the recipe decides."""


@dataclass(frozen=True)
class RecipeStage:
    """One stage of a recipe.

    Attributes:
        name: Name of the stage; later stages write {name} for its product.
        kind: One of `KINDS`.
        words: Words of its command, without those that set the product's path.
        about: Purpose, in a sentence.
        processes: Number of processes; 1 for `choose`.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    about: str
    processes: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the stages whose products the stage reads, each once, in the order of its words."""
        names = (name for word in self.words for name in REFERENCE.findall(word) if name not in NOT_STAGES)
        return tuple(dict.fromkeys(names))

    def with_products(self, products: Mapping[str, str]) -> list[str]:
        """The words with references replaced by products."""
        return [REFERENCE.sub(lambda match: products.get(match[1], match[0]), word) for word in self.words]


@dataclass(frozen=True)
class Recipe:
    """A chain of stages; each reads products of earlier ones only.

    Attributes:
        name: Name of the recipe's file.
        root: Folder of all products.
        stages: Name -> stage, in order.
    """

    name: str
    root: Path
    stages: dict[str, RecipeStage]

    def stage(self, name: str) -> RecipeStage:
        """Stage of this name. Raises InputError without one."""
        if name not in self.stages:
            raise InputError(
                f"stage {name}", f"not in the recipe {self.name}", f"choose one of {', '.join(self.stages)}"
            )
        return self.stages[name]

    def after(self, name: str, kept: Collection[str] = ()) -> list[RecipeStage]:
        """The stage of this name, and all that depend on its product, directly or not, except through `kept` ones.

        Raises InputError without such a stage.
        """
        chosen = {self.stage(name).name}
        for stage in self.stages.values():
            if chosen & {*stage.inputs} and stage.name not in kept:
                chosen.add(stage.name)
        return [stage for stage in self.stages.values() if stage.name in chosen]


def file_of(named: str) -> Path:
    """File for a name in configs/recipe, or for the path of a YAML file."""
    path = Path(named)
    return path if path.suffix in (".yaml", ".yml") else config_dir() / "recipe" / f"{named}.yaml"


def read_recipe(path: Path, root: Path | None = None, settings: Sequence[str] = (), processes: int = 0) -> Recipe:
    """Reads a recipe.

    Args:
        path: A YAML file: `stages`, a mapping from names to {KIND: words, about: text}, and `processes`.
        root: Folder of the products; None for runs/NAME, by the name of the file.
        settings: Further words of training runs: FIELD=VALUE for all, STAGE:FIELD=VALUE for one. For other stages
            STAGE:WORD adds a word.
        processes: Number of processes of every stage but `choose`; 0 for the number in the file.

    Raises:
        InputError: The file does not exist, or has errors, all of which are named; `where` has file and stage.
    """
    if not path.is_file():
        raise InputError(
            str(path), f"no such recipe{instead_of(path)}", "choose a file such as configs/recipe/r1_tiny.yaml"
        )
    try:
        # Nested aliases expand exponentially: a small file could fill the memory.
        if any(isinstance(event, AliasEvent) for event in yaml.parse(contents(path, MOST_YAML_BYTES))):
            raise ValueError("it has YAML aliases: write out their values")
        read: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise InputError(str(path), f"cannot be read: {' '.join(str(error).split())}", "correct the file") from error
    if problems := [*_of_file(read, path)]:
        raise ConfigError.of(problems)
    usual = read.get("processes", 1)
    stages: dict[str, RecipeStage] = {}
    for name, entry in read["stages"].items():
        kind = next(kind for kind in KINDS if kind in entry)
        started = 1 if kind == "choose" else processes or entry.get("processes", usual)
        words = tuple(shlex.split(entry[kind]))
        stages[name] = RecipeStage(name, kind, words, str(entry.get("about", "")), started)
    # Words from the command line are checked together with those of the file.
    stages = _with_settings(stages, settings)
    if problems := [problem for stage in stages.values() for problem in _of_words(stage, stages, path)]:
        raise ConfigError.of(problems)
    return Recipe(path.stem, (root or Path("runs") / path.stem).absolute(), stages)


def _of_file(read: Any, path: Path) -> Iterator[InputError]:
    """Problems of a file's structure."""
    if not isinstance(read, dict) or not isinstance(read.get("stages"), dict) or not read["stages"]:
        fix = "write `stages:`, a mapping from names to {KIND: words, about: text}"
        yield InputError(str(path), "has no stages", fix)
        return
    # A user has typed the file, so any value may have any type. All problems are collected for one message.
    for key in sorted(map(str, read.keys() - {"processes", "stages"})):
        yield InputError(f"{path}: {key}", "unknown", "remove it; a recipe has processes and stages")
    if not _is_count(read.get("processes", 1)):
        yield InputError(f"{path}: processes={read['processes']}", *_NO_COUNT)
    for name, entry in read["stages"].items():
        if not NAME.fullmatch(str(name)) or name in RESERVED:
            taken = f"choose lower-case letters, digits and _, a letter first, and none of {', '.join(RESERVED)}"
            yield InputError(f"{path}: stage {name}", "not a name", taken)
        yield from _of_entry(entry, f"{path}: stage {name}")


_NO_COUNT = "not a number of processes", "choose a whole number of at least 1"


def _of_entry(entry: Any, where: str) -> Iterator[InputError]:
    """Problems of what a file says of a stage."""
    if not isinstance(entry, dict):
        yield InputError(where, "not a mapping", f"write KIND: words, where KIND is {', '.join(KINDS)}")
        return
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1 or not isinstance(entry[kinds[0]], str):
        fix = f"give one of {', '.join(KINDS)}, with the words of its command as a text"
        yield InputError(where, "has no command, or several", fix)
    else:
        try:
            shlex.split(entry[kinds[0]])
        except ValueError as error:
            yield InputError(f"{where}: {kinds[0]}", f"{error} in {entry[kinds[0]]!r}", "write it as for a shell")
    for key in sorted(map(str, entry.keys() - {*KINDS, "about", "processes"})):
        yield InputError(f"{where}: {key}", "unknown", f"remove it; a stage has {', '.join(KINDS)}, about, processes")
    if not _is_count(entry.get("processes", 1)):
        yield InputError(f"{where}: processes={entry['processes']}", *_NO_COUNT)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _with_settings(stages: dict[str, RecipeStage], settings: Sequence[str]) -> dict[str, RecipeStage]:
    """The stages with further words; see `read_recipe`."""
    added: dict[str, list[str]] = {name: [] for name in stages}
    for setting in settings:
        name, colon, word = setting.partition(":")
        # A colon after the first `=` belongs to a value, such as the path of a user's function.
        if colon and "=" not in name:
            if name not in stages:
                raise InputError(setting, f"the recipe has no stage {name}", f"choose one of {', '.join(stages)}")
            added[name].append(word)
        elif "=" in setting:
            for stage in stages.values():
                added[stage.name] += [setting] * (stage.kind == "run")
        else:
            raise InputError(setting, "not a setting", "write FIELD=VALUE, or STAGE:FIELD=VALUE for one stage")
    return {
        name: RecipeStage(name, stage.kind, (*stage.words, *added[name]), stage.about, stage.processes)
        for name, stage in stages.items()
    }


def _of_words(stage: RecipeStage, stages: dict[str, RecipeStage], path: Path) -> Iterator[InputError]:
    """Problems of a stage's words."""
    earlier, where = list(stages)[: list(stages).index(stage.name)], f"{path}: stage {stage.name}"
    for name in stage.inputs:
        if name not in earlier:
            fix = f"choose one of {', '.join(earlier)}" if earlier else "the first stage reads none: leave it out"
            yield InputError(f"{where}: {{{name}}}", "not an earlier stage", fix)
    for word in stage.words:
        if word.partition("=")[0] in OWN[stage.kind]:
            yield InputError(f"{where}: {word}", "the recipe decides the path of its product", "leave it out")
