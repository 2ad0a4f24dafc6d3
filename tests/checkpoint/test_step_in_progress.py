"""What is left of a step survives a checkpoint, on one rank; on several see `tests/stages/test_exchange.py`."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from filled import filled
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.checkpoint.step_in_progress import FILE, load, save
from grpo_mega.platform.manifest import MANIFEST, checksum
from grpo_mega.stages.exchange import PackedSample, pack
from grpo_mega.types import NOBODY, Batch, Group, Prompt, Sample, SampleInfo, Score, Step, TokenColumns

DTYPES = {"tokens": torch.int32, "mask": torch.bool, "experts": torch.int16, "restarts": torch.bool}
"""Of columns that are not float32."""


def topology(replica: int, replicas: int) -> SimpleNamespace:
    """That of one process, without process groups, which is the replica's only one and the main rank as well."""
    return SimpleNamespace(is_main=True, is_first_of_replica=True, dp_rank=replica, dp_size=replicas)


def seal(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(json.dumps({file.name: checksum(file) for file in checkpoint.iterdir()}))


def filled_batch(lengths: list[int]) -> Batch:
    """Sequences of these lengths, numbered from 0; every column has numbers of its own, and none is missing."""
    random = torch.Generator().manual_seed(len(lengths))

    def drawn(name: str) -> torch.Tensor:
        values = torch.randn(sum(lengths), *((2, 3) if name == "experts" else ()), generator=random)
        dtype = DTYPES.get(name, torch.float32)
        return values > 0 if dtype == torch.bool else (100 * values).to(dtype)

    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    others = {
        field.name: torch.randperm(len(lengths), generator=random)
        for field in fields(Batch)
        if field.name not in {"cu_seqlens", "numbers", *(column.name for column in fields(TokenColumns))}
    }
    columns = {field.name: drawn(field.name) for field in fields(TokenColumns)}
    numbers = torch.arange(len(lengths))
    return Batch(cu_seqlens=torch.nn.functional.pad(ends, (1, 0)), numbers=numbers, **others, **columns)


def unlike(batch: Batch, other: Batch) -> list[str]:
    """Fields of which the batches have other dtypes or numbers."""
    pairs = {name: (column, getattr(other, name)) for name, column in vars(batch).items()}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


STEPS = filled(Step, {Batch: st.lists(st.integers(1, 9), min_size=1, max_size=5).map(filled_batch)})
DEFAULTS = Step(
    [Group(Prompt("p", (1,), "", "", ""), (SampleInfo(0, "stop", ((0, 0),), Score(0.5, {})),))], [False], []
)


def left_of(step: Step) -> Step:
    """The part of the step that a checkpoint keeps, without tensors: ranks of another layout hold no samples of it."""
    groups = [
        replace(group, infos=tuple(replace(info, holder=NOBODY) for info in group.infos)) for group in step.groups
    ]
    return replace(step, groups=groups, batch=None)


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])  # each has all fields, and is slow to shrink
@given(STEPS)
@example(DEFAULTS)
def test_a_step_comes_back_equal_in_every_bit(step: Step) -> None:
    """Whatever is in the fields of it, its groups, prompts, infos and scores: none of them has its default."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        save(path, step, topology(0, 1))
        seal(path)
        back = load(path, topology(0, 1))
    assert back is not None
    assert replace(back, batch=None) == left_of(step)
    assert (back.batch is None) == (step.batch is None)
    if step.batch is not None:
        assert back.batch is not None
        assert unlike(step.batch, back.batch) == []


@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 1), (3, 2), (2, 3), (1, 2)])
def test_every_sequence_goes_with_all_its_columns_to_one_replica_of_another_layout(
    tmp_path: Path, before: int, now: int
) -> None:
    """Replicas have other numbers of sequences and tokens, and none has consecutive ones."""
    whole = filled_batch([4, 1, 7, 2, 2, 9, 3, 5])
    for replica in range(before):
        mine = [number for number in range(8) if number * number % 7 % before == replica]
        save(tmp_path, Step([], [], [], whole.select(mine)), topology(replica, before))
    seal(tmp_path)
    found = []
    for replica in range(now):
        back = load(tmp_path, topology(replica, now)).batch
        numbers = back.numbers.tolist()
        assert numbers == sorted(numbers), "the order in which every layout sums and shows them"
        assert unlike(whole.select(numbers), back) == []
        found += numbers
    assert sorted(found) == [*range(8)]


def test_infos_of_samples_have_the_key_that_earlier_releases_read_and_wrote(tmp_path: Path) -> None:
    save(tmp_path, DEFAULTS, topology(0, 1))
    (group,) = json.loads((tmp_path / FILE).read_text())["groups"]
    assert [*group] == ["prompt", "answers"]


def test_a_step_of_an_older_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, DEFAULTS, topology(0, 1))
    record = json.loads((tmp_path / FILE).read_text())
    del record["version"]
    (tmp_path / FILE).write_text(json.dumps(record))
    seal(tmp_path)
    with refused(f"{tmp_path} | an older version of grpo_mega wrote it in the middle of a step"):
        load(tmp_path, topology(0, 1))


def test_a_checkpoint_between_steps_has_none(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    assert load(tmp_path, topology(0, 1)) is None


def test_a_replica_without_restarts_is_joined_with_one_that_has_some(tmp_path: Path) -> None:
    for replica, restarts in enumerate(((), (1,))):
        ids, logprobs = array("i", [7, 8, 9]), array("f", [-1, 0, -2])
        prompt = Prompt(f"p{replica}", (5, 6), "", "", "")
        sample = Sample(prompt, 0, ids, logprobs, "stop", ((0, 0),), "", given=((1, 2),), restarts=restarts)
        batch = pack([PackedSample.of(sample)], [replica], [replica])
        assert (batch.restarts is None) == (not restarts)
        save(tmp_path, Step([], [], [], batch), topology(replica, 2))
    seal(tmp_path)
    back = load(tmp_path, topology(0, 1))
    assert back.batch.restarts.nonzero()[:, 0].tolist() == [5 + 3]
    assert back.batch.restarts.dtype == torch.bool


def test_infos_of_checkpoints_before_restarts_have_none(tmp_path: Path) -> None:
    save(tmp_path, DEFAULTS, topology(0, 1))
    record = json.loads((tmp_path / FILE).read_text())
    del record["groups"][0]["answers"][0]["restarts"]
    (tmp_path / FILE).write_text(json.dumps(record))
    seal(tmp_path)
    assert load(tmp_path, topology(0, 1)).groups == DEFAULTS.groups


def test_a_replica_without_experts_is_joined_with_one_that_has_them(tmp_path: Path) -> None:
    """Routing replay, and one replica of two whose only sample was given up; its prompt is another one."""
    experts = torch.ones(3, 2, 3, dtype=torch.int16)
    for replica, known in enumerate((None, experts)):
        prompt = Prompt(f"p{replica}", (5 + replica, 6), "", "", "")
        sample = Sample(prompt, 0, array("i", [7, 8]), array("f", [-1, -2]), "stop", ((0, 0),), "", known)
        batch = pack([PackedSample.of(sample)], [replica], [replica])
        save(tmp_path, Step([], [], [], batch), topology(replica, 2))
    seal(tmp_path)
    back = load(tmp_path, topology(0, 1))
    assert back.batch.tokens.tolist() == [5, 6, 7, 8, 6, 6, 7, 8]
    assert back.batch.prompts.tolist() == [0, 1]
    assert back.batch.experts[:, 0, 0].tolist() == [-1, -1, -1, -1, 1, 1, 1, -1]
