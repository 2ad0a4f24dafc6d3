"""Rules about the data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from grpo_mega.config.limits import limit_problems
from grpo_mega.config.numerals import NUMERALS
from grpo_mega.config.rules.problems import at_most, refuse
from grpo_mega.config.schema import GENERATED_TASKS, Config, DataConfig, SourceConfig
from grpo_mega.judges.puzzles import why_refused


def check_data(config: Config) -> None:
    """Raises a ConfigError that lists every rule that `config.data` violates; no other part of `config` need be set."""
    refuse([*limit_problems(config, "data."), *data_problems(config)])


def data_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the data violate."""
    data = config.data
    if data.task in ("chain_sum", "tiny_mixture"):
        yield from at_most(config, "data.min_terms", "data.max_terms")
    for name, path in (("data.train_path", data.train_path), ("data.test_path", data.test_path)):
        if data.task in GENERATED_TASKS and path is not None:
            yield f"{name}={path} has no effect with data.task={data.task}; set {name}=null, or choose data=jsonl"
    if data.task == "jsonl" and not data.train_path and not data.sources:
        yield "data.train_path is not set, and data.task=jsonl reads it; give data.train_path=FILE.jsonl"
    yield from _languages_problems(data)
    yield from _sources_problems(data)
    if data.task in GENERATED_TASKS and data.tokenizer != "chars":
        yield f"data.tokenizer={data.tokenizer} has no effect with data.task={data.task}; set it to chars"
    if data.tokenizer == "chars" and data.parse_special:
        yield "data.parse_special=true has no effect with data.tokenizer=chars; set data.parse_special=false"
    if data.train_size is not None and data.task not in GENERATED_TASKS:
        yield f"data.train_size={data.train_size} has no effect with data.task={data.task}; set data.train_size=null"
    if data.train_size == 1 and data.task == "tiny_mixture":
        yield "data.train_size=1 must be at least 2 with data.task=tiny_mixture, one problem of each of its tasks"
    if data.curriculum != "none" and data.task in GENERATED_TASKS and data.train_size is None:
        yield (
            f"data.curriculum={data.curriculum} has no effect with data.task={data.task}, whose problems never repeat; "
            "give data.train_size, the number of problems that do"
        )
    if not data.frontier_low <= data.frontier_high:
        yield (
            f"data.frontier_low={data.frontier_low} must be at most data.frontier_high={data.frontier_high}; lower it, "
            "or raise the other"
        )
    yield from chat_template_problems(data)
    wording = [*wording_problems("data", data, data)]
    for name, source in data.sources.items():
        wording += wording_problems(f"data.sources.{name}", source, data)
    is_folder = config.run.init_from and (Path(config.run.init_from) / "config.json").is_file()
    if wording and data.tokenizer == "chars" and data.task == "jsonl" and is_folder:
        wording = [no_tokenizer(f"run.init_from={config.run.init_from}")]
    yield from wording


def no_tokenizer(folder: object) -> str:
    """Message about a model's folder without one."""
    return (
        f"{folder} has no tokenizer: download its tokenizer.json and tokenizer_config.json beside the weights, or give "
        "data.tokenizer=FOLDER, where they are"
    )


def _languages_problems(data: DataConfig) -> Iterator[str]:
    """Rules about the languages of the working."""
    if data.languages and data.task != "chain_sum":
        yield f"data.languages has no effect with data.task={data.task}; set data.languages=[]"
    for number, language in enumerate(data.languages):
        if language not in NUMERALS:
            yield f"data.languages[{number}]={language}: choose one of {', '.join(NUMERALS)}"
    if len({*data.languages}) < len(data.languages):
        yield "data.languages has a language twice; name each once"


def _sources_problems(data: DataConfig) -> Iterator[str]:
    """Rules about the set of sources."""
    if not data.sources:
        return
    if data.task in GENERATED_TASKS:
        yield f"data.sources has no effect with data.task={data.task}; choose data=jsonl"
    if data.train_path or data.test_path:
        yield "data.train_path and data.test_path have no effect with data.sources; set them to null"
    trained = {name: source for name, source in data.sources.items() if source.path or source.reasoning_gym}
    if not trained:
        yield "data.sources has nothing to train on; give one of them a path"
    for name, source in data.sources.items():
        yield from _source_problems(f"data.sources.{name}", name, source)
    weighted = [name for name, source in trained.items() if source.weight is not None]
    if weighted and len(weighted) < len(trained):
        without = next(name for name in trained if name not in weighted)
        yield f"data.sources.{without}.weight is not set, but others' are; give every source a weight, or none"


