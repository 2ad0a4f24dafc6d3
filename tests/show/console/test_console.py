"""The console: lines that stand alone off a terminal, a table and a bar that keeps to its line on one."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
from composed import composed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from limits import limit
from ranks import REPOSITORY
from terminal import Screen, on_a_terminal

from grpo_mega.config.schema import Config, ModelConfig, RewardConfig, RewardTerm, RunConfig
from grpo_mega.show.console.columns import (
    PANEL,
    ROWS,
    ROWS_OF_CALLS,
    ROWS_OF_PAIRS,
    ROWS_OF_STEPS,
    TABLE,
    Column,
    column,
    columns_of,
)
from grpo_mega.show.console.console import WIDTH, Console
from grpo_mega.show.console.panel import (
    BARS,
)

METRICS = {
    "reward/mean": 0.213,
    "reward/accuracy": 0.047,
    "reward/format": 0.938,
    "rollout/length_mean": 18.21,
    "policy/clip_fraction": 0.001,
    "policy/grad_norm": 0.412,
    "time/step": 0.5,
}
SUMMARY = {
    "status": "completed",
    "steps": 10,
    "held_out_accuracy_before": 0.052,
    "held_out_accuracy_after": 0.87,
    "format_rate_before": None,
    "format_rate_after": None,
}


def columns_for(config: Config) -> list[Column]:
    return columns_of(config.run, config.reward, config.algorithm, config.environment)


@cache
def columns() -> list[Column]:
    return columns_for(composed("experiment=tiny"))


SAMPLE = {
    "prompt": "3+5=?",
    "completion": "<think>\n\x1b[31m\x07</think><answer>8</answer>",
    "answer": "8",
    "reward": 1.2,
    "group": 0,
}


def whole_run(stream: TextIO, steps: int = 10) -> None:
    console = Console(steps, Path("runs/tiny"), 5, columns(), stream)
    console.start(["layout: dp 2 on 2 processes"])
    for step in range(1, steps + 1):
        console.step(step, METRICS, [SAMPLE])
    console.evaluation(steps, "validation", {"accuracy": 0.5, "length_mean": 20.25, "sums/accuracy": 0.25})
    console.finish(SUMMARY)


ROW = "reward 0.213, accuracy 4.7%, format 93.8%, length 18.2, entropy -, clipped 0.1%, grad norm 0.412, 0.50 s"


def test_off_a_terminal_every_line_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    stream = io.StringIO()
    whole_run(stream)
    assert stream.getvalue() == (
        "grpo_mega  tiny\n"
        "  layout: dp 2 on 2 processes\n"
        "\n"
        f"step 1/10: {ROW}, 0:00 elapsed, 0:04 left\n"
        f"step 5/10: {ROW}, 0:00 elapsed, 0:02 left\n"
        f"step 10/10: {ROW}, 0:00 elapsed, 0:00 left\n"
        "  | 3+5=? -> <think>\\n\\x1b[31m\\x07</think><answer>8</answer>  [first of 1, answer 8, reward 1.20]\n"
        "      10  validation: accuracy 50.0%, length 20.25\n"
        "tiny completed: 10 steps, held-out accuracy 5.2% -> 87.0%. Everything is in runs/tiny\n"
    )


@settings(max_examples=60)
@given(
    texts=st.tuples(*[st.text(max_size=400)] * 3),
    value=st.floats() | st.none(),
    step=st.integers(1, 10**7),
)
@example(("", "", ""), 1e308, 1)
@example(("", "", ""), -5e-324, 1)
def test_off_a_terminal_lines_are_printable_and_keep_the_width(
    texts: tuple[str, str, str], value: float | None, step: int
) -> None:
    stream = io.StringIO()
    console = Console(step, Path("tiny"), 1, TABLE, stream)
    console.sample(*texts, reward=1.0)
    console.note(" ".join(texts[0][i : i + 10] for i in range(0, len(texts[0]), 10)))
    output = stream.getvalue()
    assert all(char.isprintable() for char in output.replace("\n", ""))
    assert max(map(len, output.split("\n"))) <= WIDTH
    for _ in range(2):  # the times of two steps have a mean
        console.step(step, dict.fromkeys([*METRICS, "policy/kl"], value))
    assert stream.getvalue().removeprefix(output).count("\n") == 2


def written_to_a_pipe(body: Callable[[TextIO], None], encoding: str) -> bytes:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    body(stream)
    stream.flush()
    return raw.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_on_a_pipe_text_is_utf_8_and_cannot_steer_a_terminal(encoding: str) -> None:
    def answer(stream: TextIO) -> None:
        Console(1, Path("tiny"), 1, stream=stream).sample("x ≤ √2?", "答案是\x1b[31m\u202e\ud800\x9b 红", "√2", 1.0)

        print("ValueError: \ud800", file=stream)  # a traceback

    written, said = written_to_a_pipe(answer, encoding).decode("utf-8").splitlines(keepends=True)
    assert said == "ValueError: \\ud800\n"
    assert written == "  | x ≤ √2? -> 答案是\\x1b[31m\\u202e\\ud800\\x9b 红  [answer √2, reward 1.00]\n"


def test_a_long_path_is_not_cut() -> None:
    stream = io.StringIO()
    path = Path("/scratch/" + "x" * 200)
    Console(1, path, 1, stream=stream).finish(SUMMARY)
    assert str(path) in stream.getvalue()


@pytest.mark.parametrize("columns", [20, 45, 79, 80, 160, 200])
def test_on_a_terminal_the_panel_never_wraps_and_is_gone_at_the_end(columns: int) -> None:
    screen = Screen(on_a_terminal(columns, whole_run))
    drawn = [line for frame in screen.frames for line in frame]
    assert max(map(len, [*drawn, *screen.lines])) < columns
    assert any("10/10" in line for line in drawn)
    assert any(line.startswith("╭") for line in drawn)
    assert not [line for line in screen.lines if set(line) & set("━─╭│╰" + BARS)]
    assert "".join(line.strip() for line in screen.lines).endswith("runs/tiny")
    assert (screen.lines[-1], screen.cursor_shown) == ("", True)


def test_on_a_terminal_a_sample_is_whole_unless_it_takes_more_than_a_third() -> None:
    texts = ["0123456789" * 40, " ".join(["word"] * 80), "x" * 5000]

    def body(stream: TextIO) -> None:
        console = Console(10, Path("tiny"), 5, columns(), stream)
        for text in texts:
            console.sample("3+5=?", text, "8", 1.2, "best of 4")
        console.close()

    lines = Screen(on_a_terminal(80, body)).lines
    assert max(map(len, lines)) < 80
    shown = "".join(line.removeprefix("    ") for line in lines)
    assert f"| 3+5=? -> {texts[0]}  [best of 4, answer 8, reward 1.20]" in shown
    assert "word" * 80 in shown.replace(" ", "")
    assert "xxx..." in shown
    assert len(lines) <= 3 * 8 + 1


def two_steps(console: Console, wait: Callable[[float], None]) -> None:
    """A phase lasts as long as in other steps."""
    for step in (9, 10):
        console.phase("generate")
        wait(40)
        console.phase("update")
        wait(10)
        console.step(step, METRICS | {"reward/mean": step / 10, "policy/entropy": None})
    console.phase("generate")
    console.samples(12, 32)
    wait(15)


def evaluation(console: Console, wait: Callable[[float], None]) -> None:
    """The first phase of its kind lasts as long as its samples say; scoring, which interrupts it, counts apart."""
    for phase, seconds in (("evaluate", 4), ("reward", 60), ("evaluate", 6)):
        console.phase(phase)
        wait(seconds)
    console.samples(10, 40)


def earlier_stage(console: Console, wait: Callable[[float], None]) -> None:
    """It may end before its last step."""
    console.stage("pretrain", 0, 200)
    console.step(35, {"base/loss": 1.25, "time/step": 0.5})


def last_stage(console: Console, wait: Callable[[float], None]) -> None:
    """Numbers of the stage before are gone."""
    earlier_stage(console, wait)
    console.stage("", 0, 80)
    console.step(1, {"reward/mean": 0.5})


def alarms(console: Console, wait: Callable[[float], None]) -> None:
    for step, name in ((12, "truncation"), (14, "mismatch")):
        console.alarm({"step": step, "name": name, "message": "half is cut", "action": "Raise it."})


def one_is_over(console: Console, wait: Callable[[float], None]) -> None:
    alarms(console, wait)
    console.step(1, {"reward/mean": 0.5})
    console.alarm({"step": 20, "name": "truncation", "cleared": True})


PANELS = {
    "two_steps 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run       ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  10/7210  1:55  1:00:00 left │
│ generate  ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━    12/32  0:15     0:25 left │
│                                                                             │
│ reward        1.000 ▁█               accuracy       4.7% ▁▁                 │
│ format        93.8% ▁▁               length         18.2 ▁▁                 │
│ clipped        0.1% ▁▁               grad norm     0.412 ▁▁                 │
│ seconds        0.50 ▁▁                                                      │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "two_steps 120x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────────────────────────────────────────────╮
│ run       ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  10/7210  1:55  1:00:00 left │
│ generate  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━    12/32  0:15     0:25 left │
│                                                                                                                     │
│ reward        1.000 ▁█                accuracy       4.7% ▁▁                format        93.8% ▁▁                  │
│ length         18.2 ▁▁                clipped        0.1% ▁▁                grad norm     0.412 ▁▁                  │
│ seconds        0.50 ▁▁                                                                                              │
╰─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────╯
""",
    "two_steps 45x24": """\
╭─ tiny ───────────────────────────────────╮
│ run       ━  10/7210  1:55  1:00:00 left │
│ generate  ━    12/32  0:15     0:25 left │
│                                          │
│ reward        1.000 ▁█                   │
│ accuracy       4.7% ▁▁                   │
│ format        93.8% ▁▁                   │
│ length         18.2 ▁▁                   │
│ clipped        0.1% ▁▁                   │
│ grad norm     0.412 ▁▁                   │
│ seconds        0.50 ▁▁                   │
╰──────────────────────────────────────────╯
""",
    "evaluation 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run       ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  0/7210  1:10            │
