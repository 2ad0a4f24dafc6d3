"""Detects duplicate problems: held-out problems among the training problems, and repeats within these."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence

from grpo_mega.errors import InputError
from grpo_mega.types import Prompt

SHOWN = 3
"""Number of problems that a message names."""


def wording(prompt: Prompt) -> str:
    """Normalised text of a prompt."""
    return normalised(prompt.text)


def normalised(text: str) -> str:
    """Normal form of a text, equal for texts that differ only in case, white space and Unicode variants.

    A single letter keeps its case, and superscripts and subscripts are kept: in mathematics a and A differ, and so do
    2\u00b2 and 22.
    """
    if not text.isascii():
        # NFC first, so that a letter and its combining accent are one character when each is folded alone. NFKC would
        # turn 2\u00b2 into 22.
        text = "".join(
            each
            if unicodedata.decomposition(each).startswith(("<super>", "<sub>"))
            else unicodedata.normalize("NFKC", each)
            for each in unicodedata.normalize("NFC", text)
        )
    return " ".join(word if len(word) == 1 else word.casefold() for word in text.split())


def check_held_out(
    train: Mapping[str, Sequence[Prompt]], test: Sequence[Prompt], test_field: str, allowed: int = 0
) -> list[str]:
    """Warnings about test problems that are also training problems, one for each source that has some.

    Args:
        train: {field and path, such as data.train_path=FILE, or data.sources.NAME.reasoning_gym=TASK for generated
            problems: the problems of that source}.
        test: Problems of one test file, or of one generating source.
        test_field: Field and path, or task, of the test problems.
        allowed: Largest allowed number of such problems.

    Raises:
        InputError: More than `allowed` test problems are trained on.
    """
    known = {field: {wording(prompt) for prompt in prompts} for field, prompts in train.items()}
    shared = {field: [p for p in test if wording(p) in wordings] for field, wordings in known.items()}
    shared = {field: prompts for field, prompts in shared.items() if prompts}
    # Counted by id, as a test problem may be in several sources.
    count = len({prompt.id for prompts in shared.values() for prompt in prompts})
    if count == len(test) > allowed:
        raise InputError(
            test_field,
            f"all {count} problems are in {' and '.join(shared)} too: held-out accuracy would be that of training",
            _other_puzzles(test_field) or "give a test file with different problems",
        )
    warnings = [
        f"{len(prompts)} of the {len(test)} problems of {test_field} are in {field} too, and held-out accuracy counts "
        f"them: {_named(prompts)}"
        for field, prompts in shared.items()
    ]
    if count > allowed:
        raise InputError(
            test_field,
            "; ".join(warnings),
            f"to keep them apart, {_remedy(list(shared), test_field)}; to accept them, set "
            f"data.shared_test_problems={count} (--shared-test-problems {count} of python -m grpo_mega.new)",
        )
    return warnings


def _remedy(train: Sequence[str], test: str) -> str:
    """Fix that removes the problems of the field `test` from those of `train`."""
    if fix := _other_puzzles(test):
        return fix
    generating = [source for field in train if (source := _generating_source(field))]
    remedies = [f"choose {source}.options that generate different problems" for source in generating]
    if len(generating) < len(train):
        remedies.insert(0, "remove them from one of the files (tools/data.py does, with --against)")
    return " and ".join(remedies)


def _other_puzzles(test: str) -> str:
    """Fix for a test field whose problems are generated, so that no file holds them; empty for a file."""
    source = _generating_source(test)
    return source and f"choose {source}.options that generate different problems, or {source}.test_problems=0"


def _generating_source(field: str) -> str:
    """Source, such as data.sources.NAME, of a field whose problems are generated; empty for a file."""
    name = field.partition("=")[0]
    return name.removesuffix(".reasoning_gym") if name.endswith(".reasoning_gym") else ""


def check_split(train: Sequence[Prompt], held_out: Sequence[Prompt], path: str) -> list[str]:
    """Warnings about held-out problems that are trained on because the files `path` contain them more than once."""
    known = {wording(prompt) for prompt in train}
    shared = [prompt for prompt in held_out if wording(prompt) in known]
    if not shared:
        return []
    return [
        f"{len(shared)} of the {len(held_out)} problems that are held out are trained on too, because {path} repeats "
        f"them: {_named(shared)}"
    ]


def check_repeated(prompts: Sequence[Prompt], path: str) -> list[str]:
    """Warnings about problems that the files `path` contain more than once, and about those whose answers differ."""
    copies = defaultdict(list)
    for prompt in prompts:
        copies[wording(prompt)].append(prompt)
    repeated = [same for same in copies.values() if len(same) > 1]
    if not repeated:
        return []
    message = f"{len(repeated)} problems occur more than once in {path}: {_named([same[1] for same in repeated])}"
    differing = [same for same in repeated if len({prompt.answer.strip() for prompt in same}) > 1]
    if not differing:
        return [message]
    return [f"{message}; {len(differing)} of them with different answers: {_named([same[1] for same in differing])}"]


def _named(prompts: Sequence[Prompt]) -> str:
    """Ids of the first `SHOWN` prompts, for messages."""
    more = ", ..." if len(prompts) > SHOWN else ""
    return ", ".join(repr(prompt.id) for prompt in prompts[:SHOWN]) + more
