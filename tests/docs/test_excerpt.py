"""README shows the loop as it is: its excerpt is text of the file that it names, line by line."""

from __future__ import annotations

import re
import textwrap

from documents import blocks
from ranks import REPOSITORY

README = REPOSITORY / "README.md"


def test_the_loop_in_the_readme_is_the_files_own_text() -> None:
    sentence = re.search(r"One iteration, from \[`(\S+?)`\]", README.read_text())
    assert sentence, "README says which file the loop is from"
    before = README.read_text()[: sentence.start()].count("\n")
    excerpt = next(block for block in blocks(README) if block.language == "python" and block.line > before)
    # Formatters put other numbers of empty lines between functions than between methods.
    shown, lines = _not_empty(excerpt.text), _not_empty((REPOSITORY / sentence[1]).read_text())
    windows = [textwrap.dedent("\n".join(lines[at : at + len(shown)])).split("\n") for at in range(len(lines))]
    nearest = max(windows, key=lambda window: sum(map(str.__eq__, window, shown)))
    assert shown == nearest, f"{sentence[1]} has no such lines as README.md shows from line {excerpt.line} on"


def _not_empty(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