│ evaluate  ━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━   10/40  0:10  0:30 left │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "earlier_stage 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ pretrain  ━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  35/200  0:00  1:22 at most │
│                                                                             │
│ loss         1.2500 ▁                seconds        0.50 ▁                  │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "last_stage 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run  ╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1/80  0:00    │
│                                                                             │
│ reward        0.500 ▁                                                       │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "alarms 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  0/7210  0:00    │
│                                                                             │
│ alarms: truncation since step 12; mismatch since step 14                    │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "one_is_over 80x24": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1/7210  0:00    │
│                                                                             │
│ reward        0.500 ▁                                                       │
│                                                                             │
│ alarms: mismatch since step 14                                              │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
    "one_is_over 80x8": """\
╭─ tiny ──────────────────────────────────────────────────────────────────────╮
│ run  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1/7210  0:00    │
│                                                                             │
│ alarms: mismatch since step 14                                              │
╰─────────────────────────────────────────────────────────────────────────────╯
""",
}
"""Body of the test below and size of the terminal -> the panel."""


@pytest.mark.parametrize(
    ("columns", "lines", "body"),
    [
        (80, 24, two_steps), (120, 24, two_steps), (45, 24, two_steps), (80, 24, evaluation), (80, 24, earlier_stage),
        (80, 24, last_stage), (80, 24, alarms), (80, 24, one_is_over), (80, 8, one_is_over),
    ],
)  # fmt: skip
def test_the_panel_of_every_layout(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, body: Callable[[Console, Callable[[float], None]], None]
) -> None:
    """Its times and counts, numbers in as many columns as fit, of the most important first, and alarms."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def write(stream: TextIO) -> None:
        console = Console(7210, Path("tiny"), 7210, TABLE, stream)
        body(console, wait)
        console.close()  # draws it once more

    frames = Screen(on_a_terminal(columns, write, lines)).frames
    panel = "".join(line + "\n" for line in frames[-1] if line.startswith(("╭", "│", "╰")))
    assert panel == PANELS[f"{body.__name__} {columns}x{lines}"]


def test_the_panel_is_drawn_while_the_run_says_nothing() -> None:
    """By a thread of its own: its clock goes on."""
    read, told = [], threading.Event()

    def silent(stream: TextIO) -> None:
        console = Console(80, Path("tiny"), 5, TABLE, stream)
        console.phase("base")
        assert told.wait(limit(60))
        console.close()

    def watch(output: str) -> None:
        read.append(output)
        if len({line for line in "".join(read).split("\n") if "base" in line}) > 2:
            told.set()

    on_a_terminal(80, silent, watch=watch)


def test_what_others_print_to_the_terminal_stands_above_the_panel(tmp_path: Path) -> None:
    """A logger that was set up before, as a run's is, and a library that prints; a file gets what is meant for it."""
    program = """
        import logging, sys
        from pathlib import Path
        from grpo_mega.observe.logs import setup_rank_logging
        from grpo_mega.show.console.console import Console
        setup_rank_logging(Path(sys.argv[1]), 0)
        console = Console(80, Path("tiny"), 5)
        console.phase("generate")
        logging.getLogger("grpo_mega.mine").warning("beware of %s", "x" * 100)
        print("a library speaks", file=sys.stderr)
        print("for a file")
        console.note("well")
        console.close()
        print("done", file=sys.stderr)
    """
    file = tmp_path / "stdout"

    def run(stream: TextIO) -> None:
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
        with file.open("w") as stdout:
            subprocess.run(command, stderr=stream, stdout=stdout, cwd=REPOSITORY, check=True, timeout=limit(120))

    screen = Screen(on_a_terminal(80, run))
    assert "".join(screen.lines) == f"WARNING grpo_mega.mine: beware of {'x' * 100}a library speakswelldone"
    assert file.read_text() == "for a file\n"


