"""Gradients and updates of a process reward model under several layouts, from made-up completions; by run_ranks.

Usage: step_scores_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import random
from array import array

import torch
from layouts_job import HERE, SMALL_BUCKETS, VOCAB, save_each
from parity_cases import LAYOUTS, MODELS, optimizer

from grpo_mega.data.labelled_steps import LabelledCompletion
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel, value_itself
from grpo_mega.models.topology import join_layout
from grpo_mega.stages.process_reward_model import measure_steps, scores_of, step_gradients, step_update
from grpo_mega.types import Row, pack_rows

COMPLETIONS = 9
"""An odd number: replicas cannot have equally many."""


def made_up_completions() -> list[LabelledCompletion]:
    """Completions of one step and more, of few tokens and many; replicas have other numbers of steps."""
    chance, completions = random.Random(7), []
    for number in range(COMPLETIONS):
        prompt = [1, *(chance.randrange(3, VOCAB) for _ in range(number))]
        ids = [*prompt, *(chance.randrange(3, VOCAB) for _ in range(4 + 5 * (number % 4))), 2]
        inner = range(len(prompt), len(ids) - 1)
        ends = [*sorted(chance.sample(inner, min(len(inner), number % 5))), len(ids) - 1]
        labels = tuple(chance.choice([0.0, 1.0, 0.25, 0.5]) for _ in ends)
        row = Row(array("i", ids), tuple((end, end + 1) for end in ends))
        completions.append(LabelledCompletion(row, labels, len(prompt), f"completion {number}"))
    return completions


def one_step(model_name: str, layout_name: str) -> dict:
    layout, adam = LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    model = ScalarModel(REWARD_MODEL, MODELS[model_name], layout, VOCAB, topology, HERE, **buffers)
    model.initialize(seed=3)
    completions = made_up_completions()
    result: dict = {"scores": scores_of(model, completions, COMPLETIONS), "in parts": scores_of(model, completions, 2)}
    result["metrics"] = step_gradients(model, completions).metrics
    result["gradients"] = model.whole_gradients()
    if topology.world_size == 1:
        result["expected"] = expected_gradients(model, completions)
    model.initialize(seed=3)  # a backward pass may move the biases of routers
    result["said"] = measure_steps(model, completions, 4)
    before = model.whole_weights()
    model.use_optimizer(adam)
    result["norms"] = [step_update(model, completions, adam.lr).metrics["grad_norm"] for _ in range(2)]
    result["updates"] = {key: whole - before[key] for key, whole in model.whole_weights().items()}
    result["after"] = measure_steps(model, completions, 4)
    return result


def expected_gradients(model: ScalarModel, completions: list[LabelledCompletion]) -> dict[str, torch.Tensor]:
    """The gradient of the loss, completion by completion alone: (sigmoid(score) - label) / steps, in float64."""
    sums: dict[str, torch.Tensor] = {}
    steps = sum(len(completion.labels) for completion in completions)
    for completion in completions:
        model.initialize(seed=3)
        batch = pack_rows([completion.row])
        values = model.values(batch)[batch.mask].double()
        slopes = (torch.sigmoid(values) - torch.tensor(completion.labels, dtype=torch.float64)) / steps
        model.initialize(seed=3)
        weight = torch.zeros(len(batch.mask)).masked_scatter(batch.mask, slopes.float())
        model.gradients(batch.with_(weight=weight), value_itself)
        for key, gradient in model.whole_gradients().items():
            sums[key] = sums.get(key, 0.0) + gradient.double()
    return sums


if __name__ == "__main__":
    save_each(one_step)
