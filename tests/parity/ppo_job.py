"""A step of PPO's critic under several layouts, from made-up completions; started by run_ranks.

Usage: ppo_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import torch
from composed import composed
from layouts_job import HERE, SMALL_BUCKETS, VOCAB, made_up_batch, save_each
from parity_cases import LAYOUTS, MODELS, optimizer

from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import ClippedSquaredError, ScalarModel
from grpo_mega.models.topology import join_layout
from grpo_mega.stages.ppo import critic_update, with_critic

CONFIG = composed("experiment=tiny_ppo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1")
LOSS = ClippedSquaredError(0.02)
"""So narrow that some values are outside after an update, and others are not."""


def one_step(model_name: str, layout_name: str) -> dict:
    layout, adam = LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    policy = Policy(MODELS[model_name], layout, VOCAB, topology, HERE, **buffers)
    policy.initialize(seed=0)
    critic = ScalarModel("critic", MODELS[model_name], layout, VOCAB, topology, HERE, **buffers, before=True)
    critic.take_body(policy)
    critic.use_optimizer(adam)
    whole = made_up_batch(MODELS[model_name], replayed=False)
    scores = torch.sin(3.0 * torch.arange(len(whole.numbers))).tolist()
    mine = critic.share(whole)
    shares = topology.of_every_replica([len(mine.numbers), int(mine.mask.sum())])
    result: dict = {"mask": whole.mask, "shares": shares, "steps": []}
    for _ in range(2):  # in the first one all values are 0
        batch = with_critic(mine, scores, critic, CONFIG.algorithm, CONFIG.critic)
        updates = [critic_update(batch, critic, LOSS, adam.lr) for _ in range(2)]
        assert batch.value is not None
        assert batch.returns is not None
        result["steps"].append(
            {name: critic.gathered(getattr(batch, name), batch) for name in ("value", "advantage", "returns")}
            | {
                "explained": [update.metrics.pop("explained_variance") for update in updates],
                "metrics": [update.metrics for update in updates],
                "moved": critic.gathered(updates[1].outputs - batch.value * batch.mask, batch),
            }
        )
    result["weights"] = critic.whole_weights()
    return result


if __name__ == "__main__":
    save_each(one_step)
