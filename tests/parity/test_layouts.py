"""Layout changes nothing: samples, log-probs, loss and every gradient of a GRPO step equal those of one rank."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

JOB = Path(__file__).with_name("layouts_job.py")
REFERENCES = ["dense:single", "tied:single", "moe:single", "mla:single"]
CASES = {
    1: ["dense:small", "moe:small", "mla:small"],
    2: [
        *("dense:tp2", "dense:tp2sp", "dense:pp2", "dense:pp2small", "dense:dp2"),
        *("tied:tp2", "tied:pp2", "tied:dp2"),
        *("moe:tp2sp", "moe:tp2etp2", "moe:pp2", "moe:pp2small", "moe:ep2", "moe:dp2", "moe:tp2ep2"),
        *("mla:tp2sp", "mla:pp2", "mla:ep2"),
    ],
    4: [
        *("dense:tp2pp2", "tied:tp2pp2", "mla:tp2pp2"),
        *("moe:tp2pp2", "moe:tp2dp2", "moe:ep2pp2", "moe:tp2ep4", "moe:ep2dp4"),
    ],
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("steps")
    for world_size, names in CASES.items():
        run_ranks(JOB, world_size, [str(out), *(REFERENCES if world_size == 1 else []), *names])
    return {path.stem: torch.load(path) for path in out.glob("*.pt")}


@pytest.mark.parametrize("name", [name for names in CASES.values() for name in names])
class TestAgainstOneRank:
    def test_samples_are_the_same_tokens(self, steps, name):
        assert steps[name]["tokens"] == reference(steps, name)["tokens"]

    def test_engine_and_trainer_agree(self, steps, name):
        step = steps[name]
        torch.testing.assert_close(step["logprob"], step["rollout_logprob"], atol=1e-5, rtol=0)

    def test_log_probs(self, steps, name):
        torch.testing.assert_close(steps[name]["logprob"], reference(steps, name)["logprob"], atol=1e-5, rtol=0)

    def test_loss_and_metrics(self, steps, name):
        assert steps[name]["metrics"] == pytest.approx(reference(steps, name)["metrics"], rel=2e-6, abs=1e-7)

    def test_every_gradient(self, steps, name):
        mine, whole = steps[name]["gradients"], reference(steps, name)["gradients"]
        assert mine.keys() == whole.keys()
        distance = {key: (mine[key] - whole[key]).norm() for key in whole}
        size = {key: whole[key].norm() for key in whole}
        assert torch.stack([*distance.values()]).norm() / torch.stack([*size.values()]).norm() < 1e-6
        worst = max(whole, key=lambda key: distance[key] / size[key])
        assert distance[worst] / size[worst] < 5e-6, worst

    def test_expert_bias(self, steps, name):
        mine, whole = steps[name]["expert_bias"], reference(steps, name)["expert_bias"]
        assert mine.keys() == whole.keys()
        assert all(torch.equal(mine[layer], whole[layer]) for layer in whole)

    def test_parameter_count(self, steps, name):
        assert steps[name]["parameters"] == reference(steps, name)["parameters"]


def reference(steps, name):
    return steps[f"{name.split(':')[0]}:single"]
