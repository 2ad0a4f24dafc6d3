"""Nothing that a checkpoint, a run directory or a model directory says is executed, and nothing unlisted is read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizer import write_tokenizer

from grpo_mega.platform import join_processes, start

PLATFORM = start()  # before megatron.core is imported

from torch.distributed.checkpoint.metadata import BytesStorageMetadata  # noqa: E402

from grpo_mega.checkpoint import checkpoint, integrity, random_state, safe_load, step_in_progress  # noqa: E402
from grpo_mega.checkpoint.contents import check_files  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, MLAConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.data.huggingface import HuggingFaceTokenizer  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout, leave_layout  # noqa: E402
from grpo_mega.observe.metrics import MetricsLog  # noqa: E402
from grpo_mega.observe.run_dir import open_run_dir  # noqa: E402
from grpo_mega.types import Step, pack_tokens  # noqa: E402
from grpo_mega.weights import directory as huggingface  # noqa: E402

MOE = MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16)
MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2, moe=MOE)
VOCABULARY = 21


class Command:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """The layout of a lone process; the environment that joining it reads is left as it was."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS"):
            environment.setenv(name, "")
            environment.delenv(name)
        join_processes(PLATFORM)
    yield join_layout(LayoutConfig(), seed=1)
    leave_layout()


@pytest.fixture(scope="module")
def policy(topology: Topology) -> Policy:
    made = Policy(MODEL, LayoutConfig(), VOCABULARY, topology, PLATFORM)
    made.initialize(seed=0)
    made.use_optimizer(OptimizerConfig(lr=1e-3))
    return made


