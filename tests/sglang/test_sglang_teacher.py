"""A teacher on a real SGLang server: its log-probs are the same teacher's as a Megatron model, and a student learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
from forks import free_port
from made_tokenizer import write_tokenizer
from made_weights import random_weights
from on_cuda import CLOSE, CUDA, TINY
from ranks import results, run_ranks
from safetensors.torch import save_file
from train_jobs import Job, numbers, wait_until
from transformers import AutoTokenizer

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.rollout.sglang.arguments import ON_CPU, SPARE_POSITIONS  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402

JOB = Path(__file__).with_name("teacher_job.py")
CONTEXT = 128
"""Tokens of the student's longest sequence."""
IN_PARTS = ["--chunked-prefill-size", "64"]
"""Long sequences are computed in several parts."""


@dataclass(frozen=True)
class Served:
    """A Hugging Face folder, and the address of a server of it."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The teacher, a mixture of experts with random weights and a tokenizer of its own; its context is just enough."""
    root = tmp_path_factory.mktemp("teacher")
    folder = write_tokenizer(root / "model", with_bos=True)
    size, model = len(AutoTokenizer.from_pretrained(folder)), compose_config(["experiment=tiny_sglang", *TINY]).model
    content = hf_config(model, size) | {"max_position_embeddings": CONTEXT + SPARE_POSITIONS}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(random_weights(model, size), folder / "model.safetensors")
    port = free_port()
    on_cpu = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in ON_CPU.items()]
    words = ["--model-path", folder, "--port", port, "--dtype", "bfloat16" if CUDA else "float32", *IN_PARTS]
    command = [sys.executable, "-m", "sglang.launch_server", *map(str, words), *([] if CUDA else on_cpu)]
    with (root / "server.log").open("w") as log:
        environment = os.environ | ({} if CUDA else {"SGLANG_USE_CPU_ENGINE": "1"})
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    served = Served(folder, f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: server.poll() is not None or answers(served.url), "no SGLang server", pause=0.5)
        assert server.poll() is None, (root / "server.log").read_text()[-4000:]
        yield served
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
        server.wait()


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        with urlopen(f"{url}/health_generate", timeout=30) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


def test_its_log_probs_are_those_of_the_teacher_as_a_megatron_model(teacher: Served) -> None:
    found = results(run_ranks(JOB, 1, [str(teacher.folder), teacher.url]))
    assert found["tokens"] > 1000
    assert found["deviation"] > 0.2, "tokens are not alike"
    assert found["apart"] < CLOSE
    assert "exceeds the maximum allowed length" in found["too long"] or "context length" in found["too long"]
    assert f"context of at least {CONTEXT + 64 + SPARE_POSITIONS}" in found["too long"]
    assert "its answer has no log-probs of the tokens" in found["too many"]
    assert "its tokens differ from the policy's: 0 is '<bos>' there and '<bos>?' here" in found["others"]


def test_a_step_of_distillation_is_that_of_the_teacher_as_a_megatron_model(teacher: Served, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(problem(i) for i in range(300)))
    (tmp_path / "test.jsonl").write_text("".join(problem(i) for i in range(900, 904)))
    student = [
        "experiment=tiny_distill", "base=none", "layout=single", f"model.context={CONTEXT}", "data=jsonl",
        f"data.tokenizer={teacher.folder}", f"data.train_path={tmp_path}/train.jsonl",
        f"data.test_path={tmp_path}/test.jsonl", "data.validation_size=4", "reward=boxed", "run.tensorboard=false",
        "algorithm.prompts_per_step=8", "rollout.max_new_tokens=32", "run.steps=1", "run.eval_every=0",
    ]  # fmt: skip
    steps = {}
    for name, path in (("served", teacher.url), ("own", teacher.folder)):
        words = [*student, f"distill.teacher={path}", f"run.name={name}"]
        ended = Job(tmp_path, words, environment={"PYTHONPATH": os.environ["PYTHONPATH"]}).finish()
        assert ended.code == 0, ended.stderr
        (steps[name],) = numbers(tmp_path / "runs" / name)
    assert steps["served"]["distill/teacher_logprob"] < -3, "a teacher of random weights"
    assert steps["served"]["policy/grad_norm"] > 0
    for name in ("distill/teacher_logprob", "distill/reverse_kl", "policy/grad_norm"):
        assert steps["served"][name] == pytest.approx(steps["own"][name], rel=CLOSE)


def problem(number: int) -> str:
    """A line of a file of problems."""
    return json.dumps({"prompt": f"What is {number} + 5?", "answer": number + 5}) + "\n"
