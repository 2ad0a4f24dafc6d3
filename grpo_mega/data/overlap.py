"""Problems that are there twice: held out and trained on, or several times in one file."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence

from grpo_mega.types import Prompt

SHOWN = 3
"""So many problems are named."""


def wording(prompt: Prompt) -> str:
    """What two prompts have in common that ask the same: the text but for case, white space and Unicode's variants.

    A letter that stands alone keeps its case, and what is raised or lowered stays so: in mathematics a and A, or
    2\u00b2 and 22, are not the same.
    """
    text = "".join(map(_folded, unicodedata.normalize("NFC", prompt.text)))
    return " ".join(word if len(word) == 1 else word.casefold() for word in text.split())


def _folded(character: str) -> str:
    raised_or_lowered = unicodedata.decomposition(character).startswith(("<super>", "<sub>"))
    return character if raised_or_lowered else unicodedata.normalize("NFKC", character)


def check_held_out(train: Sequence[Prompt], test: Sequence[Prompt], train_path: str, test_path: str) -> list[str]:
    """Warns of problems of the test file that are in the training file too.

    Raises:
        ValueError: All of them are, so that nothing is held out.
    """
    known = {wording(prompt) for prompt in train}
    shared = [prompt for prompt in test if wording(prompt) in known]
    if len(shared) == len(test):
        raise ValueError(
            f"all {len(test)} problems of data.test_path={test_path} are in data.train_path={train_path} too: held-out "
            "accuracy would be that of training; give a test file with other problems"
        )
    if not shared:
        return []
    return [
        f"{len(shared)} of the {len(test)} problems of data.test_path={test_path} are in data.train_path={train_path} "
        f"too, and held-out accuracy counts them: {_named(shared)}; remove them from one of the files"
    ]


def check_split(train: Sequence[Prompt], validation: Sequence[Prompt], path: str) -> list[str]:
    """Warns of validation problems that training has too: the file `path`, which both come from, repeats them."""
    known = {wording(prompt) for prompt in train}
    shared = [prompt for prompt in validation if wording(prompt) in known]
    if not shared:
        return []
    return [
        f"{len(shared)} of the {len(validation)} validation problems are trained on too, because {path} repeats them: "
        f"{_named(shared)}"
    ]


def check_repeated(prompts: Sequence[Prompt], path: str) -> list[str]:
    """Warns of problems that a file holds more than once, and of those whose answers then differ."""
    copies = defaultdict(list)
    for prompt in prompts:
        copies[wording(prompt)].append(prompt)
    repeated = [same for same in copies.values() if len(same) > 1]
    if not repeated:
        return []
    found = f"{len(repeated)} problems are more than once in {path}: {_named([same[1] for same in repeated])}"
    differing = [same for same in repeated if len({prompt.answer.strip() for prompt in same}) > 1]
    if not differing:
        return [found]
    return [f"{found}; {len(differing)} of them with different answers: {_named([same[1] for same in differing])}"]


def _named(prompts: Sequence[Prompt]) -> str:
    """The first ids, for people."""
    more = ", ..." if len(prompts) > SHOWN else ""
    return ", ".join(repr(prompt.id) for prompt in prompts[:SHOWN]) + more
