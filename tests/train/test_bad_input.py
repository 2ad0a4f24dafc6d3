"""What cannot run says why and what to change, ends on every rank, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from metric_lines import of_steps
from train_jobs import REPOSITORY, SMALL, Job, contents, half_written, rewarded_by
from train_rewards import HOLD

from grpo_mega.observe.logs import last_error
from grpo_mega.rollout.sglang.release import is_installed

REFUSED = [
    (2, ["layout=tp2_pp2"], ["world size 2", "layout.tp=2 * layout.cp=1 * layout.pp=2", "start 4 processes"]),
    (0, ["layout=tp2"], ["world size 1", "layout.tp=2", "start 2 processes"]),
    (0, ["layout.ep=3"], ["model.moe.experts=4", "layout.ep=3", "layout.ep=1"]),
    (0, ["layout.tp=3", "layout.sp=true"], ["model.heads=4", "layout.tp=3", "layout.tp=1"]),
    (2, ["algorithm.prompts_per_step=7"], ["algorithm.prompts_per_step=7", "choose 6 or 8"]),
    (0, ["layout=single", "algorithm.group_size=0"], ["algorithm.group_size=0", "[1, inf)"]),
    (0, ["layout=single", "algorithm.group_size=many"], ["algorithm.group_size=many: not a whole number"]),
    (0, ["optimizer.learning_rate=1"], ["optimizer.learning_rate"]),
    (0, ["+optimizer.learning_rate=1"], ["optimizer.learning_rate"]),
    (0, ["experiment=tinny"], ["experiment=tinny: no such option; did you mean tiny?", "tiny_dense", "tiny_sft"]),
    (0, ["--dryrun"], ["error: --dryrun: no such option; write --dry-run"]),
    (0, ["--dry_run=true"], ["error: --dry_run=true: no such option; write --dry-run"]),
    (0, ["--run.steps=3"], ["error: --run.steps=3: settings are not options; write run.steps=3, without dashes"]),
    (0, ["experiment=null"], ["error: experiment=null: no such option; choose one of", "tiny_dense"]),
    (2, ["model=5"], ["error: model=5: no such option; choose one of", "tiny_moe"]),
    (0, ["rollout.stop=[<|im_end|>]"], ["error: ", "write \"rollout.stop=['<|im_end|>']\""]),
    (0, ["layout=single", "rollout.max_new_tokens=128"], ["rollout.max_new_tokens=128", "model.context=128"]),
]
"""Ranks (0: without torchrun), overrides, and what the message must contain; seen before any process group is made."""
CORE = ("layout=tp2_pp2", "algorithm.prompts_per_step=7", "experiment=tinny", "--dryrun")
"""Those of `make test`."""
assert {*CORE} <= {overrides[0] for _, overrides, _ in REFUSED}


def of(ranks, overrides, words):
    core = overrides[0] in CORE
    return pytest.param(ranks, overrides, words, id=" ".join(overrides), marks=() if core else pytest.mark.long)


@pytest.mark.parametrize(("ranks", "overrides", "words"), [of(*case) for case in REFUSED])
def test_configuration_is_refused(tmp_path, ranks, overrides, words):
    ended = Job(tmp_path, [*SMALL, *overrides], ranks).finish()
    assert_refused(ended, words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(is_installed(), reason="SGLang is installed here")
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_missing_sglang_is_refused_before_anything_is_made(tmp_path, ranks):
    ended = Job(tmp_path, [*SMALL, "experiment=tiny_sglang", "layout.ep=1"], ranks).finish()
    assert_refused(
        ended, ["error: rollout.engine=sglang: SGLang is not installed here; install it with", "pip install"]
    )
    assert ranks or ended.code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_root_that_cannot_be_written_is_refused(tmp_path, ranks):
    (tmp_path / "runs").symlink_to("/dev/null")
    ended = Job(tmp_path, [*SMALL, "layout.ep=1"], ranks).finish()
    assert_refused(ended, ["error: ", "/runs/tiny: Not a directory; choose a run.root that can be written to"])
    assert ranks or ended.code == 2


SLOW_START = """
import os, time
if os.environ.get("RANK") == "0":
    time.sleep(4)
