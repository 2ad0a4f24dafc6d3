"""Rules about the data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from grpo_mega.config.limits import idle_problems, limit_problems
from grpo_mega.config.rules.shared import refuse
from grpo_mega.config.schema import GENERATED_TASKS, Config, DataConfig, RunConfig, SourceConfig
from grpo_mega.errors import InputError
from grpo_mega.judges.numerals import NUMERALS
from grpo_mega.judges.puzzles import why_refused


def check_data(config: Config) -> None:
    """Raises a ConfigError that lists every rule that `config.data` violates; no other part of `config` need be set."""
    refuse([*limit_problems(config, "data."), *idle_problems(config, "data."), *data_problems(config.data, config.run)])


def data_problems(data: DataConfig, run: RunConfig) -> Iterator[InputError]:
    """An error for each rule that the settings of the data violate."""
    if data.task in ("chain_sum", "tiny_mixture") and data.min_terms > data.max_terms:
        yield InputError(
            f"data.min_terms={data.min_terms}",
            f"must be at most data.max_terms={data.max_terms}",
            f"lower data.min_terms to {data.max_terms} or raise data.max_terms to {data.min_terms}",
        )
    if data.task == "jsonl" and not data.train_path and not data.sources:
        yield InputError("data.train_path", "not set, and data.task=jsonl reads it", "give data.train_path=FILE.jsonl")
    for number, language in enumerate(data.languages):
        if language not in NUMERALS:
            fix = f"choose one of {', '.join(NUMERALS)}"
            yield InputError(f"data.languages[{number}]={language}", "unknown", fix)
    if len({*data.languages}) < len(data.languages):
        yield InputError("data.languages", "has a language twice", "name each once")
    if data.sources:
        yield from _sources_problems(data)
    if data.tokenizer == "chars" and data.parse_special:
        what = "no effect with data.tokenizer=chars"
        yield InputError("data.parse_special=true", what, "set data.parse_special=false")
    if data.train_size == 1 and data.task == "tiny_mixture":
        yield InputError("data.train_size=1", "data.task=tiny_mixture has two tasks", "choose 2 or more")
    if data.curriculum != "none" and data.task in GENERATED_TASKS and data.train_size is None:
        yield InputError(
            f"data.curriculum={data.curriculum}",
            f"no effect with data.task={data.task}, whose problems never repeat",
            "give data.train_size, the number of problems that do",
        )
    if not data.frontier_low <= data.frontier_high:
        yield InputError(
            f"data.frontier_low={data.frontier_low}",
            f"must be at most data.frontier_high={data.frontier_high}",
            "lower it, or raise data.frontier_high",
        )
    yield from chat_template_problems(data)
    wording = [*wording_problems("data", data, data)]
    for name, source in data.sources.items():
        wording += wording_problems(f"data.sources.{name}", source, data)
    # A folder without a tokenizer leaves `chars`, with which every template and question is a problem.
    is_folder = run.init_from and (Path(run.init_from) / "config.json").is_file()
    if wording and data.tokenizer == "chars" and data.task == "jsonl" and is_folder:
        # The missing tokenizer explains all of them.
        wording = [no_tokenizer(f"run.init_from={run.init_from}")]
    yield from wording


def no_tokenizer(folder: object, instead: str = ", or give data.tokenizer=FOLDER with them") -> InputError:
    """The error about a model's folder without a tokenizer."""
    return InputError(
        str(folder),
        "has no tokenizer",
        f"download its tokenizer.json and tokenizer_config.json beside the weights{instead}",
    )


def _sources_problems(data: DataConfig) -> Iterator[InputError]:
    """Rules about the set of sources."""
    for field in ("train_path", "test_path"):
        if path := getattr(data, field):
            yield InputError(f"data.{field}={path}", "no effect with data.sources", f"set data.{field}=null")
    trained = {name: source for name, source in data.sources.items() if source.path or source.reasoning_gym}
    if not trained:
        yield InputError("data.sources", "none has training problems", "give one of them a path")
    for name, source in data.sources.items():
        yield from _source_problems(f"data.sources.{name}", name, source)
    weighted = [name for name, source in trained.items() if source.weight is not None]
    if weighted and len(weighted) < len(trained):
        without = next(name for name in trained if name not in weighted)
        fix = "give every source a weight, or none"
        yield InputError(f"data.sources.{without}.weight", "not set, but others' weights are", fix)


