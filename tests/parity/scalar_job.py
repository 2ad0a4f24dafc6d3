"""Values, loss, whole gradients and two updates of a scalar model under several layouts; started by run_ranks.

Usage: scalar_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import torch
from layouts_job import HERE, SMALL_BUCKETS, VOCAB, made_up_batch, save_each
from parity_cases import LAYOUTS, MODELS, optimizer
from squared_error import squared_error

from grpo_mega.models.scalar import ScalarModel
from grpo_mega.models.topology import join_layout
from grpo_mega.types import Batch


def weighted(batch: Batch) -> Batch:
    """Prompts and first tokens count as well, most tokens with a weight of their own."""
    mask = torch.arange(len(batch.tokens)) % 7 != 3
    weight = mask * (1.5 + torch.cos(torch.arange(len(batch.tokens)))) / len(batch.tokens)
    return batch.with_(mask=mask, weight=weight)


def one_step(model_name: str, layout_name: str) -> dict:
    layout, adam = LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    model = ScalarModel("critic", MODELS[model_name], layout, VOCAB, topology, HERE, **buffers)
    model.initialize(seed=0)
    whole = weighted(made_up_batch(MODELS[model_name], replayed=False))
    batch = model.share(whole.with_(advantage=torch.sin(torch.arange(len(whole.tokens)))))
    loss = squared_error(batch.advantage)
    result = {
        "parameters": model.parameters(),
        "values": model.gathered(model.values(batch), batch),
        "mask": whole.mask,
    }
    found = model.gradients(batch, loss)
    result |= {
        "trained": model.gathered(found.outputs, batch),
        "metrics": found.metrics,
        "gradients": model.whole_gradients(),
    }
    result["loads"] = {layer: sum(load) for layer, load in found.expert_loads.items()}
    before = model.whole_weights()
    model.use_optimizer(adam)
    result["norms"] = [model.update(batch, loss, adam.lr).metrics["grad_norm"] for _ in range(2)]
    result["updates"] = {key: whole - before[key] for key, whole in model.whole_weights().items()}
    result["after"] = model.gathered(model.values(batch), batch)
    frozen = ScalarModel("reward model", MODELS[model_name], layout, VOCAB, topology, HERE, optimizer=None)
    frozen.initialize(seed=0)
    result["frozen"] = frozen.gathered(frozen.values(batch), batch)
    return result


if __name__ == "__main__":
    save_each(one_step)
