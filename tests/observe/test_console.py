"""The console: lines that stand alone off a terminal, a table and a bar that keeps to its line on one."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.load import compose_config
from grpo_mega.observe.console import PLAIN_WIDTH, TABLE, Console, columns_of

METRICS = {
    "reward/mean": 0.213,
    "reward/accuracy": 0.047,
    "reward/format": 0.938,
    "rollout/length_mean": 18.21,
    "policy/clip_fraction": 0.001,
    "policy/grad_norm": 0.412,
    "time/step": 0.5,
}
COLUMNS = columns_of(compose_config(["experiment=tiny"]))
SUMMARY = {
    "status": "completed",
    "steps": 10,
    "held_out_accuracy_before": 0.052,
    "held_out_accuracy_after": 0.87,
    "format_rate_before": None,
    "format_rate_after": None,
}


def whole_run(stream: TextIO, steps: int = 10) -> None:
    console = Console(steps, "tiny", 5, COLUMNS, stream)
    console.start(["layout: dp 2 on 2 processes"])
    for step in range(1, steps + 1):
        console.step(step, METRICS)
        if console.shows_samples(step):
            console.sample("3+5=?", "<think>\n\x1b[31m\x07</think><answer>8</answer>", "8", 1.2)
    console.evaluation(steps, "validation", {"eval/accuracy": 0.5, "eval/length_mean": 20.25})
    console.finish(SUMMARY, Path("runs/tiny"))


def on_a_terminal(columns: int, body: Callable[[TextIO], None]) -> str:
    """Everything `body` writes to a terminal of that many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with ThreadPoolExecutor(1) as reader:
        output = reader.submit(read_to_the_end, master)
        with os.fdopen(slave, "w", encoding="utf-8") as stream:
            body(stream)
        return output.result().decode()


def read_to_the_end(master: int) -> bytes:
    """All bytes until the other side of the terminal is closed, which reads as an input/output error."""
    parts = []
    with os.fdopen(master, "rb", buffering=0) as terminal, suppress(OSError):
        while part := terminal.read(65536):
            parts.append(part)
    return b"".join(parts)


def screen(output: str) -> list[str]:
    """The lines a terminal shows in the end."""
    return [line.rpartition("\x1b[K")[2] for line in output.replace("\r\n", "\n").split("\n")]


ROW = "reward 0.213, accuracy 4.7%, format 93.8%, length 18.2, entropy -, clipped 0.1%, grad norm 0.412, 0.50 s"


def test_off_a_terminal_every_line_stands_alone() -> None:
    stream = io.StringIO()
    whole_run(stream)
    assert stream.getvalue() == (
        "grpo_mega  tiny\n"
        "  layout: dp 2 on 2 processes\n"
        "\n"
        f"step 1/10: {ROW}, 0:00 elapsed, 0:04 left\n"
        f"step 5/10: {ROW}, 0:00 elapsed, 0:02 left\n"
        f"step 10/10: {ROW}, 0:00 elapsed, 0:00 left\n"
        "  | 3+5=? -> <think>\\n\\x1b[31m\\x07</think><answer>8</answer>  [answer 8, reward 1.20]\n"
        "      10  validation: accuracy 50.0%, length 20.25\n"
        "tiny completed: 10 steps, held-out accuracy 5.2% -> 87.0%. Everything is in runs/tiny\n"
    )


@settings(max_examples=60)
@given(
    texts=st.tuples(*[st.text(max_size=400)] * 3),
    value=st.floats() | st.none(),
    step=st.integers(1, 10**7),
)
def test_off_a_terminal_lines_are_printable_and_keep_the_width(
    texts: tuple[str, str, str], value: float | None, step: int
) -> None:
    stream = io.StringIO()
    console = Console(step, "tiny", 1, TABLE, stream)
    console.sample(*texts, reward=1.0)
    console.note(" ".join(texts[0][i : i + 10] for i in range(0, len(texts[0]), 10)))
    output = stream.getvalue()
    assert all(char.isprintable() for char in output.replace("\n", ""))
    assert max(map(len, output.split("\n"))) <= PLAIN_WIDTH
    console.step(step, dict.fromkeys([*METRICS, "policy/kl"], value))
    assert stream.getvalue().removeprefix(output).count("\n") == 1


def written_to_a_pipe(body: Callable[[TextIO], None], encoding: str) -> bytes:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    body(stream)
    stream.flush()
    return raw.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_on_a_pipe_text_is_utf_8_and_cannot_steer_a_terminal(encoding: str) -> None:
    def answer(stream: TextIO) -> None:
        Console(1, "tiny", 1, stream=stream).sample("x ≤ √2?", "答案是\x1b[31m\u202e\ud800\x9b 红", "√2", 1.0)

        print("ValueError: \ud800", file=stream)  # a traceback

    written, said = written_to_a_pipe(answer, encoding).decode("utf-8").splitlines(keepends=True)
    assert said == "ValueError: \\ud800\n"
    assert written == "  | x ≤ √2? -> 答案是\\x1b[31m\\u202e\\ud800\\x9b 红  [answer √2, reward 1.00]\n"


