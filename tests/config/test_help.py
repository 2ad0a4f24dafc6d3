"""`--help` shows every setting with what the schema says of it, and does so before anything heavy is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from grpo_mega.config.help import help_text
from grpo_mega.config.limits import limits_of
from grpo_mega.config.listing import MOST_GIVEN, section_types
from grpo_mega.config.load import config_dir, groups, settings
from grpo_mega.config.schema import Config
from grpo_mega.config.schema.terms import OPTIONS


@pytest.fixture(scope="module")
def whole() -> str:
    return "\n".join(help_text([*section_types()]))


@pytest.fixture(scope="module")
def short() -> str:
    return "\n".join(help_text([]))


def test_without_a_section_the_groups_and_the_twelve_that_most_experiments_give_are_shown(short: str) -> None:
    known = {*settings()}
    given = [line.split("=")[0].split(",")[0].strip() for line in short.splitlines() if line.startswith("  ")]
    assert [name for name in given if name in known] == [*MOST_GIVEN]
    assert [name for options in groups().values() for name in options if name not in short] == []
    assert "\"rollout.stop=['<|im_end|>']\"" in short
    assert "model        [from_folder]" in short


def test_every_setting_is_there_with_its_docstring_and_what_it_may_hold(whole: str) -> None:
    lines = whole.splitlines()
    for name in settings():
        heads = (f"  {name}=", f"  {name},")  # docstrings are indented further, and may begin a line with a name, too
        (at,) = (number for number, line in enumerate(lines) if line.startswith(heads))
        assert lines[at + 1].startswith("      ")
        assert str(limits_of(Config).get(name, "")) in lines[at]


def test_what_a_setting_has_an_effect_with_is_shown(whole: str) -> None:
    assert "algorithm.tau_pos=1.0  in (0, inf)  (with algorithm.objective=sapo)" in whole
    (section,) = re.findall(r"^rollout\.sglang: .*", whole, re.MULTILINE)
    assert section.endswith("Only with rollout.engine=sglang.")
    (section,) = re.findall(r"^pairs: .*", whole, re.MULTILINE)
    assert section.endswith("Only with run.trains=reward_model or process_reward_model.")
    assert whole.count("(with run.trains=") == 1, "the condition is that of the section"
    assert 'pairs.separators=["\\n"]  (with run.trains=process_reward_model)' in whole


def test_the_options_of_every_kind_of_reward_term_are_shown(whole: str) -> None:
    for kind, options in OPTIONS.items():
        text = whole.partition(f"\nkind {kind}\n")[2].partition("\nkind ")[0]
        for field in fields(options):
            assert re.search(rf"^  {field.name}[=,].*\n      \S", text, re.MULTILINE), f"{kind} {field.name}"


def test_defaults_and_docstrings_are_shown(whole: str) -> None:
    flat = " ".join(whole.split())
    for shown in (
        "run.name, must be given The run's directory is `root`/`name`.",
        "optimizer.overlap=false Reduce gradients",
        "rollout.stop=null Tokens that end a completion",
        "reward.terms.0.weight=1.0 Factor in the total reward.",
    ):
        assert shown in flat


def test_a_group_alone_is_shown_when_it_is_named() -> None:
    found = "\n".join(help_text(["rollout"]))
    assert "rollout.sglang.timeouts.engine_loading=900.0" in found
    assert "optimizer.lr" not in found


def test_a_word_that_is_no_section_is_looked_for_in_the_settings() -> None:
    path = os.environ | {"PYTHONPATH": str(config_dir().parent)}
    command = [sys.executable, "-m", "grpo_mega.train", "--help", "gate", "experiment=tiny"]
    shown = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
    assert "  base.gate_from=150  in [0, inf)\n" in shown
    assert "experiment" not in shown
    command[-2:] = ["run.steps", "optimiser"]
    shown = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("  run.steps, must be given  in [0, inf)\n")
    assert "optimiser is not a section (did you mean optimizer?)" in shown


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    path = os.environ | {"PYTHONPATH": str(config_dir().parent)}
    command = [sys.executable, "-m", "grpo_mega.train", "--help"]
    reading, writing = os.pipe()
    os.close(reading)  # at once
    done = subprocess.run(command, env=path, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


def test_the_entry_point_answers_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    command = [sys.executable, "-m", "grpo_mega.train", "run", "--help"]
    for words in (command, [*command[:3], "-h", "experiment=tiny"], [*command[:3], "--help", "all"]):
        path = os.environ | {"PYTHONPATH": str(config_dir().parent)}
        done = subprocess.run(words, cwd=tmp_path, env=path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "run.steps, must be given  in [0, inf)" in done.stdout
        assert ("optimizer.parts" in done.stdout) == ("all" in words)
