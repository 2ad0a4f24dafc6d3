"""A folder that was converted ahead of a run is the model that the run starts from."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exporting import assert_same, exported
from forks import run_python
from limits import limit
from made_tokenizer import write_tokenizer
from safetensors.torch import load_file, save_file
from train_jobs import REPOSITORY, SMALL, Job, contents, rewarded_by

from grpo_mega.platform import start

start()  # before megatron.core is imported

from made_weights import random_weights  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.data.huggingface import HuggingFaceTokenizer  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

AGAIN = "download the folder again, or choose another"
TOOL = str(REPOSITORY / "tools" / "import.py")
MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, *sys.argv[1:]])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(done.returncode)
"""
"""Runs a command and prints the most memory that it had, in bytes."""
KILLED = """
import os, signal
fsync, left = os.fsync, int(os.environ["FSYNCS"])

def counted(descriptor):
    global left
    fsync(descriptor)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = counted
"""
"""A sitecustomize.py: kill -9 after so many files and folders have reached the disk."""
NAMING_THE_ORIGIN = ("state.json", "manifest.json")
PAUSED = """
import os, pathlib
fsync, pipes = os.fsync, pathlib.Path(os.environ["PIPES"])

def pausing(descriptor):
    global pipes
    fsync(descriptor)
    if pipes:
        (pipes / "reached").write_text("amid")
        (pipes / "go").read_text()
        pipes = None

os.fsync = pausing
"""
"""A sitecustomize.py: when the first file has reached the disk, says so and waits."""


def import_(*words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_python(TOOL, *words, environment=environment)


def peak(*words: object) -> int:
    """Bytes that the tool had at most, in a process that it has for itself; it must succeed."""
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, TOOL, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"peak (\d+)", done.stdout)
    assert found
    return int(found[1])


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with random weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("released") / "model"
    write_tokenizer(folder, with_bos=False)
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    model = compose_config(["experiment=tiny"]).model
    save_file(random_weights(model, vocabulary), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model, vocabulary) | {"eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "top_p": 0.8}))
    return folder


@pytest.fixture(scope="module")
def imported(released: Path) -> Path:
    """The folder that it is of is gone."""
    origin, out = released.parent / "origin", released.parent / "imported"
    shutil.copytree(released, origin)
    done = import_(origin, out)
    assert done.returncode == 0, done.stderr
    assert f"{out}: fp32 weights of {origin}" in done.stdout
    shutil.rmtree(origin)
    return out


@pytest.mark.parametrize("out", ["file/deeper/out", pytest.param("/proc/absent/deeper/out", marks=pytest.mark.long)])
def test_a_directory_that_cannot_be_made_is_named_with_the_reason(released: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / out  # absolute names stay
    done = import_(released, path)
    why, free = {
        "file/deeper/out": (f"Not a directory: '{path.parent}'", tmp_path),
        "/proc/absent/deeper/out": ("No such file or directory: '/proc/absent'", Path("/proc")),
    }[out]
    assert done.returncode == 1
    assert re.search(f"error: {path} cannot be written: .*{why}. [0-9,]+ bytes were free in {free}. ", done.stderr)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "ranks"), [("ep2", 2), ("tp2_pp2", 4)], ids=["ep2", "tp2_pp2"])
