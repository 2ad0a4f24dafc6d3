"""`tools/gpu_smoke.py`: its commands are right, and it tells how each step ended, whatever the step does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from composed import composed
from forks import run_python
from ranks import REPOSITORY

sys.path.append(str(REPOSITORY / "tools"))  # last: some of them have names of modules, as trace.py

from gpu_smoke import run_steps
from gpu_smoke_steps import COMPLETED, PASSED, Step, steps_of

from grpo_mega.config.rules import check_backend, check_layout

MACHINES = [("one", 1), ("two", 2), ("node", 4), ("node", 6)]
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    "hidden_act": "silu",
}  # fmt: skip
"""config.json of Qwen2.5-0.5B, as far as it matters."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"  # with a space
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    return folder


@pytest.mark.parametrize(("size", "gpus"), MACHINES)
def test_every_run_is_one_that_a_machine_with_these_gpus_takes(size: str, gpus: int, model: Path) -> None:
    """What `--cfg job` and the first checks of a run would say."""
    runs = [step for step in steps_of(size, gpus, Path("/tmp/smoke"), model) if "grpo_mega.train" in step.words()]
    assert runs
    for step in runs:
        words = step.words()
        processes, settings = (
            int(words[words.index("--nproc-per-node") + 1]),
            words[words.index("grpo_mega.train") + 1 :],
        )
        config = composed(*settings)
        check_layout(config, processes)
        check_backend(config.layout, "nccl")
        assert config.run.root == "/tmp/smoke/runs"
        assert processes <= gpus


@pytest.mark.parametrize(("size", "gpus"), MACHINES)
def test_every_other_command_exists(size: str, gpus: int, tmp_path: Path) -> None:
    steps = steps_of(size, gpus, tmp_path, tmp_path)
    assert len({step.name for step in steps}) == len(steps)
    earlier: set[str] = set()
    for step in steps:
        assert earlier.issuperset(step.after), f"{step.name} builds on what comes later, or does not come"
        earlier.add(step.name)
        files = [word for word in step.words() if word.endswith(".py")]
        assert all((REPOSITORY / file).is_file() for file in files)
        assert files or "grpo_mega.train" in step.words()


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python("tools/gpu_smoke.py", *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = tool("node", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "torch sees 0 GPUs, and this needs 4" in done.stderr
    assert not (tmp_path / "out").exists()
    listed = tool("two", "--list", "--out", str(tmp_path / "out"))
    assert listed.returncode == 0
    assert listed.stdout.count("\npython ") == len(steps_of("two", 2, tmp_path, tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_it_runs_and_collects_what_there_is_to_send(tmp_path: Path) -> None:
    """The doctor's findings; on a machine without a GPU, tests that need one prove nothing, and do not count."""
    out = tmp_path / "out"
    done = tool("--without-gpu", "--only", "doctor", "policy", "--out", str(out))
    found = {step["name"]: step for step in json.loads((out / "summary.json").read_text())["steps"]}
    assert found["doctor"]["outcome"] == "passed", done.stdout + done.stderr
    if not torch.cuda.is_available():
        assert (found["policy"]["outcome"], done.returncode) == ("skipped", 1)
        assert "skipped" in found["policy"]["why"]
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"out/summary.md", "out/summary.json", "out/versions.json", "out/01-doctor.log"} <= names
    again = tool("--without-gpu", "--out", str(out))
    assert again.returncode == 2
    assert "exists" in again.stderr


def python(name: str, program: str, **fields: object) -> Step:
    """A step that runs a program."""
    return Step(name, f"-c '{program}'", "", "", **{"seconds": 60, **fields})  # type: ignore[arg-type]


def test_how_steps_end_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = 'import subprocess, sys; subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])'
    steps = [
        python("good", 'print("3 passed")'),
        python("bad", 'print("lost | here"); raise SystemExit(3)'),
        python("on top", "print(1)", after=("bad",)),
        python("slow", child, seconds=2),
        python("absent", "print(1)", lacks="nothing to run it with"),
        python("last", "print(1)", after=("good",)),
        Step("skips", "-c 'print(\"2 skipped in 1 s\")'", "", PASSED, 60),
        Step("silent", "-c 'print(1)'", "", COMPLETED, 60),
    ]
    out = tmp_path / "out"
    began = time.monotonic()
    assert not run_steps(steps, out, "a test")
    assert time.monotonic() - began < 300, "what a step has started was not ended with it"
    ended = [(step["name"], step["outcome"]) for step in json.loads((out / "summary.json").read_text())["steps"]]
    assert ended == [
        ("good", "passed"), ("bad", "failed"), ("on top", "skipped"), ("slow", "ended"), ("absent", "skipped"),
        ("last", "passed"), ("skips", "skipped"), ("silent", "failed"),
    ]  # fmt: skip
    text = (out / "summary.md").read_text()
    for said in ("exit code 3", "lost   here", "bad did not pass", "not done within 2 s", "nothing to run it with"):
        assert said in text
    assert "5/8 absent" in capsys.readouterr().out


def test_weights_keys_and_large_files_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    out = tmp_path / "out"
    for name in ("runs/a/checkpoints/state.json", "runs/a/metrics.jsonl", "runs/a/model.safetensors", "runs/large.log"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("x" * (21 * 2**20 if "large" in name else 10))
    assert run_steps([python("good", "print(1)")], out, "a test")
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        names = {name for name in tar.getnames() if "/runs/" in name}
        texts = [file.read() for member in tar.getmembers() if (file := tar.extractfile(member))]
    assert names == {"out/runs/a/metrics.jsonl"}
    assert not [text for text in texts if b"hunter2" in text]


def test_what_proves_a_run_is_what_a_run_says() -> None:
    assert re.search(COMPLETED, "tiny completed: 80 steps, held-out accuracy 2.0% -> 95.0%")
    assert not re.search(COMPLETED, "tiny stopped: 8 steps")
    assert re.search(PASSED, "== 12 passed, 1 skipped in 3.4s ==")


def test_the_page_explains_every_step() -> None:
    page = (REPOSITORY / "docs" / "first_gpu.md").read_text()
    for size, gpus in MACHINES:
        for step in steps_of(size, gpus, Path("out"), Path("model")):
            assert f"`{step.name}`" in page
