"""A real SGLang engine through the contract of all engines and checks of its own; prints {check: what went wrong}.

Usage: sglang_contract_job.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "rollout")]

import engine_contract_job  # noqa: E402  (prepares the platform)
import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from engine_contract import CHECKS, LONG, Bench, move, refused, sampling  # noqa: E402
from limits import limit  # noqa: E402
from on_cuda import CLOSE, CUDA  # noqa: E402
from prefix_cache import missed  # noqa: E402

from grpo_mega.rollout.contract import EngineError, EngineRestarted  # noqa: E402
from grpo_mega.rollout.stream import Stream, generate  # noqa: E402
from grpo_mega.stages.exchange import pack_samples  # noqa: E402
from grpo_mega.types import Sample, Score  # noqa: E402


def scheduler(bench: Bench) -> psutil.Process:
    """SGLang's process that computes."""
    processes = [psutil.Process(pid) for pid in bench.engine.pids()]
    return next(p for p in processes if "scheduler" in " ".join(p.cmdline()))


def check_a_lost_engine_is_started_anew_and_goes_on(bench: Bench) -> None:
    """Killed when some samples are finished; those are kept, as their log-probs under the old weights tell.

    Samples are scored while others are generated, in all each once, and come in the order of the prompts.
    """
    engine, old = bench.engine, scheduler(bench)
    scored: Counter[tuple[str, int]] = Counter()
    at_work: list[bool] = []

    def score(samples: Sequence[Sample]) -> list[Score]:
        scored.update((s.prompt.id, s.index) for s in samples)
        at_work.append(engine.busy)
        return [Score(float(len(s.token_ids)), {"length": float(len(s.token_ids))}) for s in samples]

    def kill() -> bool:
        if scored and old.is_running():
            old.send_signal(signal.SIGKILL)
        return False

    how = sampling(max_new_tokens=LONG, stop_ids=(2, 3, 4, 5))
    prompts = [replace(p, id=f"{p.id}-{i}") for i in range(60) for p in bench.prompts]
    stream = Stream(engine, score, 3)
    stream.add(prompts)
    with pytest.raises(EngineRestarted, match=r"rank 0 died[^$]*engine-0\.log"):
        stream.advance(how, bench.version, interrupted=kill)
    engine._engines._restarts -= 1  # the other checks need theirs
    assert not old.is_running()
    assert at_work[0]
    assert sum(scored.values()) < len(prompts) * 3
    refused(lambda: bench.samples(how), "push")
    before = other_weights(bench)
    stream.advance(how, bench.version)
    rollout = stream.take()
    samples = [rollout.samples[number] for number in range(len(prompts) * 3)]
    assert [(s.prompt.id, s.index) for s in samples] == [(p.id, i) for p in prompts for i in range(3)]
    assert scored == Counter((p.id, index) for p in prompts for index in range(3))
    assert [a.score.total for a in rollout.infos] == [len(s.token_ids) for s in samples]
    batch = pack_samples(samples).with_(experts=None)  # a prompt's are those of one sample, whatever its weights
    now = bench.policy.logprobs(batch, 1.0)
    put(before, bench)
    then = bench.policy.logprobs(batch, 1.0)
    near = [(x - batch.rollout_logprob).abs() < CLOSE for x in (then, now)]
    of = [torch.stack([part.all() for part in x.split(batch.lengths.tolist())]) for x in near]
    assert (of[0] | of[1]).all()
    assert of[0].any(), "no sample was kept"
    assert of[1].any(), "nothing was left to do"
    bench.push_all()


def other_weights(bench: Bench) -> list[torch.Tensor]:
    """Moves the policy and pushes it as the same version; the weights before."""
    before = [parameter.detach().clone() for parameter in bench.policy.chunks.parameters()]
    move(bench.policy)
    bench.version -= 1
    bench.push_all()
    return before


def put(weights: list[torch.Tensor], bench: Bench) -> None:
    with torch.no_grad():
        for parameter, weight in zip(bench.policy.chunks.parameters(), weights, strict=True):
            parameter.copy_(weight)


def check_experts_are_the_policys(bench: Bench) -> None:
    """The engine sends tokens where the trainer does, all of them in fp32: replay moves log-probs by rounding alone."""
    samples = bench.samples(sampling(), interrupted=lambda: False)
    moe = bench.policy.architecture.moe
    layers = bench.policy.architecture.layers - moe.first_dense
    for s in samples:
        assert s.experts.shape == (len(s.prompt.token_ids) + len(s.token_ids) - 1, layers, moe.top_k)
    batch = pack_samples(samples)
    assert batch.experts.unique().tolist() == [-1, *range(moe.experts)]
    own = bench.policy.logprobs(batch.with_(experts=None), 1.0)
    moved = (bench.policy.logprobs(batch, 1.0) - own).abs()
    assert (moved.median() if CUDA else moved.max()) < CLOSE / 10  # bf16 sends some tokens elsewhere
    others = torch.where(batch.experts < 0, -1, (batch.experts + 1) % moe.experts)
    assert (bench.policy.logprobs(batch.with_(experts=others), 1.0) - own).abs().max() > 1e-3


