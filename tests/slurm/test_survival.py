"""Whatever happens to a job, its run ends bit for bit as one that nothing happened to, and no process is left."""

from __future__ import annotations

import contextlib
import fcntl
import math
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SMALL_DISK, Cluster, wait_until
from launches import REPOSITORY, Launch, submit, submit_as_it_is
from limits import limit
from processes import kill
from train_jobs import half_written, numbers, saved, without_seconds

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def peace(cluster: Cluster) -> Path:
    """A run that nothing happens to."""
    launch = submit(cluster, "peace")
    assert launch.finish() == "COMPLETED", launch.log
    assert launch.steps() == [1, 2, 3, 4]
    assert all(line["policy/grad_norm"] > 0 for line in numbers(launch.run))
    return launch.run


@pytest.fixture
def caught(cluster: Cluster, peace: Path, request: pytest.FixtureRequest):
    """Submits a run that strikes once, and waits until it does."""

    def catch(kind: str, rank: int, *arguments: str, how=submit, **environment: str) -> Launch:
        name = request.node.name
        file = cluster.root / f"{name}.struck"
        launch = how(cluster, name, *arguments, fault=f"{kind} 2 {rank} {file}", **environment)
        wait_until(lambda: file.exists() or launch.number not in cluster.jobs(), "the fault does not strike")
        assert file.exists(), launch.log
        return launch

    yield catch
    cluster.revive()


def assert_as_in(peace: Path, launch: Launch) -> None:
    """The job is over, and its run is the undisturbed one."""
    assert launch.finish() == "COMPLETED", launch.log
    last = "checkpoints/step-000004"
    assert saved(launch.run / last) == saved(peace / last)
    assert numbers(launch.run) == numbers(peace)
    assert without_seconds(launch.run / "summary.json") == without_seconds(peace / "summary.json")
    assert half_written(launch.run) == []
    assert launch.status["state"] == "completed"
    assert launch.status["step"] == "4"
    assert float(launch.status["reward"]) == pytest.approx(numbers(peace)[-1]["reward/mean"])


def node_of(launch: Launch, rank: int) -> str:
    """The node a rank runs on in the job's first attempt; one rank per node."""
    line = next(line for line in launch.log.splitlines() if "attempt 1 on" in line)
    return line.split()[-2:][rank]


def test_a_node_that_dies_in_a_step_is_replaced(cluster, peace, caught):
    launch = caught("hold", 0)
    dead = node_of(launch, 1)
    cluster.kill_node(dead)
    assert_as_in(peace, launch)
    assert dead not in cluster.job(launch.number)["NodeList"]
    assert f"ended without an exit code: rank 1 on {dead}" in launch.log


def test_the_node_of_the_batch_script_may_die_too(cluster, peace, caught):
    launch = caught("hold", 1)
    cluster.kill_node(node_of(launch, 0))
    assert_as_in(peace, launch)
    assert cluster.job(launch.number)["Restarts"] == "1"


def test_ahead_of_the_time_limit_a_run_saves_and_goes_back_into_the_queue(cluster, peace, caught):
    """Slurm's own clock, which may signal a minute early."""
    minutes = math.ceil(limit(180) / 60)
    clock = {"SBATCH_TIMELIMIT": str(minutes), "SBATCH_SIGNAL": "B:USR1@90", "STOP_SECONDS": "60"}
    launch = caught("hold", 0, "run.save_every=0", how=submit_as_it_is, **clock)
    assert_as_in(peace, launch)
    assert "asked to stop by SIGUSR1" in launch.log
    assert cluster.job(launch.number)["Restarts"] == "1"
    assert "stopped in step 3 before its first update" in log_of(launch, "restart-0-attempt-1", 0)
    assert "continuing after step 2" in log_of(launch, "restart-1-attempt-1", 0)


def test_a_job_that_is_asked_to_stop_before_it_gets_anywhere_gives_up(cluster, peace):
    launch = submit(cluster, "short", "run.save_every=0", fault="hold 2 0 -", MAX_FAILURES="2")
    wait_until(lambda: (launch.run / "metrics.jsonl").exists() and launch.steps() == [1, 2], "no step ends")
    cluster.run("scancel", "--batch", "--signal=USR1", launch.number)
    wait_until(lambda: launch.log.count("attempt 1 on") == 2, "it does not start again")
    cluster.run("scancel", "--batch", "--signal=USR1", launch.number)
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "1:0"
    assert launch.status["state"] == "gave-up"
    assert "asked to stop 2 times in a row at the same checkpoint (step-000002)" in launch.log
    assert "too short for --signal" in launch.log
    assert_as_in(peace, submit(cluster, "short", "run.save_every=0"))


