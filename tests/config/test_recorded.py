"""What a run has recorded is read as plain values: nothing in it is resolved, and what no run writes is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from composed import composed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_mega.config.load import compose_config, identity, identity_in, load_recorded, must_stay, to_yaml
from grpo_mega.config.read_only import read_under
from grpo_mega.config.recorded import plain, recorded, written
from grpo_mega.config.trained_model import read_trained_model
from grpo_mega.errors import InputError

SECRET = "GRPO_MEGA_TEST_SECRET"
TINY = composed("experiment=tiny", "layout=single")
LEAK = f"${{oc.env:{SECRET},unset}}"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "hunter2")


@settings(max_examples=10, deadline=None)
@example(LEAK)
@example("\\" + LEAK)
@example("\\\\${x} $ { } ${ \\")
@given(st.text(st.sampled_from("${}\\:.ax \n"), max_size=12))
def test_any_text_of_a_setting_is_recorded_and_read_again_as_it_was(text: str) -> None:
    config = replace(TINY, run=replace(TINY.run, tracker_project=text))
    again = load_recorded(plain(to_yaml(config)))
    assert again == config
    assert identity_in(to_yaml(config)) == identity(config)
    assert read_under(config, ["layout.micro_batch_tokens=2048"], 1).run.tracker_project == text


def test_a_dollar_and_a_brace_are_typed_behind_a_backslash() -> None:
    config = compose_config(["experiment=tiny", "layout=single", rf"run.tracker_project='cost \{LEAK}'"])
    assert config.run.tracker_project == f"cost {LEAK}"


def test_nothing_that_reads_a_run_resolves_what_it_has_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    text = to_yaml(
        replace(TINY, run=replace(TINY.run, tracker_project=LEAK), data=replace(TINY.data, languages=[LEAK]))
    )
    (run / "config.yaml").write_text(text)
    found = [recorded(str(tmp_path), "run"), identity_in(text), read_trained_model("distill.teacher", str(run), 64)]
    assert all(LEAK in str(each) for each in found), found
    assert "hunter2" not in str(found)


def test_days_are_text_and_numbers_are_numbers() -> None:
    found = plain(
        "data: {date: 2001-02-03}\noptimizer: {lr: 1.0e-06, betas: [0.9, 0.95]}\nrun: {name: '1.10', steps: 3}\n"
    )
    assert found == {
        "data": {"date": "2001-02-03"},
        "optimizer": {"lr": 1e-6, "betas": [0.9, 0.95]},
        "run": {"name": "1.10", "steps": 3},
    }


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases, which runs never write"),
        ("run: &x {self: *x}", "aliases, which runs never write"),
        ("[1, 2]", "not the configuration of a run"),
        ("a: [", "while parsing"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("a: " + "[" * 5000, "recursion"),
        ("a: !!int ''", ""),
        ("a: !!bool x", "x"),
    ],
    ids=["bomb", "cycle", "list", "cut", "code", "deep", "no number", "no bool"],
)
def test_what_no_run_writes_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plain(text)
    (tmp_path / "config.yaml").write_text(text)
    assert recorded(str(tmp_path.parent), tmp_path.name) == {}


def test_what_is_recorded_is_yaml_for_others_too() -> None:
    assert yaml.safe_load(to_yaml(TINY))["run"]["steps"] == TINY.run.steps


def test_families_that_an_earlier_release_recorded_as_settings_are_read(tmp_path: Path) -> None:
    """`model.gpt_oss` and `model.gemma` were switches; runs that have recorded them can go on, and be evaluated."""
    today = to_yaml(replace(TINY, model=replace(TINY.model, family="gpt_oss")))
    before = today.replace("  family: gpt_oss\n", "  gemma: false\n  gpt_oss: true\n")
    assert before != today
    assert identity_in(before) == identity_in(today)
    flat = dict(identity_in(today))
    del flat["model.family"]
    assert must_stay(flat | {"model.gpt_oss": True, "model.gemma": False}) == identity_in(today)
    (tmp_path / "config.yaml").write_text(before)
    assert written(tmp_path)["model"]["family"] == "gpt_oss"
    assert "gpt_oss" not in written(tmp_path)["model"]
    base = tmp_path / "base"  # a cached base model
    base.mkdir()
    (base / "state.json").write_text(json.dumps({"config": yaml.safe_load(before)}))
    assert read_trained_model("distill.teacher", str(base), 64).model.family == "gpt_oss"
    usual = yaml.safe_load(to_yaml(TINY))
    del usual["model"]["family"]
    assert load_recorded(usual | {"model": usual["model"] | {"gemma": False, "gpt_oss": False}}) == TINY
    with pytest.raises(InputError, match=r"model\.gemma: not a setting; did you mean model\.family"):
        compose_config(["experiment=tiny", "layout=single", "+model.gemma=true"])
