"""Stand-ins: shards of absent ranks are those that they would name, and large tensors on the host are not written."""

from __future__ import annotations

import resource

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()

from grpo_mega.forecast.rehearsal.stand_ins import SMALL, UnwrittenHost, holders, whole  # noqa: E402
from grpo_mega.models.shards import Box  # noqa: E402
from grpo_mega.weights.names import NamedTensor, Rows  # noqa: E402

HIDDEN, FFN, VOCABULARY = 16, 24, 100


def tensors(layers: int) -> list[NamedTensor]:
    """An embedding that is padded to 128 rows, and per layer a norm, gate and up in one tensor, and down."""
    bf16, found = torch.bfloat16, []
    found.append(NamedTensor("embed", "embedding.weight", (VOCABULARY, HIDDEN), Rows(128, 0, VOCABULARY), bf16))
    for layer in range(layers):
        key = f"decoder.layers.{layer}"
        found.append(NamedTensor(f"{layer}.norm", f"{key}.norm.weight", (HIDDEN,), Rows(HIDDEN, 0, HIDDEN), bf16))
        for number, name in enumerate(("gate", "up")):
            rows = Rows(2 * FFN, number * FFN, (number + 1) * FFN)
            found.append(NamedTensor(f"{layer}.{name}", f"{key}.mlp.linear_fc1.weight", (FFN, HIDDEN), rows, bf16))
        found.append(
            NamedTensor(f"{layer}.down", f"{key}.mlp.linear_fc2.weight", (HIDDEN, FFN), Rows(HIDDEN, 0, HIDDEN), bf16)
        )
    return found


def held_by(rank: int, tp: int, layers: range) -> dict[str, list[Box]]:
    """Shards of tensor parallel rank `rank` with these layers; the first ones have the embedding."""
    part, inner = 128 // tp, FFN // tp
    own: dict[str, list[Box]] = {}
    if layers.start == 0:
        own["embedding.weight"] = [((rank * part, (rank + 1) * part), (0, HIDDEN))]
    for layer in layers:
        key = f"decoder.layers.{layer}"
        own[f"{key}.norm.weight"] = [((0, HIDDEN),)]
        own[f"{key}.mlp.linear_fc1.weight"] = [
            ((first + rank * inner, first + (rank + 1) * inner), (0, HIDDEN)) for first in (0, FFN)
        ]
        own[f"{key}.mlp.linear_fc2.weight"] = [((0, HIDDEN), (rank * inner, (rank + 1) * inner))]
    return own


@given(tp=st.sampled_from([1, 2, 4]), stages=st.sampled_from([1, 2]), of_stage=st.integers(1, 3))
def test_shards_are_those_that_the_other_ranks_would_name(tp: int, stages: int, of_stage: int) -> None:
    """Ranks of a stage are consecutive. What another stage alone has, the embedding and nothing like it, is whole."""
    wanted = tensors(stages * of_stage)
    everyone = {
        stage * tp + rank: held_by(rank, tp, range(stage * of_stage, (stage + 1) * of_stage))
        for stage in range(stages)
        for rank in range(tp)
    }
    for me, own in everyone.items():
        found = holders(wanted, own, me, tp * stages, stages)
        for key, boxes in found.items():
            named: dict[Box, int] = {}
            for rank, of_rank in everyone.items():
                for box in of_rank.get(key, []):
                    named.setdefault(box, rank)
            if key == "embedding.weight" and key not in own:
                assert [*boxes] == [((0, 128), (0, HIDDEN))]
                assert me not in boxes.values()
            elif "norm" in key:  # every rank of the stage has all of it
                assert [*boxes] == [*named]
                assert ([*boxes.values()] == [me]) == (key in own)
            else:
                assert boxes == named
        for entry in wanted:
            sent = sum(_size(target) for box in found[entry.key] for _, target in _overlaps(entry, box))
            assert sent == entry.numel, entry.name


@given(ep=st.sampled_from([1, 2, 4]), stages=st.sampled_from([1, 2]))
def test_experts_of_others_are_sent_by_others(ep: int, stages: int) -> None:
    """One expert for each of `ep` ranks in each layer, whole."""
    rows, box = Rows(FFN, 0, FFN), ((0, FFN), (0, HIDDEN))
    keys = [(layer, expert, f"layers.{layer}.experts.{expert}.fc1") for layer in range(stages) for expert in range(ep)]
    wanted = [NamedTensor(key, key, (FFN, HIDDEN), rows, torch.bfloat16, expert) for _, expert, key in keys]
    for me in range(ep * stages):
        own = {key: [box] for layer, expert, key in keys if layer * ep + expert == me}
        found = holders(wanted, own, me, ep * stages, stages)
        assert all([*boxes] == [box] for boxes in found.values())
        assert {key for key, boxes in found.items() if boxes[box] == me} == {*own}


def _overlaps(entry: NamedTensor, box: Box) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    return [*entry.overlap(box)]


def _size(target: tuple[slice, ...]) -> int:
    return int(torch.tensor([part.stop - part.start for part in target]).prod())


def test_the_tensor_of_all_experts_is_that_of_each() -> None:
    """GPT-OSS: one Hugging Face tensor of [experts, columns, rows], of which every expert's rows are Megatron's."""
    from grpo_mega.weights.names import Place

    rows = Rows(2 * FFN, 0, FFN)
    gate = NamedTensor("gate", "fc1", (8, HIDDEN, 2 * FFN), rows, torch.bfloat16, expert=3, place=Place(3, 0, 2))
    assert whole(gate) == (2 * FFN, HIDDEN)


def resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_that_is_copied_to_takes_none() -> None:
    before, size = resident(), 1 << 30
    with UnwrittenHost():
        whole = torch.zeros(2 * size, dtype=torch.uint8)
        parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        whole[:size].copy_(parts[0])
        joined = torch.cat(parts)
        again = joined.clone()
    assert (len(joined), len(again)) == (2 * size, 2 * size)
    assert resident() - before < size / 2  # what torch imports meanwhile


def test_more_may_be_asked_for_than_there_is() -> None:
    with UnwrittenHost():
        whole = torch.zeros(1 << 42, dtype=torch.uint8)  # 4 TiB
        assert whole[:4].tolist() == [0] * 4
        assert torch.zeros(4, 1 << 20).t().clone().shape == (1 << 20, 4)


def test_small_ones_have_their_numbers() -> None:
    with UnwrittenHost():
        small = torch.zeros(4).copy_(torch.arange(4.0))
        joined = torch.cat([small, small.clone()])
        some = torch.cat([torch.ones(SMALL), small])
    assert joined.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]
    assert (len(some), float(some[-1])) == (SMALL + 4, 3.0)
    assert torch.zeros(2 * SMALL).copy_(torch.ones(2 * SMALL)).sum() == 2 * SMALL
