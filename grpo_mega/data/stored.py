"""The stored problems of a run: read from every source, split, and checked for overlap.

The result of reading, templating and checking large files is cached for later starts. The name of a cached file is a
digest of everything that determines its content: the problem files, the tokenizer's files, the settings, and the code.
Processes that start together wait for the first, and load the file that it has written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import DataConfig, RewardTerm, SourceConfig
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.overlap import check_held_out, check_repeated, check_split, normalised
from grpo_mega.data.problems import ONLY, Problem, Unreachable, problems_of
from grpo_mega.data.records import Record, files_of, records
from grpo_mega.data.tasks.chain_sum import SPLIT_SEED
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.judges.puzzles import COLUMN, PuzzleItems, check_installed
from grpo_mega.platform.files import one_after_another, write_atomic
from grpo_mega.types import Prompt

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Interval of messages about how many problems have been read."""
GENERATED = SourceConfig(metadata=[COLUMN])
"""Columns of generated rows."""
TESTED, TRAINED = 0, 1 << 30
"""Seeds of the held-out and of the training puzzles. Most tasks generate item k from seed + k, so seeds must be far
apart to give different items."""
TRIES = 20
"""Most puzzles generated for each one needed; the others are duplicates."""
FOLDER = ".problems"
"""Folder of `run.root` with the cached files."""
LARGE = 1 << 20
"""Bytes of problem files from which on their problems are cached; reading fewer is faster than comparing them."""
NEWEST = 8
"""Number of cached files that are kept; older ones are deleted."""
_ROOMS = [Path(__file__).parents[1] / room for room in ("data", "reward", "judges")]
_CODE = sorted(path for room in _ROOMS for path in room.rglob("*.py"))


@dataclass(frozen=True)
class Stored:
    """The stored problems of a run.

    Attributes:
        train: {source: training problems} of every source that is trained on.
        validation: Problems held out of the training files for tuning.
        test: Problems of the test files, or, without any, also held out of the training files.
        identity: Fingerprint of the training problems and of how many are held out.
        warnings: Warnings about problems that quote special tokens or are repeated.
    """

    train: dict[str, list[Problem]]
    validation: list[Prompt]
    test: list[Prompt]
    identity: str
    warnings: tuple[str, ...] = ()


def sources_of(data: DataConfig) -> dict[str, SourceConfig]:
    """{name: source} of the configured sources; data.train_path and data.test_path form one without a name."""
    if data.sources:
        return data.sources
    return {ONLY: SourceConfig(path=data.train_path, test_path=data.test_path)}


