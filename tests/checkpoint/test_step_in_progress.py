"""What is left of a step survives a checkpoint, on one rank; on several see `tests/stages/test_exchange.py`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.checkpoint.step_in_progress import StepInProgress, load, save
from grpo_mega.platform.manifest import MANIFEST, checksum
from grpo_mega.stages.packing import Completion, pack, pack_samples
from grpo_mega.types import Answer, Group, Prompt, Sample, Score

ALONE = SimpleNamespace(is_main=True, is_first_of_replica=True, dp_rank=0, dp_size=1)
"""The topology of one process, without process groups."""
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
NUMBERS = st.floats(allow_nan=False)
PROMPTS = st.builds(Prompt, st.text(), TOKENS, st.text(), st.text(), st.text())
SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).map(tuple)
STEPS = st.lists(st.tuples(st.integers(0, 9), NUMBERS), max_size=3).map(tuple)
SCORES = st.builds(Score, NUMBERS, st.dictionaries(st.text(), NUMBERS, max_size=2), st.text(), steps=STEPS)
ANSWERS = st.builds(Answer, st.integers(0, 99), st.sampled_from(["stop", "abort"]), SEGMENTS, SCORES)
GROUPS = st.builds(Group, PROMPTS, st.lists(ANSWERS, min_size=1, max_size=3).map(tuple))
RECORDS = st.dictionaries(st.text(), st.one_of(NUMBERS, st.text()), max_size=3)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens, prompt = draw(TOKENS), draw(PROMPTS)
    logprobs = array("f", [draw(st.floats(-100, 0, width=32)) for _ in tokens])
    experts = torch.full((len(prompt.token_ids + tokens) - 1, 2, 3), draw(st.integers(0, 255)), dtype=torch.int16)
    known = draw(st.sampled_from([None, experts]))
    return Sample(prompt, 0, array("i", tokens), logprobs, "stop", ((0, 0),), draw(st.text()), known)


@given(
    st.lists(GROUPS, min_size=1, max_size=3),
    st.lists(samples(), max_size=4),
    st.lists(RECORDS, max_size=2),
    st.lists(st.dictionaries(st.text(), NUMBERS), max_size=2),
    st.data(),
)
def test_a_step_comes_back_equal_in_every_bit(groups, trained, shown, updates, data):
    batch = None
    if trained:
        batch = pack_samples(trained)
        random = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
        batch = batch.with_(old_logprob=torch.randn(len(batch.tokens), generator=random))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        save(path, StepInProgress(groups, batch, shown, updates, {"mean_abs": 0.5}, [2, 5]), ALONE)
        (path / MANIFEST).write_text(json.dumps({file.name: checksum(file) for file in path.iterdir()}))
        back = load(path, ALONE)
    assert (back.groups, back.shown, back.updates, back.mismatch) == (groups, shown, updates, {"mean_abs": 0.5})
    assert back.shown_groups == [2, 5]
    assert (back.batch is None) == (batch is None)
    for name, there in vars(batch).items() if batch else ():
        here = getattr(back.batch, name)
        if there is None:
            assert here is None
            continue
        assert here.dtype == there.dtype
        assert torch.equal(here, there)


def test_a_checkpoint_between_steps_has_none(tmp_path: Path):
    (tmp_path / MANIFEST).write_text("{}")
    assert load(tmp_path, ALONE) is None


def test_a_replica_without_experts_is_joined_with_one_that_has_them(tmp_path: Path):
    """Routing replay, and one replica of two whose only sample was given up; its prompt is another one."""
    experts = torch.ones(3, 2, 3, dtype=torch.int16)
    for replica, known in enumerate((None, experts)):
        prompt = Prompt(f"p{replica}", (5 + replica, 6), "", "", "")
        sample = Sample(prompt, 0, array("i", [7, 8]), array("f", [-1, -2]), "stop", ((0, 0),), "", known)
        numbers = {(5, 6): 0, (6, 6): 1}
        batch = pack([Completion.of(sample)], [replica], numbers)
        topology = SimpleNamespace(is_main=True, is_first_of_replica=True, dp_rank=replica, dp_size=2)
        save(tmp_path, StepInProgress([], batch), topology)
    (tmp_path / MANIFEST).write_text(json.dumps({file.name: checksum(file) for file in tmp_path.iterdir()}))
    back = load(tmp_path, ALONE)
    assert back.batch.tokens.tolist() == [5, 6, 7, 8, 6, 6, 7, 8]
    assert back.batch.prompts.tolist() == [0, 1]
    assert back.batch.experts[:, 0, 0].tolist() == [-1, -1, -1, -1, 1, 1, 1, -1]