@pytest.fixture(scope="module")
def whole(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything that one can have."""
    path = tmp_path_factory.mktemp("checkpoints") / "step-000001-updates-0001"
    begun = Step([], [], [], pack_tokens([[1, 2, 3]], [1]), updates=[{"loss": 1.0}])
    models = [policy, ReferencePolicy(policy)]
    checkpoint.Saving(path, models, {"step": 1}, background=False, in_progress=begun).finish()
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    return shutil.copytree(whole, tmp_path / whole.name)


def read_all(path: Path, policy: Policy) -> None:
    """All that a run reads when it continues."""
    assert checkpoint.newest_whole(path.parent) == path
    checkpoint.load(path, [policy, ReferencePolicy(policy)])
    random_state.load(path, seed=1, step=1)
    step_in_progress.load(path, policy.topology)


def seal_again(path: Path) -> None:
    """A manifest that matches, as whoever plants something writes it."""
    (path / integrity.MANIFEST).unlink()
    integrity.seal(path)


def plain(file: Path, command: Command) -> str:
    file.write_bytes(pickle.dumps(command, protocol=2))
    return file.name


def saved(file: Path, command: Command) -> str:
    torch.save({"model": command, "layout": [1] * 6, "said": "{}"}, file)
    return file.name


def in_an_index(file: Path, command: Command) -> str:
    """Beside everything that belongs there."""
    index = pickle.loads(file.read_bytes())
    index.planner_data = command
    file.write_bytes(pickle.dumps(index))
    return file.name


def between_tensors(file: Path, command: Command) -> str:
    """In the place of an object that lies between the tensors, whose place and length the index says."""
    index = pickle.loads(file.read_bytes())
    where = next(k for k in index.storage_data if isinstance(index.state_dict_metadata[k.fqn], BytesStorageMetadata))
    return instead(file, index, where, command)


def as_a_tensor(file: Path, command: Command) -> str:
    index = pickle.loads(file.read_bytes())
    where = next(k for k in index.storage_data if "embedding" in k.fqn and "optimizer" not in k.fqn)
    return instead(file, index, where, command)


def instead(file: Path, index: Any, where: Any, command: Command) -> str:
    content = BytesIO()
    torch.save(command, content)
    entry = index.storage_data[where]
    target = file.with_name(entry.relative_path)
    entry.offset, entry.length = target.stat().st_size, len(content.getvalue())
    target.write_bytes(target.read_bytes() + content.getvalue())
    file.write_bytes(pickle.dumps(index))
    return target.name


BATCH = "step-in-progress-0000-of-0001.pt"
JSON = ("state.json", step_in_progress.FILE)
Plant = Callable[[Path, Command], str]
PLANTED: list[tuple[str, Plant]] = [
    *((f"{part}/.metadata", how) for part in ("weights", "reference") for how in (plain, in_an_index, as_a_tensor)),
    ("weights/.metadata", between_tensors),
    *((f"{part}/common.pt", how) for part in ("weights", "reference") for how in (plain, saved)),
    *((name, how) for name in ("random/rank-00000.pt", BATCH) for how in (plain, saved)),
    *((name, plain) for name in JSON),
]


@pytest.mark.parametrize(("name", "plant"), PLANTED, ids=[f"{name}-{how.__name__}" for name, how in PLANTED])
def test_what_is_planted_in_a_checkpoint_is_refused_by_name_and_never_executed(copied, policy, tmp_path, name, plant):
    marker = tmp_path / "executed"
    file = plant(copied / name, Command(marker))
    seal_again(copied)
    with pytest.raises(Exception) as refused:  # noqa: PT011
        read_all(copied, policy)
    assert not marker.exists()
    if name not in JSON:
        assert isinstance(refused.value, ValueError), refused.value
        assert str(copied) in str(refused.value)
        assert f"{file}: names " in str(refused.value)
        assert "mkdir, which no checkpoint needs" in str(refused.value)


@pytest.mark.parametrize("plant", [plain, in_an_index, between_tensors])
def test_weights_to_start_from_are_read_the_same_way(copied, topology, tmp_path, plant):
    made = Policy(MODEL, LayoutConfig(), VOCABULARY, topology, PLATFORM)
    file = plant(copied / "weights" / ".metadata", Command(tmp_path / "executed"))
    seal_again(copied)
    with pytest.raises(ValueError, match=f"{file}: names "):
        checkpoint.load_weights(copied, made)
    assert not (tmp_path / "executed").exists()


def test_every_file_of_a_checkpoint_is_planted_in_or_plain_text_or_tensors(whole):
    names = {str(file.relative_to(whole)) for file in whole.rglob("*") if file.is_file()}
    text = {"manifest.json", "weights/metadata.json", "reference/metadata.json"}
    tensors = {name for name in names if name.endswith(".distcp")}
    assert names == {name for name, _ in PLANTED} | text | tensors


def test_what_is_not_planted_is_read(copied, policy):
    read_all(copied, policy)
    back = step_in_progress.load(copied, policy.topology)
    assert (back.updates, back.batch.tokens.tolist()) == ([{"loss": 1.0}], [1, 2, 3])


LATENT = replace(MODEL, kv_heads=4, attention="mla", mla=MLAConfig(v_head_dim=12))
TOGETHER = {
    "latent, predicting more, in bf16": replace(LATENT, mtp_layers=1, dtype="bf16"),
    "dense, tied": replace(MODEL, moe=MoEConfig(), tie_embeddings=True, qk_norm=True),
}
APART = {
    "dense": replace(MODEL, moe=MoEConfig()),
    "latent": LATENT,
    "predicting more": replace(MODEL, mtp_layers=1),
    "bf16": replace(MODEL, dtype="bf16"),
    "tied": replace(MODEL, tie_embeddings=True, qk_norm=True),
}
KINDS = TOGETHER | APART


@pytest.mark.parametrize(
    "distributed", [pytest.param(False, marks=pytest.mark.long), True], ids=["whole", "distributed"]
)
@pytest.mark.parametrize("kind", [*TOGETHER, *(pytest.param(kind, marks=pytest.mark.long) for kind in APART)])
def test_checkpoints_of_every_kind_name_nothing_else(topology, tmp_path, kind, distributed):
    sharded = OptimizerConfig(distributed=distributed)
    made = Policy(KINDS[kind], LayoutConfig(), VOCABULARY, topology, PLATFORM, sharded)
    made.initialize(seed=0)
    made.use_optimizer(OptimizerConfig(lr=1e-3))
    checkpoint.save(tmp_path / "step-000001", [made], {"step": 1})
    before = [parameter.detach().clone() for parameter in made.chunks.parameters()]
    made.initialize(seed=4)
    assert checkpoint.load(tmp_path / "step-000001", [made]) == {"step": 1}
    assert all(torch.equal(*pair) for pair in zip(before, made.chunks.parameters(), strict=True))


TEXT = {
    "weights/metadata.json": '{"sharded_backend": "zarr", "sharded_backend_version": 1}',
    "reference/metadata.json": '{"sharded_backend": "zarr", "sharded_backend_version": 1}',
}


@pytest.mark.parametrize("name", TEXT)
def test_how_a_checkpoint_is_stored_is_not_its_own_to_say(copied, policy, name):
    (copied / name).write_text(TEXT[name])
    seal_again(copied)
    read_all(copied, policy)


def mkdir(marker: Path, opcode: str) -> bytes:
    """A pickle that finds a function, one way or another, and calls it."""
    text = str(marker)
    match opcode:
        case "GLOBAL":
            return f"cos\nmkdir\n(S'{text}'\ntR.".encode()
        case "INST":
            return f"(S'{text}'\nios\nmkdir\n.".encode()
        case "OBJ":
            return f"(cos\nmkdir\nS'{text}'\no.".encode()
        case "NEWOBJ":
            return f"\x80\x02cos\nmkdir\n(S'{text}'\nt\x81.".encode("latin1")
        case "EXT1":
            return f"\x82\x01(S'{text}'\ntR.".encode("latin1")
        case "STACK_GLOBAL":
            return found("os", "mkdir") + f"(S'{text}'\ntR.".encode()
        case "through a known module":
            return found("torch.distributed.checkpoint.filesystem", "os.mkdir") + f"(S'{text}'\ntR.".encode()
        case "getattr":
            return found("builtins", "getattr") + found("os", "path")[2:] + f"(S'{text}'\ntR.".encode()
        case "eval":
            return found("builtins", "eval") + f'(S\'__import__("os").mkdir("{text}")\'\ntR.'.encode()
        case "partial":
            return found("functools", "partial") + b"(cos\nmkdir\nS'" + text.encode() + b"'\ntR(tR."
        case "load":
            return found("torch", "load") + f"(S'{text}'\ntR.".encode()
    raise AssertionError(opcode)


def found(module: str, name: str) -> bytes:
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, name)) + b"\x93"


WAYS = ["GLOBAL", "INST", "OBJ", "NEWOBJ", "EXT1", "STACK_GLOBAL", "through a known module"]
WAYS += ["getattr", "eval", "partial", "load"]


@pytest.mark.parametrize("way", WAYS)
def test_an_index_finds_no_function_in_any_way(tmp_path, way):
    index = tmp_path / ".metadata"
    index.write_bytes(mkdir(tmp_path / "executed", way))
    with pytest.raises(ValueError, match=r"\.metadata: (names|cannot be read)"):
        safe_load.read_index(index)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("way", ["GLOBAL", "INST", "OBJ", "STACK_GLOBAL", "eval"])
def test_these_pickles_do_work_where_nothing_is_refused(tmp_path, way):
    pickle.loads(mkdir(tmp_path / "executed", way))
    assert (tmp_path / "executed").is_dir()


def test_an_index_cannot_name_files_elsewhere(copied, policy, tmp_path):
    file = copied / "weights" / ".metadata"
    index = pickle.loads(file.read_bytes())
    entry = next(iter(index.storage_data.values()))
    shutil.copy(copied / "weights" / entry.relative_path, tmp_path / "elsewhere.distcp")
    entry.relative_path = "../../elsewhere.distcp"
    file.write_bytes(pickle.dumps(index))
    seal_again(copied)
    with pytest.raises(ValueError, match=r"names '\.\./\.\./elsewhere.distcp', which is not a file of its folder"):
        checkpoint.load(copied, [policy])


def test_state_of_fp8_training_is_refused_before_anybody_unpickles_it(tmp_path):
    marker = tmp_path / "executed"
    state = torch.frombuffer(bytearray(pickle.dumps(Command(marker))), dtype=torch.uint8)
    empty = {"decoder.layers.0._extra_state": torch.empty(0, dtype=torch.uint8), "weight": torch.ones(2)}
    safe_load._refuse_fp8_state(tmp_path, {"model": empty, "optimizer": {0: {1: torch.ones(2)}}})
    with pytest.raises(ValueError, match=r"state of FP8 training \(decoder\.layers\.1\._extra_state\)"):
        safe_load._refuse_fp8_state(tmp_path, {"model": empty | {"decoder.layers.1._extra_state": state}})


# What the manifest does not name is not there.


@pytest.mark.parametrize("name", [step_in_progress.FILE, "random/rank-00000.pt"])
def test_a_file_beside_the_manifest_is_not_read(copied, topology, name):
    manifest = copied / integrity.MANIFEST
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != name}))
    (copied / name).write_bytes(b"unreadable")
    assert (step_in_progress.load(copied, topology) is None) == (name == step_in_progress.FILE)
    random_state.load(copied, seed=1, step=1)


def test_a_batch_that_the_manifest_does_not_name_is_missed(copied, topology):
    manifest = copied / integrity.MANIFEST
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != BATCH}))
    with pytest.raises(ValueError, match=f"its manifest does not name {BATCH}"):
        step_in_progress.load(copied, topology)


def test_files_of_weights_are_there_with_all_their_bytes_before_anybody_waits_for_their_checksums(copied):
    check_files(copied)
    file = next((copied / "weights").glob("*.distcp"))
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(ValueError, match=f"weights/{file.name} has {size - 1} bytes instead of {size}"):
        check_files(copied)
    file.unlink()
    with pytest.raises(ValueError, match=f"weights/{file.name} is missing"):
        check_files(copied)


def test_a_folder_beside_the_manifest_is_not_read(copied, policy):
    manifest = copied / integrity.MANIFEST
    named = {k: v for k, v in json.loads(manifest.read_text()).items() if not k.startswith("reference/")}
    manifest.write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"it has no reference \(no reference/\)"):
        checkpoint.load(copied, [policy, ReferencePolicy(policy)])


def test_models_of_one_role_are_refused_before_anything_is_written(policy, tmp_path):
    with pytest.raises(ValueError, match="policy, policy: two models of one checkpoint have the same role"):
        checkpoint.save(tmp_path / "step-000001", [policy, policy], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("{}", "does not name state.json"),
        ("[]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"f": 1}', "says 1 of f instead of"),
        ('{"../f": [1, "a"]}', "names ../f, which is not a file of the checkpoint"),
        ('{"/dev/zero": [1, "a"]}', "names /dev/zero, which is not a file of the checkpoint"),
        ("[" * 100_000, "is not JSON"),
        ("all but the index", "does not name weights/.metadata"),
        ("all but tensors", "which is needed"),
    ],
)
def test_a_manifest_that_names_too_little_is_damaged_and_the_checkpoint_before_is_used(
    copied, policy, written, why, caplog
):
    before = shutil.copytree(copied, copied.with_name("step-000001"))
    manifest = copied / integrity.MANIFEST
    named = json.loads(manifest.read_text())
    if written == "all but the index":
        written = json.dumps({k: v for k, v in named.items() if k != "weights/.metadata"})
    elif written == "all but tensors":  # only the index says which are needed
        manifest.write_text(json.dumps({k: v for k, v in named.items() if not k.endswith(".distcp")}))
        with pytest.raises(ValueError, match=r"distcp: needed, and the checkpoint's manifest does not name it"):
            checkpoint.load(copied, [policy])
        return
    manifest.write_text(written)
    assert checkpoint.newest_whole(copied.parent) == before
    assert why in caplog.text
    assert str(copied) in caplog.text


def test_a_pipe_in_the_place_of_a_file_is_missing_rather_than_waited_for(copied):
    (copied / "state.json").unlink()
    os.mkfifo(copied / "state.json")
    assert integrity.damage(copied) == "state.json is missing"
    (copied / integrity.MANIFEST).unlink()
    os.mkfifo(copied / integrity.MANIFEST)
    assert integrity.damage(copied) == "its manifest.json is not a regular file"


# Other folders.


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.yaml", "summary.json", "run.lock"])
def test_what_is_planted_in_a_run_directory_is_never_executed(tmp_path, name):
    path = tmp_path / "run"
    open_run_dir(path, "run: {}\n", identity={"a": 1}).close()
    (path / name).write_bytes(pickle.dumps(Command(tmp_path / "executed")))
    try:
        open_run_dir(path, "run: {}\n", identity={"a": 1}).close()
        MetricsLog(path, tensorboard=False, resume_from_step=1).close()
    except ValueError as error:
        assert name in str(error)  # noqa: PT017
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json", huggingface.INDEX])
def test_what_is_planted_in_a_model_directory_is_never_executed(tmp_path, topology, name):
    policy = Policy(ModelConfig(layers=1, hidden=32, heads=4, kv_heads=2, ffn_hidden=48), LayoutConfig(), VOCABULARY,
                    topology, PLATFORM)  # fmt: skip
    policy.initialize(seed=1)
    path = tmp_path / "model"
    huggingface.save(path, policy)
    if name == "pytorch_model.bin":
        for file in path.glob("*.safetensors*"):
            file.unlink()
        torch.save({"weight": Command(tmp_path / "executed")}, path / name)
    elif name == "model.safetensors":
        (path / huggingface.INDEX).unlink()
        next(path.glob("*.safetensors")).rename(path / name)
        torch.save(Command(tmp_path / "executed"), path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Command(tmp_path / "executed")))
    with pytest.raises(ValueError, match="model.safetensors" if name == "pytorch_model.bin" else name):
        huggingface.load_weights(path, policy)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json"])
def test_what_is_planted_in_a_tokenizers_directory_is_never_executed(tmp_path, name):
    folder = write_tokenizer(tmp_path, with_bos=False)
    (folder / name).write_bytes(pickle.dumps(Command(tmp_path / "executed")))
    try:
        HuggingFaceTokenizer(folder, "{prompt}")
    except ValueError as error:
        assert str(folder) in str(error)  # noqa: PT017
    assert not (tmp_path / "executed").exists()


def test_a_file_that_its_writer_has_summed_is_named_though_the_main_rank_does_not_see_it(copied):
    (copied / integrity.MANIFEST).unlink()
    integrity.seal(copied, {"weights/unseen": (3, "0" * 64)})
    assert integrity.damage(copied) == "weights/unseen is missing"


def test_a_checkpoint_within_a_step_needs_the_rest_of_the_step(copied, caplog):
    before = shutil.copytree(copied, copied.with_name("step-000001"))
    assert copied.name == "step-000001-updates-0001"
    assert checkpoint.newest_whole(copied.parent) == copied
    manifest = copied / integrity.MANIFEST
    named = json.loads(manifest.read_text())
    del named[step_in_progress.FILE]
    manifest.write_text(json.dumps(named))
    assert checkpoint.newest_whole(copied.parent) == before
    assert f"does not name {step_in_progress.FILE}" in caplog.text
