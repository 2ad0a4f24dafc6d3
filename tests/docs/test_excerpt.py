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
    shown, lines = excerpt.text.split("\n"), (REPOSITORY / sentence[1]).read_text().splitlines()
    windows = [textwrap.dedent("\n".join(lines[at : at + len(shown)])).split("\n") for at in range(len(lines))]
    nearest = max(windows, key=lambda window: sum(map(str.__eq__, window, shown)))
    assert shown == nearest, f"{sentence[1]} has no such lines as README.md shows from line {excerpt.line} on"
