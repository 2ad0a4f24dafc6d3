"""A run's model leaves it as a Hugging Face folder that is the model, or not at all."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from exporting import assert_same, export, exported, logits_of_transformers, weights
from made_tokenizer import write_tokenizer
from ranks import results, run_ranks
from safetensors.torch import save_file
from train_jobs import REPOSITORY, SMALL, Job, contents, rewarded_by

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.platform import start

start()  # before megatron.core is imported

from made_weights import random_weights  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402

LOGITS = Path(__file__).with_name("logits_job.py")
REFUSALS = Path(__file__).with_name("export_refusals_job.py")
BIAS = "e_score_correction_bias"
TRAINED = [
    *SMALL,
    rewarded_by("varied"),
    "algorithm.kl_coef=0.1",
    "optimizer.average_decay=0.5",
    "run.name=trained",
    "run.steps=3",
    "run.eval_every=2",
]


@dataclass(frozen=True)
class Trained:
    """A toy run of two ranks with a reference policy: what `make train` makes, and its export."""

    root: Path
    run: Path
    folder: Path
    said: str

    @property
    def base(self) -> Path:
        """The cached base model."""
        return next((self.root / "runs" / "base-models").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    ended = Job(root, [*TRAINED, "run.save_every=2"], ranks=2).finish()
    assert ended.code == 0, ended
    run, folder = root / "runs" / "trained", root / "folder"
    return Trained(root, run, folder, exported(run, folder))


def checkpoint_logits(path: Path, config: Path, vocabulary: int, tmp_path: Path) -> torch.Tensor:
    run_ranks(LOGITS, 1, [str(path), str(config), str(tmp_path / "logits.pt"), str(vocabulary)])
    return torch.load(tmp_path / "logits.pt")


def assert_logits_agree(folder: Path, checkpoint: Path, config: Path, vocabulary: int, tmp_path: Path) -> None:
    expected = checkpoint_logits(checkpoint, config, vocabulary, tmp_path)
    found = logits_of_transformers(folder, torch.arange(vocabulary))[0]
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_toys_logits_are_those_of_its_newest_checkpoint(trained: Trained, tmp_path: Path) -> None:
    newest = trained.run / "checkpoints" / "step-000003"
    assert_logits_agree(trained.folder, newest, trained.run / "config.yaml", CharTokenizer().vocab_size, tmp_path)


def test_everybody_may_read_it(trained: Trained) -> None:
    """As whoever made the folder lets everybody."""
    allowed = trained.folder.stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in trained.folder.iterdir()} == {allowed}


def test_the_card_says_what_it_is(trained: Trained) -> None:
    card = (trained.folder / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "transformers"
    summary = json.loads((trained.run / "summary.json").read_text())
    for words in (
        "# trained",
        f"Glm4MoeForCausalLM, {summary['parameters']:,} parameters in fp32: the policy after 3 steps of grpo",
        "| trained from | a base model, from random weights |",
        "| problems | problems of the task chain_sum |",
        "GRPO (arXiv 2402.03300), objective ppo: 8 prompts x 4 samples a step",
        "| rewards | accuracy x 1, format x 0.2, own x 1 |",
        f"- torch {summary['versions']['torch']}",
        f"python tools/export.py {trained.run} {trained.folder}",
        "No tokenizer: ",
    ):
        assert words in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    config = yaml.safe_load((trained.run / "config.yaml").read_text())
    for room in ("algorithm", "reward", "optimizer", "data", "base"):
        assert settings[room] == config[room]


def test_the_toys_tokenizer_has_no_files_and_the_console_says_so(trained: Trained) -> None:
    assert "no tokenizer is written: the built-in tokenizer of characters" in trained.said
    assert str(trained.run / "checkpoints" / "step-000003") in trained.said
    assert not (trained.folder / "tokenizer.json").exists()
    assert json.loads((trained.folder / "generation_config.json").read_text())["eos_token_id"] == CharTokenizer.eos_id


@pytest.mark.long
def test_a_run_continues_from_it(trained: Trained, tmp_path: Path) -> None:
    """With steps too short to move a weight, what comes out is what went in."""
    own = ["base=none", f"run.init_from={trained.folder}", "optimizer.lr=1e-30", "run.name=next", "run.steps=1"]
    ended = Job(tmp_path, [*(o for o in TRAINED if not o.startswith("base.")), *own], ranks=2).finish()
    assert ended.code == 0, ended.stderr
    exported(tmp_path / "runs" / "next", tmp_path / "again")
    assert_same(tmp_path / "again", trained.folder, apart=(BIAS,))
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"| trained from | `{trained.folder}` |" in card


def test_bf16_is_the_nearest_and_biases_stay_fp32(trained: Trained, tmp_path: Path) -> None:
    exported(trained.run, tmp_path / "bf16", "--dtype", "bf16")
    expected = weights(trained.folder)
    found = weights(tmp_path / "bf16")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        rounded = expected[name] if name.endswith(BIAS) else expected[name].bfloat16()
        assert tensor.dtype == rounded.dtype, name
        assert torch.equal(tensor, rounded), name
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    logits_of_transformers(tmp_path / "bf16", torch.arange(8))


@pytest.mark.long
def test_any_layout_writes_the_same(trained: Trained, tmp_path: Path) -> None:
    exported(trained.run, tmp_path / "ep2", "layout.ep=2", ranks=2)
    exported(trained.run, tmp_path / "tp2", "layout.tp=2", "layout.sp=true", ranks=2)
    for name in ("ep2", "tp2"):
        assert_same(tmp_path / name, trained.folder)


@pytest.mark.long
def test_the_reference_is_the_base_model_that_the_run_started_from(trained: Trained, tmp_path: Path) -> None:
    exported(trained.run, tmp_path / "reference", "--model", "reference")
    exported(trained.base, tmp_path / "base")
    assert_same(tmp_path / "reference", tmp_path / "base")
    assert not torch.equal(*(weights(f)["lm_head.weight"] for f in (tmp_path / "base", trained.folder)))
    assert "the policy after 15 steps of pretrain" in (tmp_path / "base" / "README.md").read_text()
    assert "## Results" not in (tmp_path / "base" / "README.md").read_text()


def test_the_average_follows_the_policy(trained: Trained, tmp_path: Path) -> None:
    """By half of the way at each of the run's updates, one a step; the bias that balances experts is the policy's."""
    steps = [trained.run / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    for step, source in zip((2, 3), steps, strict=True):
        exported(source, tmp_path / f"average{step}", "--model", "average")
    before, after, policy = (weights(f) for f in (tmp_path / "average2", tmp_path / "average3", trained.folder))
    card = (tmp_path / "average3" / "README.md").read_text()  # of which the evaluations were, and not of the policy
    summary = json.loads((trained.run / "summary.json").read_text())
    assert "the average after 3 steps of grpo" in card
    assert f"| held-out, step 0 | {summary['held_out_accuracy_before']:.4g} |" in card
    assert "| validation, step 2 |" in card
    assert f"| held-out, step 3 | {summary['held_out_accuracy_after']:.4g} |" in card
    assert "## Results" not in (trained.folder / "README.md").read_text()
    for name, weight in after.items():
        expected = policy[name] if BIAS in name else (before[name] + policy[name]) / 2
        torch.testing.assert_close(weight, expected, msg=name)
    assert any(not torch.equal(after[name], policy[name]) for name in after)


@pytest.mark.long
def test_a_named_checkpoint_is_taken_and_a_damaged_one_is_not(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    steps = [run / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    exported(steps[0], tmp_path / "second")
    assert "after 2 steps of grpo" in (tmp_path / "second" / "README.md").read_text()
    assert "step 3" not in (tmp_path / "second" / "README.md").read_text()
    tensors = max((steps[1] / "weights").glob("*.distcp"), key=lambda file: file.stat().st_size)
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    damaged = export(steps[1], tmp_path / "third")
    assert damaged.returncode == 2
    assert f"error: {steps[1]}: the checkpoint is damaged: weights/{tensors.name} differs" in damaged.stderr
    assert "Traceback" not in damaged.stderr
    newest = export(run, tmp_path / "third")
    assert newest.returncode == 0, newest.stderr
    assert f"the checkpoint {steps[1]} is damaged" in newest.stderr
    assert_same(tmp_path / "third", tmp_path / "second")


@pytest.mark.long
def test_what_cannot_be_exported_is_refused_with_the_fix(trained: Trained, tmp_path: Path) -> None:
    """Nothing is left of any of them."""
    run, out = trained.run, tmp_path / "out"
    newest = run / "checkpoints" / "step-000003"
    shutil.copytree(newest, tmp_path / "alone")
    shutil.copytree(newest, tmp_path / "policy" / "checkpoints" / "step-000003")
    shutil.copy(run / "config.yaml", tmp_path / "policy")
    without_reference(tmp_path / "policy" / "checkpoints" / "step-000003")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("shared_ffn_hidden: 64", "shared_ffn_hidden: 0")
    )
    (tmp_path / "broken.yaml").write_text("model: [")
    cases = [
        ([run, trained.folder], f"{trained.folder}: exists; choose a different directory, or remove it"),
        ([tmp_path / "nothing", out], f"{tmp_path}/nothing: does not exist; choose a run directory such as"),
        ([trained.folder, out], f"{trained.folder}: neither a run directory (no checkpoints/) nor a checkpoint"),
        ([tmp_path / "new", out], f"{tmp_path}/new: no finished checkpoint yet"),
        (
            [run, out, "--model", "critic"],
            "one number for each token, which no language model of transformers has; choose",
        ),
        (
            [tmp_path / "policy", out, "--model", "reference"],
            "step-000003: it has no reference, as the run that saved it",
        ),
        (
            [tmp_path / "alone", out],
            "alone: outside of a run directory, and without the configuration that it was trained with; give --config",
        ),
        (
            [run, out, "--config", tmp_path / "config.yaml"],
            "Glm4MoeForCausalLM, the closest Hugging Face model, cannot",
        ),
        ([run, out, "--config", tmp_path / "broken.yaml"], f"{tmp_path}/broken.yaml: cannot be read: "),
        ([run, out, "model.layers=3"], "model.layers=3: fixed by the model's training"),
        ([run, out, "layout.tpp=3"], "layout.tpp: not a setting; did you mean layout.tp"),
        ([run, out, "layout.tp=2", "layout.sp=true"], "the world size 1: not divisible by layout.tp=2"),
    ]
    arguments = json.dumps([[str(word) for word in words] for words, _ in cases])
    for found, (_, expected) in zip(results(run_ranks(REFUSALS, 1, [arguments])), cases, strict=True):
        assert expected in found
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def without_reference(checkpoint: Path) -> None:
    """As a run without KL term would have saved it."""
    shutil.rmtree(checkpoint / "reference")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    kept = {name: of_file for name, of_file in manifest.items() if not name.startswith("reference/")}
    (checkpoint / "manifest.json").write_text(json.dumps(kept))


def test_a_disk_that_fails_leaves_nothing_and_is_named(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))"
    )
    path = f"{tmp_path}:{REPOSITORY}:{REPOSITORY / 'kernels'}"
    failed = export(trained.run, tmp_path / "folder", environment={"PYTHONPATH": path})
    assert failed.returncode == 1, failed.stderr
    assert "File too large" in failed.stderr
    assert f"Nothing is left of {tmp_path / 'folder'}" in failed.stderr
    assert [file.name for file in tmp_path.iterdir() if "folder" in file.name] == []


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


@pytest.mark.parametrize("fsyncs", [1, pytest.param(9, marks=pytest.mark.long)])
def test_a_kill_leaves_nothing_that_loads_and_the_command_works_again(
    trained: Trained, tmp_path: Path, fsyncs: int
) -> None:
    code, beside = tmp_path / "code", tmp_path / "beside"
    for made in (code, beside):
        made.mkdir()
    (code / "sitecustomize.py").write_text(KILLED)
    folder = beside / "folder"
    path = f"{code}:{REPOSITORY}:{REPOSITORY / 'kernels'}"
    killed = export(trained.run, folder, environment={"PYTHONPATH": path, "FSYNCS": str(fsyncs)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not folder.exists()
    unfinished, lock = beside / ".folder.tmp", beside / ".folder.lock"
    assert {*beside.iterdir()} == {unfinished, lock}
    assert not (unfinished / "config.json").exists()
    exported(trained.run, folder)
    apart = {"README.md"}  # which has the command
    assert {name: x for name, x in contents(folder).items() if name not in apart} == {
        name: x for name, x in contents(trained.folder).items() if name not in apart
    }
    assert not unfinished.exists()
    assert not lock.exists()


FROM_FOLDER = [
    *(o for o in SMALL if not o.startswith(("base.", "data."))),
    "experiment=tiny_dense",
    "layout=single",
    "base=none",
    "data=chat",
    "data.validation_size=4",
    "model.qk_norm=true",
    "rollout.max_new_tokens=4",
    rewarded_by("varied"),
]


def write_model(folder: Path, overrides: list[str]) -> None:
    """A released model: random weights, tokenizer with a chat template, and more in config.json than is needed."""
    write_tokenizer(folder, with_bos=False)
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    model = compose_config(overrides).model
    save_file(random_weights(model, vocabulary), folder / "model.safetensors")
    own = {"eos_token_id": 2, "use_cache": True, "max_window_layers": 2, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(hf_config(model, vocabulary) | own))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "top_p": 0.8}))


@pytest.mark.long
def test_a_run_that_started_from_a_folder(tmp_path: Path) -> None:
    origin, folder = tmp_path / "origin", tmp_path / "folder"
    for name, first in (("train", 0), ("test", 20)):
        problems = [{"prompt": f"What is {i} + 5?", "answer": i + 5} for i in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    files = [f"data.{name}_path={tmp_path}/{name}.jsonl" for name in ("train", "test")]
    overrides = [*FROM_FOLDER, *files, f"run.init_from={origin}", f"data.tokenizer={origin}", "run.name=chat"]
    write_model(origin, overrides)
    ended = Job(tmp_path, [*overrides, "run.steps=1"]).finish()
    assert ended.code == 0, ended.stderr
    run = tmp_path / "runs" / "chat"
    exported(run, folder)
    assert json.loads((folder / "config.json").read_text()) == json.loads((origin / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (origin / name).read_bytes(), name
    generation = [json.loads((path / "generation_config.json").read_text()) for path in (folder, origin)]
    assert generation[0] == generation[1]
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert_logits_agree(folder, run / "checkpoints" / "step-000001", run / "config.yaml", vocabulary, tmp_path)
    trained, before = weights(folder), logits_of_transformers(origin, torch.arange(9))
    assert not torch.equal(logits_of_transformers(folder, torch.arange(9)), before)
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert f"| problems | `{tmp_path}/train.jsonl` |" in (folder / "README.md").read_text()
    again = [o for o in overrides if not o.startswith(("run.init_from", "data.tokenizer", "run.name"))]
    own = [f"run.init_from={folder}", f"data.tokenizer={folder}", "run.name=again", "run.steps=1"]
    assert (ended := Job(tmp_path, [*again, *own]).finish()).code == 0, ended.stderr