"""
"""A sitecustomize.py: Python runs it before anything else."""


@pytest.mark.long
def test_reason_is_printed_once_even_when_rank_0_finds_it_last(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    ended = Job(tmp_path, [*SMALL, "algorithm.group_size=0"], ranks=2, environment=path, cold=True).finish()
    assert_refused(ended, ["algorithm.group_size=0: out of range; choose"])
    ours, _, of_torchrun = ended.stderr.partition("torch/distributed/elastic")
    assert ours.count("algorithm.group_size=0: out of range; choose") == 1
    assert of_torchrun.count("algorithm.group_size=0: out of range; choose") == 1


@pytest.mark.long
def test_rank_that_alone_finds_bad_input_says_so(tmp_path):
    rank = {"RANK": "1", "WORLD_SIZE": "2"}  # and no other rank there
    ended = Job(tmp_path, [*SMALL, "algorithm.group_size=0"], environment=rank).finish()
    assert_refused(ended, ["rank 1: error:", "algorithm.group_size=0: out of range; choose"])


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    """A folder of problem files, good and bad."""
    folder = tmp_path_factory.mktemp("problems")
    good = [{"prompt": f"{a}+{b}=?", "answer": a + b} for a in range(4) for b in range(4)]
    others = [problem | {"prompt": f"0+{problem['prompt']}"} for problem in good]
    endless = {"id": "endless", "prompt": "1+" * 70 + "1=?", "answer": 71}
    files = {"good": good, "long": [*others, endless], "empty": []}
    for name, problems in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    return folder


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ("long", "good", ["'endless'", "model.context", "128"]),
        pytest.param("empty", "good", ["empty.jsonl", "empty"], marks=pytest.mark.long),
        pytest.param("good", "missing", ["missing.jsonl", "data.test_path"], marks=pytest.mark.long),
    ],
)
def test_problems_are_refused(tmp_path, jsonl, train, test, words):
    paths = [f"data.{use}_path={jsonl / name}.jsonl" for use, name in (("train", train), ("test", test))]
    overrides = ["layout=single", "data=jsonl", "base=none", "data.validation_size=4", *paths]
    small = [o for o in SMALL if not o.startswith(("base.", "data."))]
    ended = Job(tmp_path, [*small, *overrides]).finish()
    assert_refused(ended, words)
    assert not (tmp_path / "runs").exists()


def test_files_that_are_missing_are_named_all_at_once(tmp_path):
    paths = ["data.train_path=train.jsonl", "data.test_path=test.jsonl", "data.tokenizer=model", "run.init_from=model"]
    small = [o for o in SMALL if not o.startswith(("base.", "data."))]
    ended = Job(tmp_path, [*small, "layout=single", "data=chat", "base=none", *paths]).finish()
    assert_refused(ended, [f"{path}: does not exist" for path in paths])
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_unknown_reward_is_refused_on_every_rank(tmp_path):
    terms = ["reward.terms=[{name:acuracy}]", "reward.success=acuracy"]
    ended = Job(tmp_path, [*SMALL, *terms], ranks=2).finish()
    assert_refused(ended, ["name=acuracy", "accuracy, boxed, "])
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_run_directory_of_another_experiment_is_refused_and_left_alone(finished):
    before = contents(finished.path)
    overrides = [*finished.overrides, "optimizer.lr=0.5", "run.steps=9"]
    ended = Job(finished.root, overrides, ranks=2, cold=True).finish()
    assert_refused(ended, ["optimizer.lr: 0.0003 there, 0.5 now", "run.name"])
    assert ended.stderr.partition("torch/distributed/elastic")[0].count("optimizer.lr: 0.0003 there") == 1
    assert "run.steps" not in ended.stderr
    assert contents(finished.path) == before


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["KeyError: 'no such column'"]),
        pytest.param("not_a_number", ["returned nan"], marks=pytest.mark.long),
        pytest.param("exits", ["SystemExit: 0", "failed in step 2 before its first update"], marks=pytest.mark.long),
        pytest.param(
            "leaves",
            ["ended with exit code 0", "failed in step 2 before its first update, nothing is saved yet"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_reward_function_that_fails_on_one_rank_or_all_ends_all(finished, function, words):
    path = finished.root / "runs" / function
    ended = Job(finished.root, [*SMALL, rewarded_by(function), f"run.name={function}", "run.steps=3"], ranks=2).finish()
    assert ended.code != 0
    assert ended.orphans == []
    for word in [*words, "reward term 'own'", "prompt 'chain_sum/train/", "sample "]:
        assert word in ended.stderr
    assert not (path / "summary.json").exists()
    assert half_written(path) == []
    assert len(of_steps(path)) == 1
    assert "the same command continues" not in ended.stderr
    ours = ended.stderr[ended.stderr.index("error: rank ") :].partition("What each rank did last")[0]
    assert len(ours.splitlines()) < 12, "its own lines, and no stack of the trainer"
    assert "Traceback" not in ours
    assert "reward term 'own', prompt" in last_error(path)


LEAVES = """
import signal, sys
signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
"""
"""A sitecustomize.py: a library that ends the program when it is told to."""


@pytest.mark.long
def test_a_cached_base_model_that_cannot_be_used_is_refused_on_every_rank(finished, tmp_path):
    """It is found when the stage begins, long after the configuration was accepted, and is bad input all the same."""
    cache = tmp_path / "runs" / "base-models"
    for model in (finished.root / "runs" / "base-models").iterdir():
        (cache / model.name).mkdir(parents=True)
    assert_refused(Job(tmp_path, finished.overrides, ranks=2).finish(), [str(cache)])


@pytest.mark.long
def test_sys_exit_in_a_rank_is_a_failure_and_says_where_the_run_continues(finished, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LEAVES)
    own = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}:{Path(__file__).parent}", HOLD: f"1:{tmp_path / 'held'}"}
    overrides = [*SMALL, rewarded_by("varied"), "layout=single", "run.name=left", "run.steps=3", "run.save_every=1"]
    job = Job(finished.root, overrides, environment=own, cold=True)
    job.wait_until_there(tmp_path / "held")
    job.process.send_signal(signal.SIGALRM)
    ended = job.finish()
    path = finished.root / "runs" / "left"
    assert ended.code == 1, ended
    newest = path / "checkpoints" / "step-000001"
    assert (
        f"failed in step 2 before its first update; the same command continues at the newest checkpoint, {newest}"
        in ended.stderr
    )
    assert "SystemExit: 0" in ended.stderr
    assert not (path / "summary.json").exists()
    assert ended.orphans == []


def assert_refused(ended, words) -> None:
    assert ended.code != 0
    assert ended.orphans == []
    # torchrun ends with a traceback of its own, behind log lines that name its source.
    assert "Traceback" not in ended.stderr.split("torch/distributed/elastic")[0]
    assert [word for word in words if word not in ended.stderr] == []
    assert "continues at the newest checkpoint" not in ended.stderr