def test_a_run_under_another_layout_starts_from_it(
    imported: Path, released: Path, tmp_path: Path, layout: str, ranks: int
) -> None:
    """With steps too short to move a weight, what comes out is what went in."""
    for name, first in (("train", 0), ("test", 20)):
        problems = [{"prompt": f"What is {i} + 5?", "answer": i + 5} for i in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    ended = Job(
        tmp_path,
        [
            *(o for o in SMALL if not o.startswith(("base.", "data.", "rollout."))),
            *(f"layout={layout}", "base=none", "data=chat", "data.validation_size=4", "rollout.max_new_tokens=4"),
            *(f"data.{name}_path={tmp_path}/{name}.jsonl" for name in ("train", "test")),
            *(f"run.init_from={imported}", f"data.tokenizer={imported}", "run.name=next", "run.steps=1"),
            *("optimizer.lr=1e-30", rewarded_by("varied")),
        ],
        ranks=ranks,
    ).finish()
    assert ended.code == 0, ended.stderr
    exported(tmp_path / "runs" / "next", tmp_path / "out")
    (tmp_path / "origin").mkdir()
    save_file(load_file(released / "model.safetensors"), tmp_path / "origin" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(released / "model.safetensors"), "model.safetensors")}
    (tmp_path / "origin" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(tmp_path / "out", tmp_path / "origin", apart=("e_score_correction_bias",))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((released / name).read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (released / name).read_bytes()


@pytest.mark.long
def test_a_run_of_another_model_is_refused_as_from_the_folder(imported: Path, released: Path, tmp_path: Path) -> None:
    said = []
    for origin in (released, imported):
        ended = Job(
            tmp_path, ["experiment=tiny", "layout=single", "base=none", f"run.init_from={origin}", "model.rope_base=5"]
        ).finish()
        assert ended.code == 2, ended.stderr
        said.append(ended.stderr.replace(str(origin), "FOLDER"))
    assert "rope_theta is 10000.0, not 5.0" in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("room", "why"), [(0.5, "the weights take "), (1.05, "No space left on device")], ids=["less", "barely"]
)
def test_a_full_disk_is_named_and_nothing_is_left(
    released: Path, tmp_path: Path, small_disk: Path, room: float, why: str
) -> None:
    """With room for half of the weights; and for the weights, but nothing else."""
    size = (released / "model.safetensors").stat().st_size
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - int(size * room)))
    done = import_(released, small_disk / "out")
    assert done.returncode == 1
    assert why in done.stderr
    assert f"bytes were free in {small_disk}. Nothing is left of {small_disk}/out: fix that" in done.stderr
    assert "Traceback" not in done.stderr
    assert [*small_disk.iterdir()] == [ballast]


@pytest.mark.long
@pytest.mark.parametrize("fsyncs", [1, 4])
def test_a_kill_leaves_nothing_that_loads_and_the_command_works_again(
    imported: Path, released: Path, tmp_path: Path, fsyncs: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    path = f"{tmp_path}:{REPOSITORY}:{REPOSITORY / 'kernels'}"
    killed = import_(released, tmp_path / "out", environment={"PYTHONPATH": path, "FSYNCS": str(fsyncs)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    unfinished, lock = sorted(entry for entry in tmp_path.iterdir() if entry.name.startswith(".out"))[::-1]
    assert not (unfinished / "manifest.json").exists()
    assert import_(released, tmp_path / "out").returncode == 0
    assert without_origin(tmp_path / "out") == without_origin(imported)
    assert not unfinished.exists()
    assert not lock.exists()


def without_origin(checkpoint: Path) -> dict[str, str]:
    """What is in it, but for the name of the folder that it is of."""
    assert json.loads((checkpoint / "state.json").read_text()).keys() == {"imported_from"}
    return {name: digest for name, digest in contents(checkpoint).items() if name not in NAMING_THE_ORIGIN}


@pytest.mark.long
def test_of_two_imports_at_once_one_is_refused_and_the_other_is_whole(
    imported: Path, released: Path, tmp_path: Path
) -> None:
    """The first stands still amid its files until the second has ended."""
    (tmp_path / "sitecustomize.py").write_text(PAUSED)
    for pipe in ("reached", "go"):
        os.mkfifo(tmp_path / pipe)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "kernels")))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PIPES": str(tmp_path)}
    first = subprocess.Popen([sys.executable, TOOL, released, tmp_path / "out"], env=os.environ | own)
    reached = subprocess.run(["cat", tmp_path / "reached"], capture_output=True, text=True, timeout=limit(600))
    assert reached.stdout == "amid"
    second = import_(released, tmp_path / "out")
    (tmp_path / "go").write_text("on")
    assert first.wait(limit(600)) == 0
    assert second.returncode == 2
    assert f"error: {tmp_path}/out: another process is writing it; wait for it, or choose another" in second.stderr
    assert without_origin(tmp_path / "out") == without_origin(imported)
    third = import_(released, tmp_path / "out")
    assert third.returncode == 2
    assert "out: exists; choose a different directory, or remove it" in third.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir() if "out" in entry.name) == ["out"]


def lose_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def change_the_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3]}')


