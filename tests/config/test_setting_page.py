"""docs/configuration.md is the schema's and the configuration files' own text."""

from __future__ import annotations

import re
from dataclasses import fields

from ranks import REPOSITORY

from grpo_mega.config.listing import MOST_GIVEN
from grpo_mega.config.load import groups, settings
from grpo_mega.config.schema import PartsConfig
from grpo_mega.config.setting_page import page


def test_the_page_is_made_of_the_schema_and_the_files() -> None:
    written = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert written == page(), "python -m grpo_mega.config.setting_page > docs/configuration.md"


def test_choices_are_listed_where_the_text_does_not_name_them() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*)", page(), re.MULTILINE))
    assert rows["model.dtype"].count("bf16") == 1
    assert " One of h100, h200, h800," in rows["cluster.gpu"]
    assert rows["model.init_std"].startswith("`0.02`; (0, inf) |")


def test_every_part_of_the_model_is_named_in_the_section_of_all() -> None:
    about = page().partition("#### optimizer.parts\n")[2].partition("#####")[0]
    assert [field.name for field in fields(PartsConfig) if f"{field.name} (" not in about] == []


def test_every_setting_and_every_option_has_a_row() -> None:
    twelve, whole = page().split("## Groups and their options")
    lines = whole.splitlines()
    assert re.findall(r"^\| `([\w.]+)` \|", twelve, re.MULTILINE) == [*MOST_GIVEN]
    for name in {re.sub(r"^(optimizer\.parts)\.\w+", r"\1.PART", name) for name in settings()}:
        (row,) = [line for line in lines if line.startswith(f"| `{name}` | ")]
        assert row.count(" | ") >= 2
        assert len(row.split(" | ")[2]) > 10, f"{name} says nothing"
    for options in groups().values():
        for option in options:
            assert any(line.startswith(f"| `{option}` | ") and len(line) > 30 for line in lines), option
