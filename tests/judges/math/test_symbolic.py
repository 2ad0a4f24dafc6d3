"""The worker processes behind the symbolic comparison: hostile answers die alone, and nothing outlives the trainer."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from limits import limit

from grpo_mega.judges.math import symbolic
from grpo_mega.judges.math.verify import equivalent

HOSTILE = "(x+1)^{3000}-(x^{2}+2x+1)^{1500}+x+1"
"""Equal to x+1, but to prove it would take minutes."""


@pytest.fixture(autouse=True, scope="module")
def _impatient():
    """Hostile answers are given up sooner, to save time."""
    symbolic.close_workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbolic, "CPU_SECONDS", 0.5)
        yield
    symbolic.close_workers()


@pytest.fixture
def _fresh():
    """No workers, verdicts or warnings from before."""
    symbolic.close_workers()
    symbolic.symbolically_equal.cache_clear()
    symbolic._warned.clear()


@pytest.mark.usefixtures("_fresh")
def test_workers_start_only_when_needed_and_are_used_again():
    assert equivalent("38/2", "19")
    assert not symbolic._idle
    assert equivalent("x+1", "1+x")
    (worker,) = symbolic._idle
    assert not equivalent("x+1", "2+x")
    assert symbolic._idle == [worker]


@pytest.mark.usefixtures("_fresh")
def test_hostile_answers_are_given_up_and_logged_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert not equivalent(HOSTILE, "x+1")
        assert not equivalent(HOSTILE, "x+2")
        assert equivalent("x+1", "1+x")
    (record,) = caplog.records
    start = f"the symbolic worker gave up on the answer '{HOSTILE}' (exit code {-signal.SIGPROF};"
    assert record.message.startswith(start)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^9}",
        "9**9**9**9",
        "9^{9^{9^9}}",
        "(10^7)!",
        r"\binom{10^9}{10^8}",
        "x" * 999,
        "{" * 10 + "x" + "}" * 10,
        r"\sqrt" * 190 + "{x}",
        "x^" * 400 + "x",
        "\ud800",
        "x\x00\n\ttrue\n",
        '"]\n["x", "x',
        "\\",
        "\\begin{pmatrix}",
        "import os; os._exit(0)",
        "exit()",
    ],
    ids=lambda text: ascii(text[:16]),
)
def test_hostile_answers_do_not_pass_or_stop_the_next_question(answer: str):
    assert not equivalent(answer, "x+1")
    assert equivalent("1+x", "x+1")


@pytest.mark.usefixtures("_fresh")
def test_a_repeated_answer_costs_once():
    assert not equivalent(HOSTILE, "x+1")
    assert not symbolic._idle
    assert not equivalent(HOSTILE, "x+1")
    assert not symbolic._idle  # a second question would have left its worker behind, or started one


@pytest.mark.usefixtures("_fresh")
def test_a_worker_killed_while_idle_is_replaced():
    assert equivalent("x+1", "1+x")
    (worker,) = symbolic._idle
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert equivalent("x+2", "2+x")
    assert symbolic._idle != [worker]


def test_a_worker_that_dies_before_its_question_has_no_verdict():
    worker = symbolic._Worker()
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert worker.ask((("x", "x"),)) is None
    worker.close()


@pytest.mark.usefixtures("_fresh")
def test_a_process_with_a_thousand_open_files_compares():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert equivalent("x+1", "1+x")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("_fresh")
def test_threads_use_workers_of_their_own_and_get_their_own_verdicts():
    pairs = [(f"x+{i}", f"{i % 3}+x") for i in range(24)]
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda pair: equivalent(*pair), pairs))
    assert verdicts == [i == i % 3 for i in range(24)]
    assert 1 <= len(symbolic._idle) <= 2


@pytest.mark.usefixtures("_fresh")
def test_close_ends_the_processes():
    assert equivalent("x+1", "1+x")
    (worker,) = symbolic._idle
    symbolic.close_workers()
    assert worker.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_no_worker_outlives_its_parent(ending: str):
    """The pipe that the worker inherits as standard error closes only when every process holding it is gone."""
    code = (
        "import os, signal\n"
        "from grpo_mega.judges.math import symbolic\n"
        "assert symbolic.symbolically_equal((('x+1', '1+x'),)) == (True,)\n"
        f"{ending}\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=limit(120), check=False)
    assert parent.returncode in (0, 3, -signal.SIGKILL)
    assert parent.stderr == b""


@pytest.mark.usefixtures("_fresh")
def test_a_forked_child_has_no_share_in_the_workers():
    assert equivalent("x+1", "1+x")
    child = os.fork()
    if child == 0:
        os._exit(len(symbolic._idle))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equivalent("x+2", "2+x")


@pytest.mark.usefixtures("_fresh")
def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(7)")
    monkeypatch.setattr(symbolic, "_SCRIPT", script)
    with pytest.raises(RuntimeError, match=r"symbolic worker did not start \(exit code"):
        equivalent("x+1", "1+x")


def test_latex2sympy_has_a_grammar_for_the_installed_antlr_runtime():
    """Hydra pins antlr 4.9.3, latex2sympy also supports newer ones: a mismatch would fail every parse silently."""
    assert equivalent(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}")
