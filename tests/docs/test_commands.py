"""Every command that a document marks as runnable runs, from the repository's root, shortened by what is added to it.

`make test` runs the first of each program that takes seconds, `make test-docs` the others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCUMENTS, PROGRAMS, Command, blocks, commands, programs, text_without_blocks
from forks import free_port, run_python
from limits import limit
from ranks import REPOSITORY
from reached import starts

EVERY = [command for path in DOCUMENTS for command in commands(path)]
RUN = [command for command in EVERY if not command.not_run]

TORCHRUN = "torchrun --nproc-per-node"
NOT_RUN = {
    "needs a Slurm cluster; tests/slurm run a chain on a local Slurm, tests/recipes set a stage aside": [
        "slurm/r1_tiny.sh --dry-run", "slurm/r1_tiny.sh --partition=NAME", "slurm/status.sh runs/r1_tiny",
        "python tools/recipe.py", "RECIPE=my.yaml RECIPE_ROOT=runs/mine",
    ],
    "tests/recipes run a shorter chain": [
        "make r1-tiny", "make r1-tiny", "python tools/recipe.py", "python tools/recipe.py", "python tools/recipe.py",
        "python tools/recipe.py", "for seed", "python tools/recipe.py", "done",
    ],
    "tests/train/test_taught_runs.py runs shorter ones": [
        "python -m", "for seed", "python -m", "python -m", "python -m", "done",
    ],
    "the folder is yours; tests/new/test_new.py does it with a small one": ["python -m"],
    "a minute; tests/recipes/test_recipe.py runs it": ["python tools/recipe.py"],
    "a minute; tests/forecast/planning/test_simulated_slices.py runs a smaller one": ["python tools/simulate.py"],
    "SGLang needs a separate environment; tests/sglang run shorter ones": [TORCHRUN],
    "tests/train run it on small runs": [
        "python tools/export.py", "python tools/export.py", TORCHRUN,
    ],
    "tests/train/test_traces_of_runs.py runs a shorter one": [TORCHRUN],
    "the folder is yours; tests/train/test_own_model.py runs it with a small one": [TORCHRUN],
    "tests/train run a shorter one": [TORCHRUN, TORCHRUN, "python tools/export.py"],
    "tests/train run it on small models": ["python tools/import.py", TORCHRUN],
    "tests/evaluate and tests/recipes run it on smaller runs": [
        "python tools/evaluate.py", TORCHRUN, "python tools/evaluate.py", "python tools/evaluate.py",
        TORCHRUN,
        "python tools/evaluate.py", "python tools/rejection_sample.py", TORCHRUN,
    ],
    "tests/evaluate and tests/recipes run a shorter one": [
        TORCHRUN, TORCHRUN, "python tools/rejection_sample.py",
        'student="experiment=tiny_dense model.hidden=48', "for seed", TORCHRUN, TORCHRUN,
        "done",
    ],
    "minutes of training; tests/train/test_kills.py runs shorter ones": [
        "python -", 'common="experiment=tiny layout=single', "python -m",
        'tail="base=none run.init_from=runs/base-models/NAME', 'tail="$tail data.sources.short.path=short.jsonl',
        'tail="$tail data.sources.long.path=long.jsonl', "for seed", "python -m", "for slice", "python -m",
        "done", "done",
    ],
    "minutes of training; tests/stages train smaller ones, tests/recipes choose samples, tests/evaluate measure": 2 * [
        TORCHRUN, "python tools/evaluate.py", "python tools/rejection_sample.py",
        TORCHRUN, TORCHRUN,
    ],
    "minutes of training; tests/recipes compose it": ["python tools/recipe.py"],
    "minutes of sampling; tests/recipes continue completions of a smaller run": [
        "python tools/evaluate.py", "python tools/rejection_sample.py",
    ],
    "needs make .venv-rehearse/.ready, 7 GB; tests/forecast/rehearsal run it": [
        "make rehearse", "python tools/rehearse.py", "python tools/rehearse.py",
    ],
    "TRL needs a separate environment": ["OMP_NUM_THREADS=1 python", "OMP_NUM_THREADS=1 python"],
    "needs a Slurm cluster; tests/slurm run the scripts on a local Slurm": [
        "git clone", "make .venv/.ready", "slurm/tiny.sh --partition=NAME", "slurm/status.sh runs/tiny",
        "make .venv/.ready", "slurm/tiny.sh --dry-run", "slurm/tiny.sh --partition=NAME", "slurm/status.sh runs/tiny",
    ],
    "needs GPUs and a Slurm cluster": ["srun --partition=NAME"],
    "downloads a model, and the problems are yours; tests/new/test_new.py runs the rest with small ones": [
        ". .venv/bin/activate", "hf download", "python -m", "python -m",
    ],
    "the folder is yours; tests/new/test_new.py trains with a small one, tests/train/test_export.py exports": [
        TORCHRUN, "python tools/export.py",
    ],
    "tests/show/traces/test_trace_tool.py runs it on small runs": 5 * ["python tools/trace.py"],
    "installs packages": ["pip install", TORCHRUN],
    "tests/show/trackers/test_trackers.py runs it on small runs": ["python -m"],
    "tests/show/report run it on small runs": ["python tools/report.py"] * 3,
    "tests/show/report take them of a small run": ["PYTHONPATH=.:tests:tests/show/report python"],
    "tests/recipes/test_data_tool.py runs it on small files": ["python tools/data.py"],
    "writes 10 MB; tests/reward/test_countdown.py makes fewer problems": ["python tools/countdown.py"],
    "needs reasoning-gym and a Hugging Face model": [TORCHRUN],
    "needs a GPU": 3 * ["make gpu-smoke"] + ["python -m", "compute-sanitizer --tool"],
    "downloads a data set and a model": [
        ". .venv/bin/activate", "hf download", "hf download", "python -m", TORCHRUN,
    ],
    "needs GPUs and a downloaded model": ["make gpu-smoke", TORCHRUN],
    "downloads a data set and 61 GB of weights": [".venv/bin/python -", "hf download"],
    "needs GPUs": [
        "CLUSTER=infiniband slurm/qwen3_30b_a3b.sh",
        "python3 -m", ".venv/bin/pip install", ".venv/bin/pip install", "touch .venv/.ready",
        ".venv/bin/python tools/doctor.py", ".venv/bin/hf download",
    ],
    "needs GPUs and Apptainer": ["cat >grpo.def", "apptainer build", "RUNTIME=apptainer IMAGE=/images/grpo.sif"],
    "needs GPUs and pyxis": ["srun --partition=NAME", "srun --partition=NAME", "RUNTIME=pyxis IMAGE=/images/grpo.sqsh"],
}  # fmt: skip
"""{reason: the first two words of every command that is not run for it}: whoever adds one adds it here."""

SHORT_RUN = (
    "run.root={root} run.steps=2 run.eval_every=0 run.save_every=0 base.max_steps=2 base.gate_accuracy=0"
    " base.gate_from=1 base.gate_every=1 base.gate_passes=1 base.warmup_steps=0 base.decay_steps=0 base.batch_size=4"
    " optimizer.warmup_steps=0 data.validation_size=8 data.test_size=8"
    " algorithm.prompts_per_step=4 algorithm.group_size=2 rollout.max_new_tokens=8 critic.alone_steps=0"
)
MAKE = "VENV={venv} READY={tmp}/ready"
"""The environment that runs the tests; its mark lies in {tmp} and is new, so that make installs nothing."""
ADDED = {
    r"-m grpo_mega\.train .*sft\.path=": SHORT_RUN + " sft.path={tmp}/cold_start.jsonl sft.warmup_steps=0",
    r"-m grpo_mega\.train .*data\.sources": SHORT_RUN
    + " data.sources.short.path={tmp}/train.jsonl data.sources.long.path={tmp}/test.jsonl",
    r"-m grpo_mega\.train .*data\.curriculum": SHORT_RUN
    + " data.train_path={tmp}/train.jsonl data.test_path={tmp}/test.jsonl",
    r"-m grpo_mega\.train .*data=jsonl": SHORT_RUN
    + " data.train_path={tmp}/train.jsonl data.test_path={tmp}/test.jsonl"
    " run.init_from={base}",
    r"-m grpo_mega\.train .*--cfg job": "",
    r"-m grpo_mega\.train": SHORT_RUN,
    r"make train": MAKE + " ARGS+='" + SHORT_RUN + "'",
    r"tools/bench_host\.py": "--samples 64 --replicas 2 --mean 50",
    r"tools/bench_sandbox\.py": "--programs 20",
    r"tools/bench_step\.py": "algorithm.prompts_per_step=2 rollout.max_new_tokens=6 --steps 1 --warmup 1",
    r"tools/bench_kernels\.py --check": "",
    r"tools/bench_kernels\.py --traps": "",
    r"tools/bench_kernels\.py --attention": "--repeat 1",
    r"tools/bench_kernels\.py": "--rows 64 512 --linear 64 512 32 --repeat 1 --json {tmp}/k.json --plot {tmp}/k.png",
    r"tools/parity\.py": "--steps 1",
    r"tools/plan\.py": "",
    r"tools/recipe\.py show": "",
    r"tools/doctor\.py": "--runs {tmp}",
    r"docs/megatron_defects\.py": "",
    r"docs/planner_published\.py": "",
    r"tests/parity/report\.py spread": "SSE4 --cases tied:tp2",
    r"tests/parity/report\.py mutations": "--cases dense:tp2",
    r"-m pytest tests/parity/test_mutations\.py": "-k dense:tp2 -p no:cacheprovider",
    r"-m pytest tests/parity": "-k tied:tp2 -p no:cacheprovider",
    r"-m pytest -m long -k table tests/reward": "-p no:cacheprovider",
    r"\. \.venv/bin/activate": "",
    r"export ": "",
}
"""{what a command holds: what makes it short and keeps it in {tmp}, {root} is its own; the first that fits."""
IN_MAKE_TEST = ["--cfg job", "activate", "tools/doctor"]
"""What the commands hold of which the first runs in `make test`; CI begins with `make train`."""
AS_RANKS = "data=jsonl"
"""What the command holds whose ranks run in `make test`."""


def kind(command: Command) -> str:
    """Which of ADDED the command is."""
    return next((pattern for pattern in ADDED if re.search(pattern, command.text)), command.text)


IN_MAKE_TEST_RUN = [next((one for one in RUN if words in one.text), None) for words in IN_MAKE_TEST]
PARAMETERS = [
    pytest.param(command, id=str(command), marks=() if command in IN_MAKE_TEST_RUN else pytest.mark.long)
    for command in RUN
]


def shortened(command: str, values: dict[str, object]) -> str:
    """The command with what ADDED says at the end of each of its parts."""
    parts = re.split(r"(\s*(?:;|&&)\s*)", command)
    for at, part in enumerate(parts):
        if at % 2 == 0 and (pattern := next((known for known in ADDED if re.search(known, part)), None)):
            parts[at] = f"{part} {ADDED[pattern].format(**values)}"
    return re.sub(r"(?<!\S)\.venv/", f"{values['venv']}/", "".join(parts))


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What stands in braces in ADDED, with the files of a user's own problems and reward in {tmp}."""
    tmp = tmp_path_factory.mktemp("documents")
    readme = blocks(REPOSITORY / "README.md")
    own_reward = next(block.text for block in readme if block.text.startswith("def brevity"))
    (tmp / "my_rewards.py").write_text(own_reward)
    for name, numbers in (("train", range(1, 10)), ("test", range(10, 14))):
        rows = [{"prompt": f"{a}+{b}+2=?", "answer": a + b + 2} for a in numbers for b in range(1, 10)]
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = next(block.text for block in blocks(REPOSITORY / "docs" / "data.md") if '"completion"' in block.text)
    (tmp / "cold_start.jsonl").write_text(rows.splitlines()[1] + "\n")  # the characters' tokenizer knows no chats
    (tmp / "ready").touch()
    return {"tmp": tmp, "venv": sys.prefix}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Commands write into {tmp} and nowhere else."""
    before = left()
    yield
    assert left() == before


def left() -> set[str]:
    """What lies where commands write when nobody says where: the repository's top, and `runs`."""
    folders = (REPOSITORY, REPOSITORY / "runs", REPOSITORY / "runs" / "base-models")
    return {str(path) for folder in folders for path in folder.glob("[!._]*")}


def run(text: str, values: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """The shortened command in bash, from the root of the repository."""
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels", values["tmp"])))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_", "ARGS"))
    }
    environment |= {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"PET_MASTER_PORT": str(free_port())}  # torchrun's --master-port: others test at the same time
    # What a variable before the command says about modules comes before this.
    text = re.sub(r"PYTHONPATH=(\S+) ", rf"PYTHONPATH=\1:{path} ", shortened(text, values))
    return subprocess.run(
        ["bash", "-euc", text], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=limit(600)
    )


