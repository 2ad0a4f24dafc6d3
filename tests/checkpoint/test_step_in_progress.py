"""What is left of a step survives a checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.checkpoint.integrity import MANIFEST, checksum
from grpo_mega.checkpoint.step_in_progress import FILE, StepInProgress, load, save
from grpo_mega.types import Batch, Group, Prompt, Sample, pack

TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple)
NUMBERS = st.floats(allow_nan=False)
PROMPTS = st.builds(Prompt, st.text(), TOKENS, st.text(), st.text(), st.text())

SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).map(tuple)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens = draw(TOKENS)
    logprobs = tuple(draw(st.floats(-100, 0, width=32)) for _ in tokens)
    prompt = draw(PROMPTS)
    experts = torch.full((len(prompt.token_ids + tokens) - 1, 2, 3), draw(st.integers(0, 255)), dtype=torch.int16)
    return Sample(
        prompt,
        draw(st.integers(0, 64)),
        tokens,
        logprobs,
        "stop",
        draw(SEGMENTS),
        draw(st.text()),
        draw(st.sampled_from([None, experts])),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    answers = draw(st.lists(samples(), min_size=1, max_size=3))
    columns = st.lists(NUMBERS, min_size=len(answers), max_size=len(answers)).map(tuple)
    return Group(tuple(answers), draw(columns), draw(st.dictionaries(st.text(), columns, max_size=2)))


@given(st.lists(groups(), min_size=1, max_size=3), st.lists(st.dictionaries(st.text(), NUMBERS), max_size=2), st.data())
def test_a_step_comes_back_equal_in_every_bit(found, updates, data):
    batch = pack([sample for group in found for sample in group.samples])
    old = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    batch = batch.with_(old_logprob=old) if data.draw(st.booleans()) else None
    with TemporaryDirectory() as folder:
        save(Path(folder), StepInProgress(found, batch, updates))
        (Path(folder) / MANIFEST).write_text(json.dumps({FILE: checksum(Path(folder) / FILE)}))
        back = load(Path(folder))
    assert (back.groups, back.updates) == (found, updates)
    assert (back.batch is None) == (batch is None)
    for part in fields(Batch) if batch else ():
        here, there = getattr(back.batch, part.name), getattr(batch, part.name)
        if part.name == "experts" and there is None:
            assert here is None
            continue
        assert here.dtype == there.dtype
        assert torch.equal(here, there)


def test_a_checkpoint_between_steps_has_none(tmp_path: Path):
    (tmp_path / MANIFEST).write_text("{}")
    assert load(tmp_path) is None
