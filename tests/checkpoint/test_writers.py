"""What the processes that write a checkpoint report comes back, and no process is needed for it."""

from __future__ import annotations

import hashlib
import json
import queue
import signal
from pathlib import Path

import pytest
from forks import run_python
from ranks import run_ranks

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.writers import ForkedQueue  # noqa: E402


def test_reports_come_back_without_the_program_being_run_again_or_a_process_that_stays() -> None:
    made = run_python(Path(__file__).parent / "unguarded_program.py")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == [
        "[MetadataIndex(fqn='weight', offset=None, index=None)]",
        "OSError(28, 'No space left on device')",
        "['" + "a" * 68,
        "empty",
        "helpers: []",
    ]


def test_a_report_that_was_cut_short_is_none() -> None:
    reports = ForkedQueue()
    reports.put("whole")
    reports.put("a" * 100)
    with open(f"/proc/self/fd/{reports._file}", "r+b") as memory:
        memory.truncate(memory.seek(0, 2) - 1)
    assert reports.get_nowait() == "whole"
    with pytest.raises(queue.Empty):
        reports.get_nowait()
    assert reports.all() == []
    reports.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A checkpoint of two ranks, and the files that they read again to seal it, by how it was written."""
    folder = tmp_path_factory.mktemp("saved")
    outputs = run_ranks(Path(__file__).with_name("writers_job.py"), 2, [str(folder)])
    lines = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return folder, {how: sorted(name for line in lines for name in line[how]) for how in lines[0]}


@pytest.mark.parametrize("how", ["waiting", "background"])
def test_what_ranks_write_is_summed_where_it_is_written_and_the_sums_are_right(saved, how):
    folder, read_again = saved
    manifest = json.loads((folder / how / "manifest.json").read_text())
    files = [f for f in (folder / how).rglob("*") if f.is_file() and f.name != "manifest.json"]
    found = {
        str(f.relative_to(folder / how)): [f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files
    }
    assert manifest == found
    written = {name for name in found if name.endswith(".distcp")}
    assert {name.split("/")[0] for name in written} == {"weights", "reference"}
    assert {name.split("_")[2] for name in written} == {"0", "1"}, "both ranks wrote"
    assert read_again[how] == sorted(found.keys() - written)


def test_every_process_that_writes_is_killed_with_its_rank(saved):
    signals = [file.read_text() for file in (saved[0] / "forks").iterdir()]
    assert len(signals) >= 2 * 2 * 2, "ranks, parts, ways"
    assert set(signals) == {str(int(signal.SIGKILL))}


def test_a_process_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    (said,) = run_ranks(Path(__file__).with_name("patience_job.py"), 1, [str(tmp_path / "none")])
    assert "have written nothing for 2 s, and still run" in said


@pytest.mark.long
def test_a_wait_for_the_main_ranks_files_outlasts_the_patience_of_collectives(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("patience_job.py"), 2, [str(tmp_path / "slow")])
    assert (tmp_path / "slow").read_text() == "both ranks went on"