@pytest.mark.parametrize("command", PARAMETERS)
def test_it_runs(command: Command, values: dict[str, object], request: pytest.FixtureRequest) -> None:
    values = values | {"root": Path(str(values["tmp"])) / re.sub(r"\W", "-", str(command))}
    if "run.init_from" in command.text:
        values = values | {"base": request.getfixturevalue("base")}
    done = run(command.text, values)
    assert done.returncode == 0, f"{shortened(command.text, values)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.long
def test_ranks_of_the_first_training_with_a_reward_of_one_s_own_run(values: dict[str, object], base: Path) -> None:
    """With the words that bash gives to torchrun, as forks; `make test-docs` starts torchrun itself."""
    command = next(one for one in RUN if AS_RANKS in one.text and one.text.startswith("torchrun "))
    values = values | {"root": Path(str(values["tmp"])) / "ranks", "base": base}
    said = run("torchrun() { printf '%s\\0' \"$@\"; }; " + command.text, values).stdout.split("\0")[:-1]
    ranks, words = int(said[said.index("--nproc-per-node") + 1]), said[said.index("-m") :]
    paths = (REPOSITORY, REPOSITORY / "kernels", Path(str(values["tmp"])))
    done = run_python(*words, ranks=ranks, paths=paths)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def base(values: dict[str, object]) -> Path:
    """A base model as `make train` leaves one, in a test before; else one of a shorter start."""
    tmp = Path(str(values["tmp"]))
    if not any(tmp.glob("*/base-models/*")):
        words = SHORT_RUN.format(root=tmp / "first").split()
        done = run_python("-m", "grpo_mega.train", "experiment=tiny", "layout=single", *words)
        assert done.returncode == 0, done.stderr[-3000:]
    return next(tmp.glob("*/base-models/*"))


