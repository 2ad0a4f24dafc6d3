"""Which ranks and sequences a rehearsal has, and what it says where it cannot be."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from composed import composed
from forks import run_python
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY

from grpo_mega.config.schema import Config, LayoutConfig
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.forecast.planning.lines import of_the_trainer
from grpo_mega.forecast.rehearsal import job
from grpo_mega.forecast.rehearsal.device import Books, frame_in_words
from grpo_mega.forecast.rehearsal.job import Environment, NoEnvironment, specs
from grpo_mega.forecast.rehearsal.measure import curve_of
from grpo_mega.forecast.rehearsal.show import against_plan, draw
from grpo_mega.forecast.rehearsal.spec import RankSpec, balanced, skewed
from grpo_mega.models.schedule import cells_per_token

LINES = {"weights": 3e9, "libraries": 12e9, "engine, asleep": 4e9, "exports, beyond these": 1e9}
PLANNED: dict[str, Any] = {"gpus": 512, "capacity": 81_559 * 2**20, "memory": [LINES] * 4}


@pytest.fixture(scope="module")
def config() -> Config:
    return composed("experiment=r1zero_671b")


def asked(config: Config, rank: str = "all-stages", lengths: str = "balanced") -> list[RankSpec]:
    return [*specs(config, ["experiment=r1zero_671b"], PLANNED, rank, lengths, 1.0)]


def test_every_stage_is_rehearsed_by_its_first_rank(config: Config) -> None:
    assert [spec.rank for spec in asked(config)] == [0, 128, 256, 384]
    both = [(spec.rank, spec.sequences) for spec in asked(config, "worst")]
    assert both == [(rank, kind) for rank in (0, 128, 256, 384) for kind in ("balanced", "skewed")]


def test_a_gpu_has_what_cuda_shows_and_libraries_and_engines_have_their_part(config: Config) -> None:
    [spec] = asked(config, "511", "33000, 8000")
    assert (spec.rank, spec.lengths, spec.sequences) == (511, (33000, 8000), "given")
    assert spec.capacity == 81_051 * 2**20
    assert spec.taken == 16e9
    assert of_the_trainer(LINES) == 3e9
    assert RankSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("settings", "rank", "lengths", "where", "fix"),
    [
        ([], "512", "balanced", "--rank=512", "0 to 511"),
        ([], "-1", "balanced", "--rank=-1", "0 to 511"),
        ([], "first", "balanced", "--rank=first", "all-stages or worst"),
        ([], "0", "67585", "--lengths=67585", "raise model.context"),
        ([], "0", "100,1", "--lengths=1", "raise model.context"),
        ([], "0", "100,many", "--lengths=100,many", "balanced, skewed, or numbers"),
        (["cluster=any"], "0", "balanced", "cluster.gpu_memory_mib=null of r1zero_671b", "cluster=h100"),
    ],
)
def test_what_cannot_be_rehearsed_is_named(settings: list[str], rank: str, lengths: str, where: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        asked(composed("experiment=r1zero_671b", *settings), rank, lengths)
    assert error.value.where == where
    assert fix in error.value.fix


def test_a_machine_without_the_environment_says_what_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoEnvironment, match=r"make \.venv-rehearse/\.ready"):
        Environment.find(tmp_path)
    library = tmp_path / ".venv-rehearse" / "nullgpu" / "libnullgpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(NoEnvironment, match="no torch for CUDA 13"):
        Environment.find(tmp_path)
    monkeypatch.setattr(job.machine, "machine", lambda: "aarch64")
    with pytest.raises(NoEnvironment, match="x86_64, and this is linux on aarch64"):
        Environment.find(tmp_path)


def test_a_rank_tells_all_that_is_wrong_with_its_settings(config: Config) -> None:
    """The rank's process composes the settings again, here in this environment instead of that of the null GPU."""
    [spec] = asked(config, "0")
    spec = replace(spec, settings=(*spec.settings, "algorithm.group_size=0", "optimizer.lr=-1"))
    with pytest.raises(ConfigError) as error:
        Environment(Path(sys.prefix)).run(REPOSITORY / "tools" / "rehearse_rank.py", spec)
    assert [problem.field for problem in error.value.problems] == ["algorithm.group_size", "optimizer.lr"]


def test_the_command_refuses_a_preset_without_gpus() -> None:
    done = run_python("tools/rehearse.py", "tiny")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cluster.gpu_memory_mib=null of tiny: ")
    assert done.stdout == ""