def change_a_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"true", b"TRUE", 1))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (change_a_token, "tokenizer.json differs from what was written (SHA-256)"),
        (lose_the_template, "chat_template.jinja is missing"),
        (change_the_ends, "generation_config.json has 21 bytes instead of"),
    ],
)
def test_a_tokenizer_that_is_not_what_was_imported_is_named(
    imported: Path, tmp_path: Path, broken: Callable[[Path], None], problem: str
) -> None:
    shutil.copytree(imported, tmp_path / "copy")
    HuggingFaceTokenizer(tmp_path / "copy", "chat")
    broken(tmp_path / "copy")
    with pytest.raises(ValueError, match=re.escape(f"copy: the checkpoint is not what was imported: {problem}")):
        HuggingFaceTokenizer(tmp_path / "copy", "chat")


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_a_tensor(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors["model.norm.weight"])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def cut_short(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)


def lose_a_file(folder: Path) -> None:
    """Of those that the index names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def become_a_gemma2(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))


@pytest.mark.parametrize(
    ("broken", "words", "message"),
    [
        (lose_a_tensor, [], f"1 tensors are missing, the first: model.norm.weight; {AGAIN}"),
        (
            change_a_tensor(torch.Tensor.clone, "x.weight"),
            [],
            f"1 tensors are not of this model, the first: x.weight; {AGAIN}",
        ),
        (
            change_a_tensor(lambda t: t[:-1].clone(), "model.norm.weight"),
            [],
            f"model.norm.weight is (95,), and the configured model's is (96,); {AGAIN}",
        ),
        (cut_short, [], "model.safetensors: Error while deserializing header: incomplete metadata"),
        (lose_a_file, [], "model-00001-of-00001.safetensors: No such file or directory"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            [],
            f"neither model.safetensors nor model.safetensors.index.json, and only safetensors are read; {AGAIN}",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            [],
            "config.json: cannot be read: No such file or directory",
        ),
        (become_a_gemma2, [], "model_type=gemma2 is not supported; supported are llama"),
        (lambda folder: (folder.parent / "out").mkdir(), [], "out: exists; choose a different directory, or remove it"),
        (lambda folder: None, ["model.hidden=48"], "hidden_size is 96, not 48"),
        (lambda folder: None, ["model.layerz=48"], "model.layerz: not a setting"),
        (lambda folder: None, ["layout.tp=2"], "layout.tp=2: not a setting of the model; give only"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_fix(
    released: Path, tmp_path: Path, broken: Callable[[Path], None], words: list[str], message: str
) -> None:
    shutil.copytree(released, tmp_path / "folder")
    broken(tmp_path / "folder")
    before = {path.name for path in tmp_path.iterdir()}
    done = import_(tmp_path / "folder", tmp_path / "out", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_setting_of_another_kind_is_named_with_what_to_write(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the tool sets it
    model_of = runpy.run_path(TOOL)["model_of"]
    for word in ("model.layerz=48", "model.hidden=wide"):
        with pytest.raises(InputError) as refused:
            model_of(released, [word])
        assert refused.value.field == word.partition("=")[0]


@pytest.mark.long
def test_memory_does_not_follow_the_model(imported: Path, released: Path, tmp_path: Path) -> None:
    """Half a GiB and twice the largest tensor, above what a model of a megabyte takes; also after a kill amid it."""
    model = ModelConfig(
        layers=30, hidden=2048, heads=16, kv_heads=4, ffn_hidden=5632, context=64, dtype="bf16", qk_norm=True
    )
    vocabulary, folder = 32000, tmp_path / "large"
    folder.mkdir()
    where = {}
    for entry in entries(model, vocabulary):
        where[entry.name] = f"{entry.name}.safetensors"
        save_file({entry.name: torch.randn(entry.shape).to(entry.dtype)}, folder / where[entry.name], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(hf_config(model, vocabulary)))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest = max(entry.bytes for entry in entries(model, vocabulary))
    assert size > 2.9e9
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    path = f"{tmp_path}:{REPOSITORY}:{REPOSITORY / 'kernels'}"
    killed = import_(folder, tmp_path / "out", environment={"PYTHONPATH": path, "FSYNCS": "3"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    assert 1e9 < sum(file.stat().st_size for file in tmp_path.glob(".out.tmp/*/*")) < size, "killed amid the weights"
    above = peak(folder, tmp_path / "out") - peak(released, tmp_path / "small")
    assert above < 2**29 + 2 * largest < size * 0.3