def test_every_command_is_of_a_known_kind() -> None:
    assert None not in IN_MAKE_TEST_RUN, "documents have none of these any more"
    unknown = [f"{command}: {command.text}" for command in RUN if kind(command) not in ADDED]
    assert not unknown, f"say in ADDED what makes these short and keeps them in tmp: {unknown}"


def test_what_does_not_run_is_listed_with_its_reason() -> None:
    found: dict[str, list[str]] = {}
    for command in EVERY:
        if command.not_run:
            found.setdefault(command.not_run, []).append(" ".join(command.text.split()[:2]))
    assert found == NOT_RUN


def test_tests_that_a_reason_names_start_the_same_programs() -> None:
    """Each command's program is started by one of them, and each of them starts one of the programs."""
    false = []
    for reason in NOT_RUN:
        places = [REPOSITORY / name for name in re.findall(r"tests/\w[\w/]*(?:\.py)?", reason)]
        started = {str(command): programs(command.text) for command in EVERY if command.not_run == reason}
        anywhere = set[str]().union(*started.values())
        false += [f"{reason}: there is no {place}" for place in places if not place.exists()]
        false += [f"{reason}: {place} starts none" for place in places if not any(starts(place, p) for p in anywhere)]
        for command, own in started.items():
            alone = [program for program in own if places and not any(starts(place, program) for place in places)]
            false += [f"{command}: {reason}: they do not start {program}" for program in alone]
    assert not false, "\n".join(false)


