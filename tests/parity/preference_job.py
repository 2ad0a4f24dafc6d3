"""Gradients and updates of a reward model on pairs under several layouts, from made-up responses; by run_ranks.

Usage: preference_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import random
from array import array
from dataclasses import asdict, replace

import torch
from layouts_job import HERE, SMALL_BUCKETS, VOCAB, save_each
from parity_cases import LAYOUTS, MODELS, optimizer

from grpo_mega.data.examples import Pair
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel, value_itself
from grpo_mega.models.topology import join_layout
from grpo_mega.stages.reward_model import (
    measure_pairs,
    pack_pairs,
    preference_gradients,
    preference_update,
    scale_of,
    scores_of,
)
from grpo_mega.types import Row, pack_rows

PAIRS = 7
"""An odd number: replicas cannot have equally many."""


def made_up_pairs() -> list[Pair]:
    """Pairs of lengths from 2 tokens on; some share more than their prompt, one nothing but the first token, and of one
    the rejected response goes on where the chosen one ends."""
    chance, pairs = random.Random(4), []
    for number in range(PAIRS):
        prompt = [1, *(chance.randrange(3, VOCAB) for _ in range(number * 2))]
        more = [chance.randrange(3, VOCAB) for _ in range(number % 3)]
        rows = []
        for length in (1 + 3 * number, 11 - number):
            ids = [*prompt, *more, *(chance.randrange(3, VOCAB) for _ in range(length)), 2]
            rows.append(Row(array("i", ids), ((len(ids) - 1, len(ids)),)))
        pairs.append(Pair(rows[0], rows[1], len(prompt), f"pair {number}"))
    longer = array("i", [*pairs[4].chosen.token_ids, 5, 6])
    pairs[4] = replace(pairs[4], rejected=Row(longer, ((len(longer) - 1, len(longer)),)))
    return pairs


def one_step(model_name: str, layout_name: str) -> dict:
    layout, adam = LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    model = ScalarModel(REWARD_MODEL, MODELS[model_name], layout, VOCAB, topology, HERE, **buffers)
    model.initialize(seed=0)
    pairs = made_up_pairs()
    scores = torch.stack(scores_of(model, pairs, PAIRS))
    result: dict = {"scores": scores, "in parts": torch.stack(scores_of(model, pairs, 2))}
    packed = pack_pairs(pairs)
    result["shared"], result["lengths"] = packed.prompt_lengths.view(-1, 2), packed.lengths.view(-1, 2)
    result["metrics"] = preference_gradients(model, pairs).metrics
    result["gradients"] = model.whole_gradients()
    if topology.world_size == 1:
        result["expected"] = expected_gradients(model, pairs)
    model.initialize(seed=0)  # a backward pass may move the biases of routers
    before = model.whole_weights()
    model.use_optimizer(adam)
    result["norms"] = [preference_update(model, pairs, adam.lr).metrics["grad_norm"] for _ in range(2)]
    result["updates"] = {key: whole - before[key] for key, whole in model.whole_weights().items()}
    result["after"] = measure_pairs(model, pairs, 3)
    result["scale"] = asdict(scale_of(model, pairs, 3))
    result["scores after"] = torch.stack(scores_of(model, pairs, PAIRS))
    return result


def expected_gradients(model: ScalarModel, pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """The gradient of the loss, pair by pair: every response alone, with the derivative of its pair's term."""
    sums: dict[str, torch.Tensor] = {}
    for pair in pairs:
        model.initialize(seed=0)
        rows = (pair.chosen, pair.rejected)
        chosen, rejected = (float(model.values(pack_rows([row]))[-1]) for row in rows)
        slope = 1 - torch.sigmoid(torch.tensor(chosen - rejected, dtype=torch.float64))
        for row, sign in zip(rows, (-1, 1), strict=True):
            model.initialize(seed=0)
            batch = pack_rows([row])
            model.gradients(batch.with_(weight=batch.mask * float(sign * slope / len(pairs))), value_itself)
            for key, gradient in model.whole_gradients().items():
                sums[key] = sums.get(key, 0.0) + gradient.double()
    return sums


if __name__ == "__main__":
    save_each(one_step)
