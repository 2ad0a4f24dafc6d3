"""The table of kinds in docs/rewards.md, and the tables in the code, are about the same kinds and options."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

from grpo_mega.config.help import help_text
from grpo_mega.config.schema.terms import OPTIONS, SCRIPTS
from grpo_mega.reward.kinds import FORMULAS, GUARDED, SERVICES
from grpo_mega.reward.manner import RANGES

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_every_kind_is_computed_in_one_way():
    assert sorted([*FORMULAS, *GUARDED, *SERVICES]) == sorted(OPTIONS)


def test_the_help_names_every_kind():
    (line,) = [line for line in help_text(["reward"]) if "by default the term's name: " in line]
    assert re.findall(r"\w+", line.partition("name: ")[2]) == [*OPTIONS]


def test_every_script_is_known():
    assert sorted(RANGES) == sorted(SCRIPTS)


def test_the_table_of_the_document_has_every_kind_with_its_options_and_defaults():
    table = DOCUMENT.read_text().split("| kind |")[1].split("\n\n")[0].splitlines()[2:]
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[2] for row in table}
    assert sorted(rows) == sorted(OPTIONS)
    for kind, cell in rows.items():
        shown = dict(re.findall(r"`(\w+)(?:: ([^`]*))?`", cell))
        assert [*shown] == [field.name for field in fields(OPTIONS[kind])], kind
        for field in fields(OPTIONS[kind]):
            if shown[field.name]:
                assert shown[field.name] == str(field.default).lower().removesuffix(".0"), (kind, field.name)
            else:
                assert field.default in (MISSING, "") or field.name == "pattern", (kind, field.name)
