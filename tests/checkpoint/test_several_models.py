"""A checkpoint holds every model of training: a policy, a critic with an optimizer of its own, and a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks import results, run_ranks

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.model_state import folder_of  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402

pytestmark = pytest.mark.long

JOB = Path(__file__).with_name("several_models_job.py")
MOVES = {"single": 1, "tp2": 2, "pp2": 2}
"""Processes of the layouts that a checkpoint of EP2 is read under."""
LAST = "step-000003"


class Story(NamedTuple):
    """What a run of three steps left that waited for its checkpoints, and others that began as it did."""

    folder: Path
    killed: set[str]
    """Names in the folder of checkpoints of the run that was killed while its third was being written."""
    compared: dict[str, Any]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("several-models")
    run_ranks(JOB, 2, [str(folder), "train:waiting:ep2:3:waiting", "train:background:ep2:3:background"])
    with pytest.raises(AssertionError, match="exited with -9"):
        run_ranks(JOB, 2, [str(folder), "train:killed:ep2:3:killed"])
    killed = {path.name for path in (folder / "killed").iterdir()}
    for layout, ranks in MOVES.items():
        run_ranks(JOB, ranks, [str(folder), f"copy:waiting/{LAST}:{layout}:{layout}"])
    steps = [f"step-00000{step}" for step in (1, 2, 3)]
    pairs = [f"waiting/{step}=background/{step}" for step in steps] + [f"waiting/{LAST}=killed/{LAST}"]
    pairs += [f"waiting/{LAST}={layout}" for layout in MOVES] + [f"waiting/{steps[1]}=waiting/{LAST}"]
    outputs = run_ranks(JOB, 2, [str(folder), "train:killed:ep2:3:background", f"compare:{','.join(pairs)}"])
    return Story(folder, killed, results(outputs))


def test_trained_models_have_moments_in_their_folders_and_the_reference_has_none(story: Story) -> None:
    for found in story.compared.values():
        assert all(found["compared"].values())
        assert found["moments"]["reference"] == 0 < min(found["moments"]["weights"], found["moments"]["critic"])


def test_a_step_moves_all_but_the_reference(story: Story) -> None:
    """Or all else here would be equal in any case."""
    moved = {name.split("/")[0] for name in story.compared[f"waiting/step-000002=waiting/{LAST}"]["differ"]}
    assert moved == {"weights", "critic", "average"}


@pytest.mark.parametrize("step", ["step-000001", "step-000002", "step-000003"])
def test_what_is_written_in_the_background_is_what_was_true_when_it_began(story: Story, step: str) -> None:
    assert story.compared[f"waiting/{step}=background/{step}"]["differ"] == []


def test_a_run_that_was_killed_in_a_save_continues_bit_for_bit_at_the_checkpoint_before(story: Story) -> None:
    assert story.killed == {"step-000001", "step-000002", f".{LAST}.tmp"}
    assert story.compared[f"waiting/{LAST}=killed/{LAST}"]["differ"] == []
    assert not list((story.folder / "killed").glob(".*"))


@pytest.mark.parametrize("layout", MOVES)
def test_every_model_and_its_moments_are_read_under_another_layout_bit_for_bit(story: Story, layout: str) -> None:
    assert story.compared[f"waiting/{LAST}={layout}"]["differ"] == []


@pytest.mark.parametrize(
    ("role", "folder"), [("policy", "weights"), ("critic", "critic"), ("reward model", "reward_model")]
)
def test_a_role_names_a_folder(role: str, folder: str) -> None:
    assert folder_of(role) == folder


@pytest.mark.parametrize("role", ["", "random", "weights", "../critic", "Critic", "critic ", "state.json"])
def test_a_role_that_cannot_name_a_folder_is_refused(role: str) -> None:
    with pytest.raises(InputError) as refused:
        folder_of(role)
    assert repr(role) in refused.value.where
