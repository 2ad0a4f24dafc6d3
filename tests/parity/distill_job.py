"""A step of on-policy distillation and a supervised one under several layouts, both made up; started by run_ranks.

Usage: distill_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import torch
from composed import composed
from layouts_job import HERE, SMALL_BUCKETS, TEMPERATURE, VOCAB, made_up_batch, save_each
from parity_cases import LAYOUTS, MODELS, optimizer

from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import Teacher
from grpo_mega.models.topology import join_layout
from grpo_mega.stages.distill import teacher_metrics, with_teacher
from grpo_mega.stages.sft import supervised_update
from grpo_mega.stages.step import loss_of
from grpo_mega.types import Row, pack_rows

TEACHERS = {"dense": "mtp", "moe": "tied", "tied": "deepseek", "deepseek": "gemma"}
"""Student -> a teacher of another architecture; of dense and mixture of experts, each teaches the other."""
CONFIG = composed("experiment=tiny_distill", "distill.coef=0.5", f"rollout.temperature={TEMPERATURE}")
REWARDED = composed("experiment=tiny_distill", "algorithm.group_size=2", "distill.reward_coef=0.1")


def one_step(model_name: str, layout_name: str) -> dict:
    layout, adam = LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    policy = Policy(MODELS[model_name], layout, VOCAB, topology, HERE, **buffers)
    policy.initialize(seed=0)
    teacher = Teacher(MODELS[TEACHERS[model_name]], layout, VOCAB, topology, HERE)
    teacher.initialize(seed=0)
    whole = made_up_batch(MODELS[model_name], replayed=False)
    batch = policy.share(whole)
    batch = batch.with_(old_logprob=policy.logprobs(batch, TEMPERATURE))
    taught = with_teacher(batch, teacher, CONFIG.distill, CONFIG.rollout.temperature)
    rewarded = with_teacher(batch, teacher, REWARDED.distill, REWARDED.rollout.temperature)
    loss = loss_of(CONFIG.algorithm, old_is_current=False)
    result = {
        "mask": whole.mask,
        "teacher": policy.gathered(taught.teacher_logprob, batch),
        "advantage": policy.gathered(taught.advantage, batch),
        "rewarded": policy.gathered(rewarded.advantage, batch),
        "kl": teacher_metrics(taught, topology),
        "metrics": [policy.gradients(taught, loss, TEMPERATURE).metrics],
        "gradients": policy.whole_gradients(),
    }
    before, of_teacher = policy.whole_weights(), teacher.whole_weights()
    policy.use_optimizer(adam)
    result["metrics"] += [policy.update(taught, loss, adam.lr, TEMPERATURE).metrics for _ in range(2)]
    result["updates"] = {key: weight - before[key] for key, weight in policy.whole_weights().items()}
    result["still"] = all(torch.equal(weight, of_teacher[key]) for key, weight in teacher.whole_weights().items())
    result["own"] = own_teacher(model_name, layout_name, topology)
    result["shares"] = topology.of_every_replica([len(batch.numbers), int(batch.mask.sum())])
    return result | supervised_step(policy, adam.lr)


def made_up_rows() -> list[Row]:
    """Rows of many lengths; most of the long ones have little to learn, so that replicas with equally many tokens learn
    different numbers of them. One has two parts to learn."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCAB, (3 + 5 * i % 23,), generator=generator).tolist() for i in range(9)]
    learned = [((len(ids) - 1, len(ids)),) if len(ids) > 15 else ((1, len(ids)),) for ids in rows]
    learned[1] = ((1, 3), (5, 8))
    return [Row(*row) for row in zip(rows, learned, strict=True)]


def supervised_step(policy: Policy, lr: float) -> dict:
    """A supervised update of the policy, and the loss that it should report."""
    rows = made_up_rows()
    whole = pack_rows(rows)
    batch, before = policy.share(whole), policy.whole_weights()
    logprob = policy.gathered(policy.logprobs(batch, 1.0), batch)
    metrics = supervised_update(policy, rows, lr).metrics
    return {
        "supervised": metrics,
        "supervised loss": -float(logprob[whole.mask].double().mean()),
        "supervised shares": policy.topology.of_every_replica([int(batch.mask.sum())]),
        "supervised updates": {key: weight - before[key] for key, weight in policy.whole_weights().items()},
    }


def own_teacher(model_name: str, layout_name: str, topology) -> dict:
    """What a policy learns from a teacher with its own weights."""
    layout = LAYOUTS[layout_name]
    policy = Policy(MODELS[model_name], layout, VOCAB, topology, HERE)
    teacher = Teacher(MODELS[model_name], layout, VOCAB, topology, HERE)
    for model in (policy, teacher):
        model.initialize(seed=0)
    batch = policy.share(made_up_batch(MODELS[model_name], replayed=False))
    batch = with_teacher(
        batch.with_(old_logprob=policy.logprobs(batch, TEMPERATURE)),
        teacher,
        CONFIG.distill,
        CONFIG.rollout.temperature,
    )
    policy.gradients(batch, loss_of(CONFIG.algorithm, old_is_current=False), TEMPERATURE)
    squares = [float(gradient.double().square().sum()) for gradient in policy.whole_gradients().values()]
    return {
        "kl": teacher_metrics(batch, topology),
        "gradient": sum(squares) ** 0.5,
    }


if __name__ == "__main__":
    save_each(one_step)