def test_nodes_that_cannot_be_judged_end_the_job(cluster):
    python = cluster.root / "no_judge"
    python.write_text(f'#!/bin/sh\ncase "$*" in *" judge "*) exit 1 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    launch = submit(cluster, "unjudged", HOST_PYTHON=str(python))
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "1:0"
    assert "judged 0 of 2 nodes" in launch.log


def log_of(launch: Launch, attempt: str, rank: int) -> str:
    return (launch.files / attempt / f"rank-{rank:04d}.log").read_text()


def test_a_preempted_run_saves_and_continues_when_the_urgent_one_is_over(cluster, peace, caught):
    launch = caught("hold", 0, "run.save_every=0")
    urgent = cluster.run("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1")
    assert cluster.wait(int(urgent.stdout))["JobState"] == "COMPLETED"
    assert_as_in(peace, launch)
    assert "continuing after step 2" in log_of(launch, "restart-1-attempt-1", 0)


def test_a_signal_that_reaches_one_task_and_none_of_its_children_stops_all_ranks(cluster, peace, caught):
    launch = caught("hold", 0, "run.save_every=0")
    (task,) = cluster.running("slurm/lib/node.sh", [node_of(launch, 0)])
    task.terminate()  # as versions of Slurm do that signal the first process of a task only
    assert_as_in(peace, launch)
    assert "continuing after step 2" in log_of(launch, "restart-1-attempt-1", 0)


def test_a_rank_that_hangs_is_found_by_its_stack_and_the_run_starts_again(cluster, peace, caught, tmp_path):
    seconds = math.ceil(limit(30))
    launch = caught("hang", 1, HANG_SECONDS=str(seconds))
    beats = [launch.files / "restart-0-attempt-1" / f"rank-{rank:04d}.beat" for rank in range(2)]
    wait_until(lambda: all("reward" in beat.read_text() for beat in beats), "not both ranks come to the rewards")
    told = cluster.run(REPOSITORY / "slurm" / "status.sh", launch.number).stdout
    assert f"state=running job={launch.number} restart=0 attempt=1 step=" in told
    assert re.search(r"^╰─ not complete, last sign of life .* ago ─", told, re.MULTILINE), told
    assert "2 ranks  reward (phase " in told
    assert "rank-0000 rank-0001" in told
    assert_as_in(peace, launch)
    assert cluster.job(launch.number)["Restarts"] == "0"
    assert "in _ask" in log_of(launch, "restart-0-attempt-1", 1), "it waits for its reward function"
    assert f"no sign of life from rank 0 for {seconds} s" in launch.log
    report = (launch.files / "report.txt").read_text()
    assert re.search(r'user_functions\.py", line \d+ in \w+: rank-0001\n', report)
    assert f"tools/trace.py {launch.run} --last" in report
    told = cluster.run(REPOSITORY / "slurm" / "status.sh", launch.run).stdout
    assert re.search(r"^│ run .* (\d+)/\1 +\d+:\d+ +0:00 left │$", told, re.MULTILINE), told
    assert re.search(r"^╰─ completed ─", told, re.MULTILINE), told
    assert not re.search(r"^step ", told, re.MULTILINE), told
    (tmp_path / "slurm").mkdir()
    alone = shutil.copy(REPOSITORY / "slurm" / "status.sh", tmp_path / "slurm")  # where there is no .venv
    told = cluster.run(alone, launch.run, HOST_PYTHON="false").stdout
    assert re.search(r"^step (\d+)/\1: reward .* elapsed, 0:00 left$", told, re.MULTILINE), told


def test_a_rank_that_is_killed_is_started_again_with_the_others(cluster, peace, caught):
    launch = caught("die", 1)
    assert_as_in(peace, launch)
    assert "exit code 137" in launch.log
    assert "first to fail: rank 1" in launch.log


def test_a_crash_loop_ends_with_the_rank_that_failed_first_and_its_last_lines(cluster, peace):
    launch = submit(cluster, "loop", fault="crash 2 1 -", MAX_FAILURES="2")
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "1:0"
    assert launch.status["state"] == "gave-up"
    report = (launch.files / "report.txt").read_text()
    assert report.count("first to fail: rank 1 on node") == 2
    assert "KeyError: 'no such column'" in report
    assert launch.steps() == [1, 2]
    again = submit(cluster, "loop")
    assert_as_in(peace, again)


def test_ranks_that_end_with_0_and_no_summary_have_failed(cluster):
    python = cluster.root / "no_trainer"
    python.write_text(f'#!/bin/sh\ncase "$*" in *grpo_mega.train*) exit 0 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    launch = submit(cluster, "unfinished", PYTHON=str(python), MAX_FAILURES="2")
    assert launch.finish() == "FAILED", launch.log
    assert cluster.job(launch.number)["ExitCode"] == "1:0"
    assert launch.status["state"] == "gave-up"
    report = (launch.files / "report.txt").read_text()
    assert report.count("every rank ended with exit code 0, but ") == 2
    assert f"{launch.run}/summary.json does not say that the run is completed" in report


def test_a_cancelled_run_saves_does_not_come_back_and_can_be_continued(cluster, peace, caught):
    launch = caught("hold", 1, "run.save_every=0")
    cluster.run("scancel", launch.number)
    assert launch.finish() == "CANCELLED"
    assert launch.status["state"] == "taken-away"
    assert cluster.jobs() == []
    again = submit(cluster, launch.run.name, "run.save_every=0")
    assert_as_in(peace, again)
    assert "continuing after step 2" in log_of(again, "restart-0-attempt-1", 0)


@pytest.fixture
def unfit(cluster: Cluster) -> Iterator[str]:
    """A node with too little shared memory; the first that Slurm gives to a job."""
    cluster.kill_node("node1")
    cluster.start_node("node1", prepare="mount -t tmpfs -o size=1m none /dev/shm")
    cluster.wait_idle()
    yield "node1"
    cluster.kill_node("node1")
    cluster.revive()


def test_a_run_that_an_alarm_stops_is_saved_and_its_job_is_not_put_back(cluster):
    settings = ["run.steps=8", "run.stop_on=[mismatch]", "alarms.mismatch=1e-12"]  # which rounding exceeds
    launch = submit(cluster, "alarmed", *settings)
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "4:0", launch.log
    assert cluster.job(launch.number)["Restarts"] == "0"
    assert launch.status["state"] == "alarmed"
    assert "stopped after step 5 by the alarm mismatch" in " ".join(launch.log.split())


def test_a_spare_takes_the_place_of_a_node_that_fails_the_checks(cluster, peace, unfit):
    launch = submit(cluster, "spare", SPARES="1")
    assert_as_in(peace, launch)
    assert "node1 is left out, unfit: /dev/shm has 1 MiB free" in launch.log
    assert "attempt 1 on node2 node3" in launch.log


def test_the_only_node_of_a_job_is_left_out_too(cluster, unfit):
    launch = submit(cluster, "single", "run.steps=1", NODES="1", RANKS_PER_NODE="2")
    assert launch.finish() == "COMPLETED", launch.log
    assert cluster.job(launch.number)["ExcNodeList"] == "node1"
    assert "attempt 1 on node2" in launch.log


@contextlib.contextmanager
def in_use(cluster: Cluster, name: str) -> Iterator[Path]:
    """The directory of a run that another job has."""
    path = cluster.root / "runs" / name
    (path / "slurm").mkdir(parents=True)
    (path / "slurm" / "status").write_text("state=running job=7\n")
    with (path / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("pid 7 on nodeX\n")
        lock.flush()
        yield path


def test_a_controller_that_is_away_for_a_while_does_not_end_the_job(cluster, peace):
    """First while no rank runs, then while they train. Not when they end: that Slurm would notice a minute later."""
    resting = cluster.root / "orphaned.struck"
    with in_use(cluster, "orphaned"):
        launch = submit(cluster, "orphaned", fault=f"rest 1 0 {resting}")
        wait_until(lambda: "waiting for up to" in launch.log, "the job does not wait for its directory")
        with cluster.without_controller():
            for shell in cluster.running("slurm_script"):
                kill(shell, signal.SIGUSR1)
            wait_until(lambda: "scontrol: " in launch.log, "the job does not miss the controller")
        wait_until(lambda: "back into the queue" in launch.log, "the job does not leave")
    wait_until(resting.exists, "the fault does not strike")
    with cluster.without_controller():
        resting.unlink()
        wait_until(lambda: 2 in launch.steps(), "the ranks do not go on")
    assert_as_in(peace, launch)
    assert cluster.job(launch.number)["Restarts"] == "1"


def test_two_nodes_with_two_ranks_each_train_and_survive(cluster, caught):
    calm = submit_as_it_is(cluster, "two_by_two", RANKS_PER_NODE="")  # as the script has it
    assert calm.finish() == "COMPLETED", calm.log
    assert calm.steps() == [1, 2, 3, 4]
    assert sorted(file.name for file in calm.files.glob("*/rank-*.code")) == [f"rank-{r:04d}.code" for r in range(4)]
    launch = caught("die", 3, RANKS_PER_NODE="2")
    assert_as_in(calm.run, launch)
    assert "first to fail: rank 3 on node2, exit code 137" in launch.log


OPTIONS = ["--cpus-per-task=3", "--mem=321", "--constraint=tests", "--nice=7", "--mail-user=me@here", "--no-requeue"]
ASKED = ["CPUs/Task", "MinMemoryNode", "Features", "Nice", "TimeLimit", "WorkDir", "Command", "Comment", "Partition"]


def test_without_a_spare_the_job_leaves_the_node_out_and_keeps_what_was_asked_of_slurm(cluster, peace, unfit):
    launch = submit(cluster, "excluded", *OPTIONS)
    asked = cluster.job(launch.number)
    assert (asked["CPUs/Task"], asked["MinMemoryNode"], asked["Features"]) == ("3", "321M", "tests")
    assert_as_in(peace, launch)
    job = cluster.job(launch.number)
    assert {name: job[name] for name in ASKED} == {name: asked[name] for name in ASKED}
    assert (job["ExcNodeList"], job["Restarts"]) == ("node1", "1")
    assert "node1 unfit: /dev/shm has 1 MiB free" in (launch.files / "report.txt").read_text()
    assert "attempt 1 on node2 node3" in launch.log


def test_nodes_that_cannot_be_replaced_end_the_job_with_the_code_for_them(cluster, unfit):
    launch = submit(cluster, "irreplaceable", "cluster.nodes=4", "cluster.gpus_per_node=1", NODES="4")
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "3:0"
    assert launch.status["state"] == "unfit"
    assert "there are 3 nodes besides node1, and the job needs 4" in launch.log


def test_a_run_directory_in_use_is_waited_for_and_its_user_named(cluster, peace):
    with in_use(cluster, "locked") as path:
        launch = submit(cluster, "locked", LOCK_SECONDS="1")
        assert launch.finish() == "FAILED"
        assert cluster.job(launch.number)["ExitCode"] == "2:0"
        assert f"{path} is in use by pid 7 on nodeX: wait for it" in launch.log
        assert launch.status == {"state": "running", "job": "7"}, "the status is that of the job that runs"
        launch = submit(cluster, "locked")
        wait_until(lambda: "is in use by pid 7 on nodeX: waiting for up to" in launch.log, "the job does not wait")
    assert_as_in(peace, launch)


def test_input_that_all_ranks_refuse_ends_the_job_and_that_of_one_rank_is_its_failure(cluster, peace):
    launch = submit(cluster, "refused", "reward.terms=[{name:accuracy},{name:own,function:slurm_rewards:absent}]")
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "2:0"
    assert launch.status["state"] == "refused"
    assert "absent" in launch.log
    alone = ["reward.terms=[{name:accuracy},{name:own,function:slurm_refusal:one}]"]
    launch = submit(cluster, "alone", *alone, MAX_FAILURES="1")
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "1:0", launch.log
    assert "first to fail: rank 0 on node1, exit code 2" in launch.log
    assert "own" in (launch.files / "report.txt").read_text()


def test_a_spare_takes_the_place_of_a_node_that_dies_and_the_job_keeps_its_nodes(cluster, peace, caught):
    launch = caught("hold", 0, SPARES="1", CHECK_LINKS="1")
    measured = (launch.files / "restart-0-attempt-1" / "preflight").glob("*.link-0.json")
    assert sorted(file.name.partition(".")[0] for file in measured) == ["node1", "node2", "node3"], launch.log
    dead = launch.log.split("attempt 1 on ")[1].split()[1]
    cluster.kill_node(dead)
    assert_as_in(peace, launch)
    assert cluster.job(launch.number)["Restarts"] == "0"
    assert "attempt 2 on node1 node3" in launch.log


def test_a_disk_that_is_full_at_a_save_loses_nothing_and_says_what_to_do(cluster, peace):
    small = cluster.root / SMALL_DISK
    if not small.is_mount():
        pytest.skip("mounting a file system is not permitted here")
    root = f"run.root={small}"
    launch = submit(cluster, "full", root, "run.steps=2", MIN_FREE_MB="0")
    assert launch.finish() == "COMPLETED", launch.log
    ballast = small / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small).free - 500_000))
    launch = submit(cluster, "full", root, MAX_FAILURES="1", MIN_FREE_MB="0")
    assert launch.finish() == "FAILED"
    report = (launch.files / "report.txt").read_text()
    assert [word for word in ("step-000003 cannot be written", "make room") if word not in report] == [], report
    ballast.unlink()
    assert_as_in(peace, submit(cluster, "full", root, MIN_FREE_MB="0"))