def _source_problems(field: str, name: str, source: SourceConfig) -> Iterator[str]:
    """Rules about one source."""
    if not re.fullmatch(r"\w[\w-]*", name):
        yield f"{field}: the name of a source has letters, digits, _ and - only"
    if source.weight is not None and not 0 < source.weight < float("inf"):
        yield f"{field}.weight={source.weight}: choose a value in (0, inf)"
    if source.reasoning_gym is not None:
        yield from _puzzle_problems(field, source)
        return
    yield from _without_effect(field, source, ("problems", "test_problems", "options"), "without", "reasoning_gym")
    if not source.path and not source.test_path:
        yield f"{field} has no problems; give {field}.path, {field}.test_path or {field}.reasoning_gym"
    if not source.path:
        for name in ("weight", "difficulty"):
            if getattr(source, name) is not None:
                yield f"{field}.{name} has no effect without {field}.path; leave it out"
    if source.answer_pattern is not None:
        try:
            re.compile(source.answer_pattern)
        except re.error as error:
            yield f"{field}.answer_pattern={source.answer_pattern!r} is no regular expression: {error}"


def _puzzle_problems(field: str, source: SourceConfig) -> Iterator[str]:
    """Rules about a source whose problems reasoning-gym generates."""
    if why := why_refused(source.reasoning_gym or ""):
        yield f"{field}.reasoning_gym={source.reasoning_gym}: {why}"
    of_files = ("path", "split", "test_path", "test_split", "prompt", "answer", "answer_pattern", "id", "difficulty")
    yield from _without_effect(field, source, (*of_files, "metadata"), "with", "reasoning_gym")
    if source.problems < 1:
        yield f"{field}.problems={source.problems}: choose a value in [1, inf)"
    if source.test_problems < 0:
        yield f"{field}.test_problems={source.test_problems}: choose a value in [0, inf)"
    for option in sorted({"seed", "size"} & source.options.keys()):
        yield f"{field}.options.{option} has no effect; give {field}.problems and {field}.test_problems"


def _without_effect(field: str, source: SourceConfig, names: Sequence[str], with_: str, other: str) -> Iterator[str]:
    """A message for each of these fields that is set but has no effect."""
    for name in names:
        if getattr(source, name) != getattr(SourceConfig(), name):
            yield f"{field}.{name} has no effect {with_} {field}.{other}; leave it out"


def chat_template_problems(data: DataConfig) -> Iterator[str]:
    """Rules about what the chat template is given."""
    chats = "chat" in {data.template, *(source.template for source in data.sources.values())}
    if data.template_options and not chats:
        yield f"data.template_options has no effect with data.template={data.template!r}; choose chat, or leave it out"
    if reserved := sorted(
        {"messages", "tools", "add_generation_prompt", "strftime_now"} & data.template_options.keys()
    ):
        yield f"data.template_options.{reserved[0]} is given by the data; leave it out (data.date sets the date)"
    try:
        date.fromisoformat(data.date or "2000-01-01")
    except ValueError:
        yield f"data.date={data.date}: write it as YYYY-MM-DD"
    if data.date and not chats:
        yield f"data.date has no effect with data.template={data.template!r}; choose chat, or leave it out"


def wording_problems(name: str, asked: DataConfig | SourceConfig, data: DataConfig) -> Iterator[str]:
    """Rules about template, question and system message, of `data` or of one source, which inherits those of `data`."""
    template = data.template if asked.template is None else asked.template
    if data.tokenizer == "chars":
        if asked.template not in (None, "{prompt}"):
            yield (
                f"{name}.template={asked.template!r} has no effect with data.tokenizer=chars; give "
                "data.tokenizer=FOLDER, a Hugging Face model's, or choose data=jsonl"
            )
        if asked.question not in (None, "{prompt}"):
            yield f"{name}.question={asked.question!r} has no effect with data.tokenizer=chars; leave it out"
    elif template != "chat" and "{prompt}" not in template:
        yield f"{name}.template={template!r} has no {{prompt}}, which stands for the problem; add it, or choose chat"
    if asked.question is not None and "{prompt}" not in asked.question:
        yield f"{name}.question={asked.question!r} has no {{prompt}}, which stands for the problem; add it"
    if template != "chat" and (data.system if asked.system is None else asked.system):
        yield f"{name}.system has no effect with {name}.template={template!r}; choose chat, or set {name}.system=''"