@given(
    tokens=st.integers(64, 70_000), context=st.integers(16, 70_000), cp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 4)
)
def test_sequences_fill_the_micro_batches_and_no_more(tokens: int, context: int, cp: int, pp: int) -> None:
    layout = LayoutConfig(cp=cp, pp=pp, micro_batch_tokens=tokens)
    cells = cells_per_token(cp)
    for lengths in (balanced(layout, context), skewed(layout, context, cells)):
        assert min(lengths) >= 2
        assert max(lengths) <= context
        assert len(lengths) % pp == 0
        of_one = lengths[: len(lengths) // pp]
        assert of_one * pp == lengths
        assert sum(of_one) <= tokens
        assert len(of_one) * max(of_one) <= cells * tokens
    assert max(skewed(layout, context, cells)) == min(tokens, context)


def test_counts_are_read_in_the_order_in_which_c_has_them() -> None:
    header = (Path(job.__file__).parent / "nullgpu" / "books.h").read_text()
    struct = header[header.index("typedef struct {") : header.index("} Books;")]
    words = [line.split("//")[0].removeprefix("  uint64_t ") for line in struct.splitlines()[1:]]
    named = [name.strip(" ;") for words in words for name in words.split(",") if name.strip()]
    assert named == [f.name for f in fields(Books)]


def test_without_the_null_gpu_nothing_is_counted() -> None:
    assert not hasattr(ctypes.CDLL(None), "nullgpu_books")
    with pytest.raises(RuntimeError, match=r"start this with tools/rehearse\.py"):
        Books.read()


@given(changes=st.lists(st.integers(-50, 50), max_size=700), points=st.integers(1, 60))
def test_a_curve_begins_and_ends_where_memory_does_and_has_its_peak(changes: list[int], points: int) -> None:
    begin = 50 * len(changes)
    events = [{"action": "alloc" if n >= 0 else "free_requested", "size": abs(n)} for n in changes]
    events.insert(len(events) // 2, {"action": "segment_alloc", "size": 7})
    curve = curve_of(events, begin, points)
    levels = [begin + sum(changes[:n]) for n in range(len(changes) + 1)]
    assert (curve[0], curve[-1], max(curve)) == (levels[0], levels[-1], max(levels))
    assert len(curve) == 2 + min(points, len(levels))


def rank_of_two_phases(**changes: Any) -> dict[str, Any]:
    """What a rehearsal of two phases measured."""
    sizes = {"allocated": 3e9, "peak_allocated": 3e9, "peak_reserved": 3e9}
    held = {"policy weights": 1e9, "policy optimizer": 2e9}
    build = {"name": "build", "curve": [0, 3e9], "held": held} | sizes
    gradients = build | {"name": "gradients, update 1", "curve": [3e9, 9e9, 4e9], "peak_allocated": 9e9}
    gradients["peak_reserved"] = 10e9
    rank = {"rank": 3, "stage": 1, "sequences": "skewed", "capacity": 80e9, "taken": 16e9, "failure": None}
    return rank | {"phases": [build, gradients]} | changes


@pytest.mark.parametrize(
    ("lines", "sentences"),
    [
        ({"weights": 3e9, "one layer, saved": 6e9}, []),
        ({"weights": 5e9, "one layer, saved": 6e9}, ["the planner is off: what is held takes 2.0 GB less"]),
        ({"weights": 3e9, "output layer": 1e9}, ["the planner is off: what is at work takes 5.0 GB more"]),
    ],
)
def test_a_sentence_says_where_the_planner_is_off(lines: dict[str, float], sentences: list[str]) -> None:
    figures, *said = against_plan(rank_of_two_phases(), lines).splitlines()
    assert said == sentences
    assert figures.endswith("(measured 6.0); fragments take 1.0 GB")
    assert "\n" not in against_plan(rank_of_two_phases(failure={"phase": "gradients, update 1"}), lines)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw(rank_of_two_phases(), LINES, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/env/lib/python3.11/site-packages/megatron/core/x.py", "megatron/core/x.py:7 f"),
        ("/home/me/grpo_mega/grpo_mega/models/model.py", "grpo_mega/models/model.py:7 f"),
        ("/env/lib/python3.11/site-packages/torch/nn/x.py", ""),
        ("/usr/lib/python3.11/contextlib.py", ""),
        ("/home/me/grpo_mega/grpo_mega/forecast/rehearsal/rank.py", ""),
    ],
)
def test_places_are_those_of_the_project_and_of_libraries(path: str, words: str) -> None:
    assert frame_in_words(path, 7, "f") == words