def tokenizer_of(source: SourceConfig, data: DataConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the source's template, question and system message where it sets them."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    if (source.template, source.question, source.system) == (None, None, None):
        return tokenizer
    return tokenizer.asking(
        data.template if source.template is None else source.template,
        data.question if source.question is None else source.question,
        data.system if source.system is None else source.system,
    )


def read_stored(
    data: DataConfig, tokenizer: Tokenizer, unreachable: Unreachable, tell: Callable[[str], None] = lambda text: None
) -> Stored:
    """Reads every source, holds out problems and checks for duplicates; `tell` is called every few seconds.

    Raises:
        FileNotFoundError: A file is missing.
        InputError: A row is not a problem, too few are left for training, or more test problems than allowed are
            trained on.
    """
    warnings: list[str] = []
    # Both by field and path, as messages name them.
    train: dict[str, list[Problem]] = {}
    test: dict[str, list[Problem]] = {}
    # Read, or generate, the problems of every source.
    for name, source in sources_of(data).items():
        asking = tokenizer_of(source, data, tokenizer)
        if source.reasoning_gym:
            field = f"data.sources.{name}"
            for made, loaded in zip(puzzles(source, field), (train, test), strict=True):
                what = f"{field}.reasoning_gym={source.reasoning_gym}"
                if made:
                    loaded[what] = problems_of(made, what, asking, unreachable, warnings.append, name, GENERATED)
        for path, split, field, loaded in (
            (source.path, source.split, "path", train),
            (source.test_path, source.test_split, "test_path", test),
        ):
            if path:
                rows = _told(records(path, split), path, tell)
                problems = problems_of(rows, path, asking, unreachable, warnings.append, name, source)
                loaded[f"{_field(name, field)}={path}"] = problems
    # Hold out problems, and look for those that are both trained on and held out.
    every = [problem for problems in train.values() for problem in problems]
    kept, validation, taken = _split(every, data, train, bool(test))
    paths = " and ".join(field.partition("=")[2] for field in train)
    if len(kept) < len(held_out := [*validation, *taken]):
        warnings.append(
            f"only {len(kept)} of the {len(every)} problems of {paths} are trained on, {len(held_out)} are held out: "
            f"data.validation_size={data.validation_size}" + ("" if test else f", data.test_size={data.test_size}")
        )
    warnings += check_repeated(_asked(every), paths)
    warnings += check_split(_asked(kept), _asked(validation + taken), paths)
    of_files = {field: _asked(problems) for field, problems in train.items()}
    for field, problems in test.items():
        warnings += check_repeated(_asked(problems), field.partition("=")[2])
        warnings += check_held_out(of_files, _asked(problems), field, data.shared_test_problems)
    tested = [problem for problems in test.values() for problem in problems]
    # Over all problems in order, held-out ones included: resumed after any change, a run would repeat or skip problems.
    checksum = hashlib.sha256()
    for problem in every:
        checksum.update(repr(problem).encode())
    identity = f"sha256={checksum.hexdigest()[:16]} held_out={data.validation_size}+{len(taken)}"
    by_source = {name: [p for p in kept if p.source == name] for name in dict.fromkeys(p.source for p in every)}
    return Stored(by_source, prompts_of(validation), prompts_of(tested or taken), identity, tuple(warnings))


def puzzles(source: SourceConfig, field: str) -> tuple[list[Record], list[Record]]:
    """Generates the training and the held-out problems of a source with `reasoning_gym`, all distinct.

    The number of training problems does not change which problems are held out.

    Args:
        source: Task, settings and numbers of problems.
        field: The source's field, for messages.

    Raises:
        InputError: The library is missing or another release, the task rejects the settings, fails to generate an item
            with them, or has too few distinct problems.
    """
    try:
        check_installed()
    except InputError as error:
        where = f"{field}.reasoning_gym={source.reasoning_gym}: {error.where}"
        raise InputError(where, error.what, error.fix) from error
    seen: set[str] = set()
    # The held-out ones come first: problems that are also drawn for training are left out there, not here.
    tested = _distinct(source, TESTED, source.test_problems, seen, f"{field}.test_problems")
    return _distinct(source, TRAINED, source.problems, seen, f"{field}.problems"), tested


def _distinct(source: SourceConfig, seed: int, wanted: int, seen: set[str], field: str) -> list[Record]:
    """`wanted` puzzles whose problems are not yet `seen`, compared without case and spacing."""
    if not wanted:
        return []
    task, options = str(source.reasoning_gym), f"{field.rpartition('.')[0]}.options"
    items = PuzzleItems(task, source.options, seed, TRIES * wanted, options)
    rows: list[Record] = []
    for k in range(TRIES * wanted):
        fields = items[k]
        wording = normalised(fields["prompt"])
        if wording in seen:
            continue
        seen.add(wording)
        rows.append(Record(f"reasoning-gym {task}, item {seed + k}", f"{task}/{seed + k}", fields))
        if len(rows) == wanted:
            return rows
    raise InputError(
        f"{field}={wanted}",
        f"{TRIES * wanted} items of {task} have only {len(rows)} more distinct problems",
        f"choose that many or fewer, or {options} that allow more",
    )


def _told(rows: Iterable[Record], path: str, tell: Callable[[str], None]) -> Iterator[Record]:
    """The rows of a file, whose number is told every few seconds."""
    told = time.monotonic()
    for number, row in enumerate(rows, start=1):
        if number % 500 == 0 and time.monotonic() > told + SECONDS:
            told = time.monotonic()
            tell(f"{number:,} problems of {path} are read")
        yield row


def _split(
    every: list[Problem], data: DataConfig, train: Mapping[str, list[Problem]], has_test: bool
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Splits the training files' problems into training, validation and, without test files, test problems."""
    test_size = 0 if has_test else data.test_size
    held_out = data.validation_size + test_size
    # Seeded apart from the run, so that runs with different seeds hold out the same problems.
    shuffled = random.Random(SPLIT_SEED).sample(every, len(every))
    cut = max(0, len(every) - held_out)
    kept = shuffled[:cut]
    used_up = [
        field for field, problems in train.items() if not {p.source for p in problems} & {p.source for p in kept}
    ]
    if used_up:
        names, instead = "data.validation_size", ""
        if not has_test:
            names, instead = f"{names} + data.test_size", f", or give {_field(every[0].source, 'test_path')}"
        lower, have, one = "lower it", "have", f"one of {used_up[0]}"
        if len(train) == 1:
            lower, have, one = f"lower it to {len(every) - 1} or less", "has", "one"
        what = f"{' and '.join(train)} {have} {len(every)} problems, and at least {one} must be left for training"
        raise InputError(f"{names}={held_out}", what, f"{lower}{instead}")
    return kept, shuffled[cut : cut + data.validation_size], shuffled[cut + data.validation_size :]


def _field(name: str, field: str) -> str:
    """Name of the setting that holds a source's file, for messages."""
    if name != ONLY:
        return f"data.sources.{name}.{field}"
    return "data.train_path" if field == "path" else "data.test_path"


def _asked(problems: Sequence[Problem]) -> list[Prompt]:
    """The problems without their source's template, so that equal problems compare equal."""
    return [replace(problem.prompt, text=problem.asked) for problem in problems]


def prompts_of(problems: Sequence[Problem]) -> list[Prompt]:
    """The prompts of problems."""
    return [problem.prompt for problem in problems]


def read_once(
    root: str, data: DataConfig, terms: Sequence[RewardTerm], read: Callable[[], Stored], keep: bool
) -> Stored:
    """The problems that `read` returns for these settings, loaded from the cached file if they are large and it exists.

    Without `keep` nothing is written. A cached file that cannot be read or written is ignored.
    """
    files = _files(data)
    if sum(file.stat().st_size for file in files) < LARGE:
        return read()
    path = Path(root) / FOLDER / f"{_digest(data, terms, files)}.json"
    if stored := _loaded(path):
        return stored
    if not keep:
        return read()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Processes that start together queue here. Those that come later find the file and do not read again.
        with one_after_another(path.parent / ".lock"):
            if not path.is_file():
                write_atomic(path, _text(read()))
                for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-NEWEST]:
                    old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: the problems are not kept, and are read at every start: %s", path, error)
    # The process that wrote the file loads it too, so that all processes have what JSON makes of the problems.
    return _loaded(path) or read()


def _files(data: DataConfig) -> list[Path]:
    """The files of all sources; none if a source is generated or a file cannot be found, which reading reports."""
    files: list[Path] = []
    for source in sources_of(data).values():
        if source.reasoning_gym:
            return []
        for path, split in ((source.path, source.split), (source.test_path, source.test_split)):
            try:
                files += files_of(Path(path), split) if path else []
            except (ValueError, OSError):
                return []
    return files


def _digest(data: DataConfig, terms: Sequence[RewardTerm], files: list[Path]) -> str:
    """Checksum of everything that determines the problems."""
    # The terms decide which answers are unreachable, and the libraries how templates are rendered and encoded.
    about = [asdict(data), [asdict(term) for term in terms]]
    libraries = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    digest = hashlib.sha256(json.dumps([about, libraries], sort_keys=True, default=str).encode())
    tokenizer = Path(data.tokenizer)
    beside = [file for file in sorted(tokenizer.glob("*")) if file.suffix in (".json", ".jinja", ".model", ".txt")]
    for file in (*files, *beside, *_CODE):
        with file.open("rb") as content:
            digest.update(f"{file}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()[:24]


def _text(stored: Stored) -> str:
    rows = {
        name: [[vars(problem.prompt), problem.asked, problem.source, problem.difficulty] for problem in problems]
        for name, problems in stored.train.items()
    }
    held_out = [[vars(prompt) for prompt in prompts] for prompts in (stored.validation, stored.test)]
    return json.dumps([rows, *held_out, stored.identity, stored.warnings])


def _loaded(path: Path) -> Stored | None:
    """The content of a cached file; None if it does not exist or is damaged."""
    try:
        rows, validation, test, identity, warnings = json.loads(path.read_text(encoding="utf-8"))
        train = {name: [Problem(_prompt(row[0]), *row[1:]) for row in of_source] for name, of_source in rows.items()}
        return Stored(train, [*map(_prompt, validation)], [*map(_prompt, test)], identity, tuple(warnings))
    except OSError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged, and the problems are read again: %r", path, error)
        path.unlink(missing_ok=True)
        return None


def _prompt(fields: dict[str, Any]) -> Prompt:
    return Prompt(**fields | {"token_ids": tuple(fields["token_ids"])})
