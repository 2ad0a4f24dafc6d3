"""On-policy distillation as a user runs it: killed and continued, refused, and learning from a run that was trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest
from metric_lines import held_out
from teaching_server import teaching
from train_jobs import SMALL, Job, contents, numbers, rewarded_by, saved
from train_rewards import HOLD

from grpo_mega.data.tokenizer import CharTokenizer

STUDENT = [
    *(word for word in SMALL if not word.startswith(("experiment=", "base."))),
    "experiment=tiny_distill",
    "base=none",
    "run.eval_every=0",
    "run.tensorboard=false",
]
"""A student with random weights; its teacher lies beside it."""
UPDATES = [
    rewarded_by("varied"),
    "algorithm.group_size=1",
    "algorithm.mini_batches=2",
    "run.steps=3",
    "run.save_every=1",
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another architecture, with a checkpoint."""
    root = tmp_path_factory.mktemp("taught")
    words = [*SMALL, "base=none", "layout=single", "run.steps=1", "run.eval_every=0", "run.name=teacher"]
    ended = Job(root, words).finish()
    assert ended.code == 0, ended
    return root / "runs" / "teacher"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distill.teacher=nowhere"], ["distill.teacher=nowhere: does not exist"]),
        (
            ["data=tiny_code", "reward=code", "distill.teacher=runs/teacher"],
            ["its tokens differ from the policy's", "learn from its samples instead", "docs/recipes.md"],
        ),
        (["layout.ep=3"], ["of the teacher, model.moe.experts=4: not divisible by layout.ep=3"]),
    ],
)
@pytest.mark.long
def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_made(
    teacher: Path, words: list[str], said: list[str]
) -> None:
    ranks = 3 if "layout.ep=3" in words else 0
    steps = ["algorithm.prompts_per_step=6"] if ranks else []
    ended = Job(teacher.parents[1], [*STUDENT, "run.name=refused", *words, *steps], ranks).finish()
    assert ranks or ended.code == 2, ended
    text = " ".join(ended.stderr.split())
    assert all(part in text for part in said), ended.stderr
    assert not (teacher.parent / "refused").exists()


@pytest.mark.long
def test_killed_within_a_step_and_continued_it_is_bit_for_bit_the_run_in_peace(teacher: Path) -> None:
    root = teacher.parents[1]
    peace = Job(root, [*STUDENT, *UPDATES, "run.name=peace"]).finish()
    assert peace.code == 0, peace
    held = root / "held"
    job = Job(root, [*STUDENT, *UPDATES, "run.name=killed"], environment={HOLD: f"2:{held}"})
    job.wait_until_there(held)
    job.kill()
    job.finish()
    again = Job(root, [*STUDENT, *UPDATES, "run.name=killed"]).finish()
    assert again.code == 0, again
    assert "continuing after step 1" in again.stderr
    here, there = (teacher.parent / name for name in ("killed", "peace"))
    assert all("distill/reverse_kl" in line and line["policy/grad_norm"] > 0 for line in numbers(there))
    assert numbers(here) == numbers(there)
    assert held_out(here) == held_out(there)
    assert contents(here / "samples") == contents(there / "samples")
    last = "checkpoints/step-000003"
    assert saved(here / last) == saved(there / last)
    assert not any(name.startswith("teacher") for name in contents(here / last))


@pytest.mark.long
def test_a_run_goes_on_with_the_teacher_that_it_began_with(teacher: Path) -> None:
    root = teacher.parents[1]
    words = [*STUDENT, *UPDATES, "run.name=mine", "distill.teacher=runs/mine-teacher"]
    shutil.copytree(teacher, teacher.parent / "mine-teacher")
    shutil.copytree(teacher, teacher.parent / "elsewhere")
    assert Job(root, [*words, "run.steps=1"]).finish().code == 0
    moved = Job(root, [*words, "distill.teacher=runs/elsewhere"]).finish()
    assert moved.code == 2
    assert 'distill.teacher: "runs/mine-teacher" there, "runs/elsewhere" now' in moved.stderr
    more = [*SMALL, "base=none", "layout=single", "run.eval_every=0", "run.name=mine-teacher", "run.steps=2"]
    assert Job(root, more).finish().code == 0, "the teacher's run goes on"
    other = Job(root, words).finish()
    assert other.code == 2, other
    assert "but this run began with a teacher of checksum" in " ".join(other.stderr.split())
    assert Job(root, [*words, "run.name=anew"]).finish().code == 0


@pytest.mark.long
def test_a_server_of_sglang_teaches_the_same_under_every_layout(tmp_path: Path) -> None:
    """A run goes on where the server has moved to, and not with another model."""
    chars = CharTokenizer()
    words = [*STUDENT, *UPDATES, "run.steps=2"]
    with teaching(chars) as server:
        single = Job(tmp_path, [*words, f"distill.teacher={server.url}", "run.name=single"]).finish()
        assert single.code == 0, single
        split = [*words, f"distill.teacher={server.url}", "run.name=split", "layout=tp2_pp2"]
        ended = Job(tmp_path, split, ranks=4).finish()
        assert ended.code == 0, ended
    one, four = (numbers(tmp_path / "runs" / name) for name in ("single", "split"))
    for line, other in zip(one, four, strict=True):
        assert line["distill/teacher_logprob"] < -0.25
        for name in ("distill/teacher_logprob", "distill/reverse_kl", "policy/grad_norm"):
            assert other[name] == pytest.approx(line[name], rel=1e-4)
    more = ["run.name=single", "run.steps=3"]
    with teaching(chars) as server:
        moved = Job(tmp_path, [*words, f"distill.teacher={server.url}", *more]).finish()
        assert (moved.code, len(numbers(tmp_path / "runs" / "single"))) == (0, 3), moved
        server.model = "models/Another"
        other_model = Job(tmp_path, [*words, f"distill.teacher={server.url}", *more, "run.steps=4"]).finish()
        assert other_model.code == 2, other_model
        assert "but this run began with a teacher of checksum" in " ".join(other_model.stderr.split())


MEASURED = ("distill/reverse_kl", "reward/accuracy")


@pytest.mark.long
def test_a_student_comes_to_its_teacher_and_learns_what_it_knows(tmp_path: Path) -> None:
    """The teacher has its cold start alone; the student its base model. No reward is learned from."""
    words = ["layout=single", "data.test_size=100", "run.eval_every=0", "run.tensorboard=false"]
    taught = Job(tmp_path, ["experiment=tiny_sft", *words, "sft.steps=150", "run.steps=0", "run.name=teacher"]).finish()
    assert taught.code == 0, taught
    student = Job(tmp_path, ["experiment=tiny_distill", *words, "run.steps=40", "run.name=student"]).finish()
    assert student.code == 0, student
    lines = numbers(tmp_path / "runs" / "student")
    first, last = ({name: fmean(line[name] for line in part) for name in MEASURED} for part in (lines[:5], lines[-5:]))
    assert last["distill/reverse_kl"] < 0.5 * first["distill/reverse_kl"]
    assert last["reward/accuracy"] > first["reward/accuracy"] + 0.2, "the teacher's own is about 0.4"
    before, after = held_out(tmp_path / "runs" / "student")
    assert before["eval/heldout/format"] < 0.3
    assert after["eval/heldout/format"] > 0.7
    assert after["eval/heldout/accuracy"] > before["eval/heldout/accuracy"] + 0.1