def test_a_long_path_is_not_cut() -> None:
    stream = io.StringIO()
    path = Path("/scratch/" + "x" * 200)
    Console(1, "tiny", 1, stream=stream).finish(SUMMARY, path)
    assert str(path) in stream.getvalue()


@pytest.mark.parametrize("columns", [20, 45, 79, 80, 200])
def test_on_a_terminal_the_bar_never_wraps_and_is_gone_at_the_end(columns: int) -> None:
    output = on_a_terminal(columns, whole_run)
    drawn = re.split(r"[\r\n]|\x1b\[K", output)
    assert "\x1b" not in "".join(drawn)
    assert max(map(len, drawn)) < columns
    lines = screen(output)
    assert lines[-1] == ""
    assert not [line for line in lines if "━" in line or "─" in line]
    assert any("━" in text and "10/10" in text for text in drawn) or columns < 40


def test_on_a_terminal_the_bar_shows_time_left() -> None:
    output = on_a_terminal(120, lambda stream: Console(7210, "tiny", 5, stream=stream).step(10, METRICS))
    assert output.endswith("10/7210  1:00:00 left  reward 0.213  accuracy 4.7%  format 93.8%  length 18.2  0.50 s/step")


@pytest.mark.parametrize("columns", [20, 45, 120])
def test_on_a_terminal_the_bar_names_the_phase_that_runs(columns: int) -> None:
    """Before the first step too, and no more often than its time changes."""

    def body(stream: TextIO) -> None:
        console = Console(80, "tiny", 5, stream=stream)
        for _ in range(1000):
            console.phase("evaluate")
        console.step(1, METRICS)
        console.phase("generate")
        console.close()

    drawn = re.split(r"[\r\n]|\x1b\[K", on_a_terminal(columns, body))
    assert max(map(len, drawn)) < columns
    first = [text for text in drawn if "evaluate" in text and "1/80" not in text]
    assert 1 <= len(first) < 100
    assert first[0] == "tiny  evaluate 0:00"
    assert any("1/80  generate 0:00" in text for text in drawn) or columns < 80
    assert drawn[-1] == ""


def test_off_a_terminal_a_long_phase_says_once_a_minute_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come every second; steps that take less than a minute are lines by themselves."""
    clock = itertools.count(1000.0)
    now = next(clock)
    monkeypatch.setattr("grpo_mega.observe.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    console = Console(80, "tiny", 1, COLUMNS, stream)
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
        "after step 7/80: generate for 0:59, 4:29 elapsed",
    ]


def test_columns_follow_from_the_configuration() -> None:
    kl = columns_of(compose_config(["experiment=tiny", "algorithm.kl_coef=0.1"]))
    boxed = columns_of(compose_config(["experiment=tiny", "reward=boxed"]))
    plain = ["reward", "accuracy", "format", "length", "entropy", "clipped", "grad norm", "seconds"]
    assert [column.title for column in COLUMNS] == plain
    assert [column.title for column in kl] == [title.replace("entropy", "kl") for title in plain]
    assert [column.title for column in boxed] == [title for title in plain if title != "format"]


def test_columns_are_there_although_the_first_step_trained_nothing() -> None:
    idle = {name: value for name, value in METRICS.items() if not name.startswith("policy/")}

    def two_steps(stream: TextIO) -> None:
        console = Console(2, "tiny", 1, COLUMNS, stream)
        console.step(1, idle)
        console.step(2, METRICS | {"policy/entropy": 0.14})
        console.close()

    header, first, second, _ = screen(on_a_terminal(120, two_steps))
    assert header.split() == ["step", *" ".join(column.title for column in COLUMNS).split()]
    assert first.split() == ["1", "0.213", "4.7%", "93.8%", "18.2", "-", "-", "-", "0.50"]
    assert second.split() == ["2", "0.213", "4.7%", "93.8%", "18.2", "0.140", "0.1%", "0.412", "0.50"]
    stream = io.StringIO()
    two_steps(stream)
    assert "entropy -, clipped -, grad norm -, 0.50 s" in stream.getvalue().splitlines()[0]
    assert "entropy 0.140, clipped 0.1%, grad norm 0.412, 0.50 s" in stream.getvalue().splitlines()[1]


def test_the_header_comes_back_on_long_runs() -> None:
    def long_run(stream: TextIO) -> None:
        console = Console(100, "tiny", 1, COLUMNS, stream)
        for step in range(1, 42):
            console.step(step, METRICS)
        console.close()

    lines = screen(on_a_terminal(120, long_run))
    assert [i for i, line in enumerate(lines) if line.startswith("    step")] == [0, 21, 42]