def test_a_fork_that_prints_does_not_wait_for_the_panel() -> None:
    """As one does that writes a checkpoint, whatever the thread that draws has been doing when it was made."""
    program = """
        import os, sys, threading
        from pathlib import Path
        from grpo_mega.show.console.console import Console
        console = Console(80, Path("tiny"), 5)
        held, done = threading.Event(), threading.Event()
        def hold():
            with console._live._lock:
                held.set()
                done.wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            print("from a fork", file=sys.stderr, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        done.set()
        console.close()
    """

    def run(stream: TextIO) -> None:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        subprocess.run(command, stderr=stream, cwd=REPOSITORY, check=True, timeout=limit(120))

    assert "from a fork" in on_a_terminal(80, run)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_does_not_know_utf_8_gets_what_it_knows(encoding: str) -> None:
    def body(stream: TextIO) -> None:
        console = Console(1, Path("täglich"), 1, TABLE, stream)
        console.step(1, METRICS)
        console.sample("x ≤ √2?", "答案是\x1b[31m", "√2", 1.0)
        console.close()

    screen = Screen(on_a_terminal(80, body, encoding=encoding))
    assert any("reward" in line and "|" in line for frame in screen.frames for line in frame)
    assert any("\\u7b54" in line for line in screen.lines)


def test_every_metric_that_is_shown_has_a_name_and_digits_in_the_table() -> None:
    for name in {*ROWS, *ROWS_OF_CALLS, *ROWS_OF_PAIRS, *ROWS_OF_STEPS, *PANEL}:
        shown = column(name)
        assert 0 < len(shown.title) <= 11, f"{name}: its name"
        assert shown.text({name: 0.5}) != ""


