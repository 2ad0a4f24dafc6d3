"""Layout changes nothing: samples, log-probs, loss, gradients and updates of a GRPO step equal those of one rank."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

JOB = Path(__file__).with_name("layouts_job.py")
EXACT = {
    1: [
        "dense:small",
        "dense_gspo:small",
        "moe:small",
        "mla:small",
        "moe:recompute",
        "moe:selective",
        "balanced:small",
        "mtp:recompute",
        "replayed:small",
    ],
    2: [
        *(
            "dense:tp2",
            "dense:tp2sp",
            "dense:pp2",
            "dense:pp2small",
            "dense:dp2",
            "dense:cp2",
            "dense:dp2zero",
            "dense:cp2zero",
        ),
        *("tied:tp2", "tied:pp2", "tied:dp2"),
        *("dense_gspo:tp2sp", "dense_gspo:pp2small", "dense_gspo:cp2", "dense_cispo:cp2small", "dense_cispo:dp2zero"),
        *(
            "moe:tp2sp",
            "moe:tp2etp2",
            "moe:pp2",
            "moe:pp2small",
            "moe:ep2",
            "moe:dp2",
            "moe:tp2ep2",
            "moe:cp2small",
            "moe:cp2one",
        ),
        *("padded:tp2sp", "mla:tp2sp", "mla:pp2", "mla:ep2", "mla:cp2"),
        *("balanced:tp2sp", "balanced:pp2small", "balanced:ep2", "balanced:cp2small"),
        *("deepseek:pp2uneven", "deepseek:vpp2", "deepseek:ep2zero", "deepseek:tp2recompute", "deepseek:vpp2recompute"),
        *("mtp:tp2sp", "mtp:vpp2", "mtp:ep2zero", "mtp:vpp2recompute"),
        *("replayed:tp2sp", "replayed:cp2small", "replayed:ep2zero", "replayed:vpp2recompute"),
        *("dense_mtp2:tp2", "dense_mtp2:pp2small", "dense_mtp2:cp2small"),
    ],
    4: [
        *("dense:tp2pp2", "dense:cp4", "tied:tp2pp2", "tied:pp2dp2zero", "mla:tp2pp2", "mla:cp2tp2", "mla:cp2pp2"),
        "padded:tp4sp",
        *("moe:tp2pp2", "moe:tp2dp2", "moe:ep2pp2", "moe:tp2ep4", "moe:ep2dp4", "moe:cp2ep2"),
        *("deepseek:tp2vpp2", "deepseek:tp2dp2zero", "deepseek:vpp2zero", "balanced:cp2tp2", "replayed:tp2vpp2"),
        *("mtp:tp2vpp2", "mtp:cp2tp2"),
    ],
}
AT_ONCE = 15
"""Layouts that one job goes through: each leaves its threads of gloo behind, and hundreds of them take their time."""
ROUNDED = {
    2: ["dense_bf16:tp2sp", "dense_bf16:pp2", "deepseek_bf16:tp2sp", "deepseek_bf16:ep2zero", "deepseek_bf16:cp2"]
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("steps")
    for world_size in (1, 2, 4):
        names = (references() if world_size == 1 else []) + EXACT[world_size] + ROUNDED.get(world_size, [])
        for start in range(0, len(names), AT_ONCE):
            run_ranks(JOB, world_size, [str(out), *names[start : start + AT_ONCE]])
    return {path.stem: torch.load(path) for path in out.glob("*.pt")}


@pytest.mark.parametrize("name", [name for names in EXACT.values() for name in names])
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
        total, worst = distances(steps[name]["gradients"], reference(steps, name)["gradients"])
        assert total < 1e-6
        assert max(worst.values()) < 5e-6, worst

    def test_every_update(self, steps, name):
        assert steps[name]["grad_norms"] == pytest.approx(reference(steps, name)["grad_norms"], rel=2e-6)
        total, worst = distances(steps[name]["updates"], reference(steps, name)["updates"])
        assert total < 5e-6
        assert max(worst.values()) < 5e-5, worst

    def test_generation_after_the_updates(self, steps, name):
        after, expected = steps[name]["after"], reference(steps, name)["after"]
        assert list(after) == list(expected)
        for tokens, logprobs in after.items():
            assert logprobs == pytest.approx(expected[tokens], rel=0, abs=1e-5)

    def test_expert_loads(self, steps, name):
        if name.startswith(("dense", "tied")):
            pytest.skip("no experts")
        # Every token of every sequence counts for its two experts, and nothing else does.
        tokens = steps[name]["sequence_tokens"]
        layers = {"deepseek": 3, "mtp": 4, "replayed": 4}.get(name.split(":")[0], 1)
        assert [sum(load) for load in steps[name]["expert_loads"].values()] == [2 * tokens] * layers
        assert steps[name]["expert_loads"] == reference(steps, name)["expert_loads"]

    def test_parameter_count(self, steps, name):
        assert steps[name]["parameters"] == reference(steps, name)["parameters"]


@pytest.mark.parametrize("name", [name for names in ROUNDED.values() for name in names])
class TestAgainstOneRankInBf16:
    """One rounding to bf16 is 2^-8 = 0.004 relative."""

    def test_log_probs(self, steps, name):
        torch.testing.assert_close(steps[name]["logprob"], reference(steps, name)["logprob"], atol=0.1, rtol=0)

    def test_every_gradient(self, steps, name):
        total, worst = distances(steps[name]["gradients"], reference(steps, name)["gradients"])
        assert total < 0.04
        assert max(worst.values()) < 0.1, worst

    def test_every_update(self, steps, name):
        assert steps[name]["grad_norms"] == pytest.approx(reference(steps, name)["grad_norms"], rel=0.02)
        # The weights themselves are rounded to bf16.
        total, _ = distances(steps[name]["updates"], reference(steps, name)["updates"])
        assert total < 0.15


def references():
    names = [name for cases in (EXACT, ROUNDED) for group in cases.values() for name in group]
    return sorted({f"{name.split(':')[0]}:single" for name in names})


def reference(steps, name):
    return steps[f"{name.split(':')[0]}:single"]


def distances(mine, whole):
    """Relative L2 distance of all tensors together, and of each by its key."""
    assert mine.keys() == whole.keys()
    off = {key: (mine[key].double() - whole[key].double()).norm() for key in whole}
    size = {key: whole[key].double().norm() for key in whole}
    total = torch.stack([*off.values()]).norm() / torch.stack([*size.values()]).norm()
    return total, {key: off[key] / size[key] for key in whole}