def check_weights_that_did_not_arrive_are_noticed(bench: Bench) -> None:
    sync = bench.weight_sync(verify_every=2)
    sync.send(bench.version)
    expected = sync.expected()
    assert sync.verify(expected) < CLOSE
    assert sync.take_traffic().bytes == sum(tensor.nbytes for bucket in bench.buckets() for _, tensor in bucket)
    sync.send(bench.version)
    assert sync.expected() is None, "every second time"
    move(bench.policy)
    sync.verify(expected)
    sync.send(bench.version)
    refused(lambda: sync.verify(expected), "engine 0", "differ from the trainer's by")


def check_a_single_stale_expert_is_noticed(bench: Bench) -> None:
    sync = bench.weight_sync()
    stale = "model.layers.1.mlp.experts.2.down_proj.weight"
    old = {name: tensor for bucket in bench.buckets() for name, tensor in bucket if name == stale}
    if CUDA:
        old[stale] *= -100  # bf16 alone moves log-probs about as far as one expert does
    move(bench.policy)
    bench.engine.begin_update()
    for bucket in bench.buckets():
        bench.engine.push([(name, old.get(name, tensor)) for name, tensor in bucket])
    bench.engine.end_update(bench.version)
    refused(lambda: sync.verify(sync.expected()), "engine 0", "differ from the trainer's by")
    bench.push_all()
    sync.verify(sync.expected())


def check_an_engine_that_generates_nothing_is_lost(bench: Bench) -> None:
    """Tokens are signs of life, also when no sample is finished; without any the engine is started anew."""
    engine, old = bench.engine, scheduler(bench)
    engine._config.silence_seconds, before = round(limit(3.0)), engine._config.silence_seconds

    def suspend() -> bool:
        if engine._contract.under_way < len(prompts) * 3 and old.is_running():
            old.send_signal(signal.SIGSTOP)
        return False

    prompts = [replace(p, id=f"{p.id}-{i}") for i in range(60) for p in bench.prompts]
    how = sampling(max_new_tokens=LONG, stop_ids=(2, 3, 4, 5))
    with pytest.raises(EngineRestarted, match=f"generated nothing within {engine._config.silence_seconds:g} s"):
        generate(engine, prompts, 3, how, bench.version, suspend)
    assert not old.is_running()
    engine._config.silence_seconds = before
    bench.push_all()
    assert len(generate(engine, prompts, 3, how, bench.version)) == len(prompts) * 3


def check_what_is_said_too_late_is_no_concern_of_the_next_generation(bench: Bench) -> None:
    for _ in range(2):
        bench.engine._engines.process.tell("abort")
    samples = bench.samples(sampling())
    assert {s.finish_reason for s in samples} <= {"stop", "length"}


def check_samples_of_broken_weights_are_refused(bench: Bench) -> None:
    """The engine itself is sound: with good weights it goes on, without being started anew."""
    process = scheduler(bench)
    bench.engine.begin_update()
    for bucket in bench.buckets():
        bench.engine.push([(name, tensor * float("nan") if "norm" in name else tensor) for name, tensor in bucket])
    bench.version += 1
    bench.engine.end_update(bench.version)
    prompts = [replace(p, id=f"{p.id}-{i}") for i in range(30) for p in bench.prompts]
    refused(lambda: generate(bench.engine, prompts, 3, sampling(), bench.version), "nan", "weights whole")
    bench.push_all()
    bench.check_log_probs(bench.samples(sampling()))
    assert process.is_running()


def check_an_engine_that_does_not_answer_is_lost(bench: Bench) -> None:
    engine = bench.engine
    engine._config.answer_seconds, before = 1.0, engine._config.answer_seconds
    scheduler(bench).send_signal(signal.SIGSTOP)
    with pytest.raises(EngineRestarted, match="did not answer release within 1 s"):
        engine.release(["kv_cache"])
    engine._config.answer_seconds = before
    bench.push_all()
    bench.check_log_probs(bench.samples(sampling()))


def check_samples_go_on_from_the_prefix_cache(bench: Bench) -> None:
    assert abs(missed(bench)) < 0.01


def check_restarts_are_bounded(bench: Bench) -> None:
    engine = bench.engine
    engine._engines._restarts = engine._config.restarts
    scheduler(bench).send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rollout\.sglang\.restarts=3") as given_up:
        bench.samples(sampling(max_new_tokens=LONG, stop_ids=()))
    assert not isinstance(given_up.value, EngineRestarted)
    nothing_is_left()


def check_unknown_server_arguments_are_refused(bench: Bench) -> None:
    engines = bench.engine._engines
    engines._restarts, engines._arguments = 0, engines._arguments | {"mem_fraction_statik": 0.5}
    words = ("mem_fraction_statik", "mem_fraction_static?", "sglang.arguments")
    refused(lambda: engines.on_owners(lambda: engines._start([engines._start_conditions()])), *words)
    nothing_is_left()


def nothing_is_left() -> None:
    """No process of an engine is."""
    names = [" ".join(p.cmdline()) for p in psutil.Process(os.getpid()).children(recursive=True)]
    assert not [name for name in names if "sglang.host" in name or "sglang::" in name]


OWN = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    bench = engine_contract_job.made(Path(sys.argv[1]), "sglang")
    bench.push_all()
    found = {name: engine_contract_job.problem(bench, check) for name, check in {**CHECKS, **OWN}.items()}
    bench.engine.close()
    engine_contract_job.leave_layout()
    print(json.dumps(found))