def _source_problems(field: str, name: str, source: SourceConfig) -> Iterator[InputError]:
    """Rules about one source."""
    if not re.fullmatch(r"\w[\w-]*", name):
        yield InputError(field, f"{name!r} is not a name", "use letters, digits, _ and - only")
    if source.weight is not None and not 0 < source.weight < float("inf"):
        yield InputError(f"{field}.weight={source.weight}", "out of range", "choose a value in (0, inf)")
    if source.reasoning_gym is not None:
        yield from _puzzle_problems(field, source)
        return
    yield from _idle(field, source, ("problems", "test_problems", "options"), f"without {field}.reasoning_gym")
    if not source.path and not source.test_path:
        fix = f"give {field}.path, {field}.test_path or {field}.reasoning_gym"
        yield InputError(field, "has no problems", fix)
    if not source.path:
        yield from _idle(field, source, ("weight", "difficulty"), f"without {field}.path")
    if source.answer_pattern is not None:
        try:
            re.compile(source.answer_pattern)
        except re.error as error:
            what = f"not a regular expression ({error})"
            yield InputError(f"{field}.answer_pattern={source.answer_pattern!r}", what, "correct the pattern")


def _puzzle_problems(field: str, source: SourceConfig) -> Iterator[InputError]:
    """Rules about a source whose problems reasoning-gym generates."""
    if why := why_refused(source.reasoning_gym or ""):
        # `why_refused` puts the fix after a semicolon.
        what, _, fix = why.partition("; ")
        yield InputError(f"{field}.reasoning_gym={source.reasoning_gym}", what, fix)
    of_files = ("path", "split", "test_path", "test_split", "prompt", "answer", "answer_pattern", "id", "difficulty")
    yield from _idle(field, source, (*of_files, "metadata"), f"with {field}.reasoning_gym")
    for name, least in (("problems", 1), ("test_problems", 0)):
        if (number := getattr(source, name)) < least:
            yield InputError(f"{field}.{name}={number}", "out of range", f"choose a value in [{least}, inf)")
    for option in sorted({"seed", "size"} & source.options.keys()):
        fix = f"give {field}.problems and {field}.test_problems"
        yield InputError(f"{field}.options.{option}", "no effect", fix)


def _idle(field: str, source: SourceConfig, names: Sequence[str], condition: str) -> Iterator[InputError]:
    """An error for each of these fields of a source that is set but has no effect."""
    for name in names:
        if getattr(source, name) != getattr(SourceConfig(), name):
            yield InputError(f"{field}.{name}", f"no effect {condition}", "leave it out")


def chat_template_problems(data: DataConfig) -> Iterator[InputError]:
    """Rules about what the chat template is given."""
    chats = "chat" in {data.template, *(source.template for source in data.sources.values())}
    if reserved := sorted({"messages", "add_generation_prompt", "strftime_now"} & data.template_options.keys()):
        fix = "leave it out (data.date sets the date)"
        yield InputError(f"data.template_options.{reserved[0]}", "given by the data", fix)
    try:
        date.fromisoformat(data.date or "2000-01-01")
    except ValueError:
        yield InputError(f"data.date={data.date}", "not a date", "write it as YYYY-MM-DD")
    for name, is_set in (("template_options", data.template_options), ("date", data.date)):
        if is_set and not chats:
            what = f"no effect with data.template={data.template!r}"
            yield InputError(f"data.{name}", what, "choose data.template=chat, or leave it out")


def wording_problems(name: str, asked: DataConfig | SourceConfig, data: DataConfig) -> Iterator[InputError]:
    """Rules about template, question and system message, of `data` or of one source, which inherits those of `data`."""
    template = data.template if asked.template is None else asked.template
    if data.tokenizer == "chars":
        what = "no effect with data.tokenizer=chars"
        if asked.template not in (None, "{prompt}"):
            fix = "give data.tokenizer=FOLDER, a Hugging Face model's, or choose data=jsonl"
            yield InputError(f"{name}.template={asked.template!r}", what, fix)
        if asked.question not in (None, "{prompt}"):
            yield InputError(f"{name}.question={asked.question!r}", what, "leave it out")
    elif template != "chat" and "{prompt}" not in template:
        what = "has no {prompt}, which stands for the problem"
        yield InputError(f"{name}.template={template!r}", what, "add it, or choose chat")
    if asked.question is not None and "{prompt}" not in asked.question:
        what = "has no {prompt}, which stands for the problem"
        yield InputError(f"{name}.question={asked.question!r}", what, "add it")
    if template != "chat" and (data.system if asked.system is None else asked.system):
        what = f"no effect with {name}.template={template!r}"
        yield InputError(f"{name}.system", what, f"choose {name}.template=chat, or set {name}.system=''")
