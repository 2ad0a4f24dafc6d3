"""The code uses the words that docs/code.md explains: each names something, and no class has the name of another."""

from __future__ import annotations

import ast
import re
from collections import Counter

from ranks import REPOSITORY

OTHERS_WORDS = {
    "trajectory": "sample",
    "actor": "policy",
    "minibatch": "mini-batch",
    "microbatch": "micro-batch",
    "rewarder": "term",
}
"""Words of other projects for what has a name here."""


def named() -> tuple[Counter[str], set[str]]:
    """Class names of the product with their number, and the words within all names: `StepInProgress` has step."""
    classes: Counter[str] = Counter()
    words: set[str] = set()
    for path in (REPOSITORY / "grpo_mega").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name):
                    classes[name] += 1
                case ast.FunctionDef(name=name) | ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                    pass
                case _:
                    continue
            words |= {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return classes, words


def glossary() -> list[str]:
    """The words that docs/code.md explains."""
    _, _, section = (REPOSITORY / "docs/code.md").read_text().partition("\n## Words\n")
    return re.findall(r"^- \*\*([a-z-]+)\*\*: ", section.partition("\n## ")[0], re.MULTILINE)


def test_words_of_the_glossary_name_something() -> None:
    explained, (_, words) = glossary(), named()
    assert len(explained) > 20
    assert len(explained) == len(set(explained))
    assert not [word for word in explained if not {*word.split("-")} <= words | {f"{word}s"}]


def test_what_has_a_name_has_no_other() -> None:
    classes, words = named()
    assert not [name for name, count in classes.items() if count > 1]
    assert not OTHERS_WORDS.keys() & words
    assert set(OTHERS_WORDS.values()) <= {*glossary()}