def test_only_what_the_code_of_a_test_names_counts_as_started(tmp_path: Path) -> None:
    cases = (
        ("run('tools/plan.py')", "tools/plan.py", True),
        ("run(REPOSITORY / 'tools' / 'plan.py')", "tools/plan.py", True),
        ("run('tools/replan.py')", "tools/plan.py", False),
        ('"""Of tools/plan.py."""  # tools/plan.py\nrun()', "tools/plan.py", False),
        ("from grpo_mega.train import main", "grpo_mega.train", True),
        ("from train_jobs import Job", "grpo_mega.train", True),
        ("from train_jobs import wait_until", "grpo_mega.train", False),
        ("run_ranks(FOLDER / 'evaluate_refusals_job.py')", "tools/evaluate.py", True),
    )
    for number, (code, program, is_started) in enumerate(cases):
        test = tmp_path / f"test_{number}.py"
        test.write_text(code)
        assert starts(test, program) == is_started, code


def test_no_command_hides_in_a_block_that_is_not_marked() -> None:
    hidden = []
    for path in DOCUMENTS:
        fenced = [
            (block.line, line) for block in blocks(path) if block.language != "bash" for line in block.text.split("\n")
        ]
        indented = [(number, line.strip()) for number, line in text_without_blocks(path) if line.startswith("    ")]
        hidden += [f"{path.name}:{number}: {line}" for number, line in fenced + indented if re.match(PROGRAMS, line)]
    assert not hidden, f"fence these as `bash`: {hidden}"