def test_off_a_terminal_a_long_phase_says_once_a_minute_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come every second; steps that take less than a minute are lines by themselves."""
    clock = itertools.count(1000.0)
    now = next(clock)
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    console = Console(80, Path("tiny"), 1, columns(), stream)
    for name, seconds in (("evaluate", 150), ("generate", 40), ("update", 19)):
        for _ in range(seconds):
            now = next(clock)
            console.phase(name)
    console.step(7, METRICS)
    for _ in range(61):
        now = next(clock)
        console.phase("generate")
    assert stream.getvalue().splitlines() == [
        "after step 0/80: evaluate for 0:59, 1:00 elapsed",
        "after step 0/80: evaluate for 1:59, 2:00 elapsed",
        "after step 0/80: generate for 0:29, 3:00 elapsed",
        f"step 7/80: {ROW}, 3:29 elapsed, 0:36 left",
        "after step 7/80: generate for 0:59, 4:29 elapsed, 0:36 left",
    ]


def test_columns_follow_from_the_configuration() -> None:
    kl = columns_for(composed("experiment=tiny", "algorithm.kl_coef=0.1"))
    boxed = columns_for(composed("experiment=tiny", "reward=boxed"))
    plain = ["reward", "accuracy", "format", "length", "entropy", "clipped", "grad norm", "seconds"]
    assert [column.title for column in columns()] == plain
    assert [column.title for column in kl] == [title.replace("entropy", "kl") for title in plain]
    assert [column.title for column in boxed] == [title for title in plain if title != "format"]
    called = [column.title for column in columns_for(composed("experiment=tiny_tool"))]
    assert called[called.index("length") + 1 :][:2] == ["calls", "call errors"]


def test_columns_are_there_although_the_first_step_trained_nothing() -> None:
    idle = {name: value for name, value in METRICS.items() if not name.startswith("policy/")}

    def two_steps(stream: TextIO) -> None:
        console = Console(2, Path("tiny"), 1, columns(), stream)
        console.step(1, idle)
        console.step(2, METRICS | {"policy/entropy": 0.14})
        console.close()

    header, first, second, _ = Screen(on_a_terminal(120, two_steps)).lines
    assert header.split() == ["step", *" ".join(column.title for column in columns()).split()]
    assert first.split() == ["1", "0.213", "4.7%", "93.8%", "18.2", "-", "-", "-", "0.50"]
    assert second.split() == ["2", "0.213", "4.7%", "93.8%", "18.2", "0.140", "0.1%", "0.412", "0.50"]
    stream = io.StringIO()
    two_steps(stream)
    assert "entropy -, clipped -, grad norm -, 0.50 s" in stream.getvalue().splitlines()[0]
    assert "entropy 0.140, clipped 0.1%, grad norm 0.412, 0.50 s" in stream.getvalue().splitlines()[1]


def test_no_row_is_lost_or_there_twice_while_frames_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.observe.waiting.FRAMES_PER_SECOND", 1000)

    def long_run(stream: TextIO) -> None:
        console = Console(300, Path("tiny"), 1, columns(), stream)
        for step in range(1, 301):
            console.step(step, METRICS)
        console.close()

    rows = [line.split()[0] for line in Screen(on_a_terminal(120, long_run)).lines if line]
    assert [row for row in rows if row != "step"] == [str(step) for step in range(1, 301)]


def test_the_header_comes_back_on_long_runs() -> None:
    def long_run(stream: TextIO) -> None:
        console = Console(100, Path("tiny"), 1, columns(), stream)
        for step in range(1, 42):
            console.step(step, METRICS)
        console.close()

    lines = Screen(on_a_terminal(120, long_run)).lines
    assert [i for i, line in enumerate(lines) if line.startswith("    step")] == [0, 21, 42]


def test_an_accuracy_that_is_no_share_is_the_score_of_its_term() -> None:
    """From 0 to 10, as a judge says it: no accuracy of 625 %."""
    reward = RewardConfig(terms=[RewardTerm(name="helpful", kind="judge")], success="helpful")
    config = Config(run=RunConfig(), model=ModelConfig(), reward=reward)
    stream = io.StringIO()
    console = Console(3, Path("judged"), 1, columns_for(config), stream)
    console.step(1, {"reward/mean": 6.25, "reward/accuracy": 6.25})
    console.evaluation(1, "validation", {"accuracy": 3.5, "length_mean": 7.0})
    results = {"held_out_accuracy_before": 3.5, "held_out_accuracy_after": 6.25}
    console.finish({"steps": 3, "status": "completed"} | results)
    shown = stream.getvalue()
    assert "helpful 6.25" in shown
    assert "validation: helpful 3.5, length 7" in shown
    assert "held-out helpful 3.5 -> 6.25" in shown
    assert "%" not in shown
    assert "accuracy" not in shown


def test_supervised_steps_are_lines_in_a_file() -> None:
    stream = io.StringIO()
    console = Console(3, Path("cold"), 20, columns(), stream)
    console.stage("sft", 0, 50)
    for step in range(1, 51):
        console.step(step, {"sft/loss": 1 / step, "sft/grad_norm": 0.5, "time/step": 0.1})
    console.stage("pretrain", 0, 50)
    console.step(20, {"base/loss": 1.0})
    said = [line for line in stream.getvalue().splitlines() if " of " in line]
    assert said == [f"step {step}/50 of sft: loss {1 / step:.4f}, grad norm 0.500" for step in (20, 40, 50)]
