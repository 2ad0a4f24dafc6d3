"""Stored problems that are read once: what reading, templating and checking large files came to, kept for every start.

The name of a kept file is a digest of all that it follows from: the problems' files, the tokenizer's, the settings, and
the code. Processes that start together wait for the first, and load what it has kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.data.problems import Problem
from grpo_mega.data.records import files_of
from grpo_mega.data.sources import Stored, sources_of
from grpo_mega.platform.files import one_after_another, write_atomic
from grpo_mega.types import Prompt

logger = logging.getLogger(__name__)

FOLDER = ".problems"
"""Folder of `run.root` with the kept files."""
LARGE = 1 << 20
"""Bytes of files of problems from which they are kept; less is read faster than it is compared."""
NEWEST = 8
"""Number of files that stay."""
_ROOMS = [Path(__file__).parents[1] / room for room in ("data", "reward", "judges")]
_CODE = sorted(path for room in _ROOMS for path in room.rglob("*.py"))


def read_once(config: Config, read: Callable[[], Stored], keep: bool) -> Stored:
    """What `read` makes of the problems of a configuration, from the kept file if they are large and there is one.

    Without `keep` nothing is written. A file that cannot be read or written is as good as none.
    """
    files = _files(config)
    if sum(file.stat().st_size for file in files) < LARGE:
        return read()
    path = Path(config.run.root) / FOLDER / f"{_digest(config, files)}.json"
    if stored := _loaded(path):
        return stored
    if not keep:
        return read()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_after_another(path.parent / ".lock"):
            if not path.is_file():
                write_atomic(path, _text(read()))
                for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-NEWEST]:
                    old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: the problems are not kept, and are read at every start: %s", path, error)
    return _loaded(path) or read()  # what all other processes get, too


def _files(config: Config) -> list[Path]:
    """The files that all sources are read from; none if some do not exist, or are made up, so that reading says so."""
    found: list[Path] = []
    for source in sources_of(config.data).values():
        if source.reasoning_gym:
            return []
        for path, split in ((source.path, source.split), (source.test_path, source.test_split)):
            try:
                found += files_of(Path(path), split) if path else []
            except (ValueError, OSError):
                return []
    return found


def _digest(config: Config, files: list[Path]) -> str:
    """Checksum of everything that the problems follow from."""
    about = [asdict(config.data), [asdict(term) for term in config.reward.terms]]
    libraries = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    digest = hashlib.sha256(json.dumps([about, libraries], sort_keys=True, default=str).encode())
    tokenizer = Path(config.data.tokenizer)
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
    """The content of a kept file; None if there is none, or if it is damaged."""
    try:
        rows, validation, test, identity, warnings = json.loads(path.read_text(encoding="utf-8"))
        train = {name: [Problem(_prompt(row[0]), *row[1:]) for row in of_it] for name, of_it in rows.items()}
        return Stored(train, [*map(_prompt, validation)], [*map(_prompt, test)], identity, tuple(warnings))
    except OSError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged, and the problems are read again: %r", path, error)
        path.unlink(missing_ok=True)
        return None


def _prompt(fields: dict[str, Any]) -> Prompt:
    return Prompt(**fields | {"token_ids": tuple(fields["token_ids"])})
