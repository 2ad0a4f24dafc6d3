"""Python as a tool: cells share their variables, only the last one is shown, and nothing gets out of the box."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import without_waiting
from attacks import BEGIN, ENDED, HARMLESS, INSIDE
from test_attacks import World
from test_conversation import HostileTokenizer, say

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.environment.conversation import Conversation
from grpo_mega.environment.episode import _kept
from grpo_mega.environment.python import NoBox
from grpo_mega.judges.sandbox.pool import best_mechanism
from grpo_mega.types import Score

ROW = {"answer": "answer-of-the-problem"}
MECHANISM, _ = best_mechanism()
pytestmark = pytest.mark.skipif(MECHANISM is None, reason="no sandbox works here")
in_bubblewrap = pytest.mark.skipif(MECHANISM != "bubblewrap", reason="bubblewrap does not work here")


class Sample:
    """Calls of one sample, each answered by an object that was lost or kept."""

    def __init__(self, key: str = "sample", path: str = "grpo_mega.environment.python:Python") -> None:
        self.key, self.path, self.calls = key, path, list[str]()

    def says(self, call: str, lost: bool = False, longest: int = 8000) -> str:
        if lost:
            _kept.clear()
        self.calls.append(call)
        reply = without_waiting.reply(ROW, self.key, "seed", self.calls, self.path, longest)
        assert reply["error"] == reply["text"].startswith("error: ")
        return str(reply["text"])


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    _kept.clear()


CELLS = {
    "import atexit, os, random\nx = 3\nprint('first')\nos.write(1, b'second\\n')\nx": "second\nfirst\n3",
    "x += 1; print(x)": "4",
    "drawn = random.random()\nprint('again')": "again",
    "print('before')\nx += 1; raise ValueError(x)": "error: ",
    "y = x +": "error: ",
    "drawn == random.Random(0).random(), x": "(True, 5)",
    "_ = atexit.register(print, 'at the end')": "",
    "if os.fork() == 0: x = 99": "",
    json.dumps({"name": "python", "arguments": {"code": "from dataclasses import dataclass\nprint(x)"}}): "5",
    "@dataclass\nclass A:\n    y: int = 1\nA()": "A(y=1)",
    "exit()": "",
    "A().y": "1",
}


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_cells_share_their_variables_and_only_the_last_is_shown(lost: bool) -> None:
    sample = Sample()
    for cell, expected in CELLS.items():
        reply = sample.says(cell, lost)
        assert reply.startswith(expected) if expected == "error: " else reply == expected


@pytest.mark.parametrize(
    ("cell", "forgotten", "words"),
    [
        ("print(5)\n1/0", False, ['File "<cell 2>", line 2', "ZeroDivisionError: division by zero", "printed:\n5"]),
        ("def f(:", False, ["<cell 2>", "SyntaxError: invalid syntax"]),
        ("x = '\ud800'", False, ["UnicodeEncodeError"]),
        ("x = '\0'", False, ["null bytes"]),
        ("[" * 10**5, False, ["error: "]),
        ("input()", False, ["EOFError"]),
        ("bytearray(3 << 30)", False, ["MemoryError"]),
        # A gigabyte takes too much memory, and on a slow machine too much time before that.
        ("raise ValueError('x' * 10**9)", True, ["The cell is forgotten"]),
        ("import os; os._exit(3)", True, ["ended Python with code 3"]),
        ("import os; os.kill(os.getpid(), 9)", True, ["ended Python with code -9"]),
        ("while True: pass", True, ["used more than 1 s of CPU time"]),
        ("import time; time.sleep(600)", True, ["did not end within 1 s"]),
        ("for _ in range(1000): print('y' * 10**6)", True, ["wrote more than 1,048,576 bytes", "printed:\nyyy"]),
        ('{"name": "shell", "arguments": {}}', True, ["no tool 'shell'; the tools are python"]),
        ('{"name": "python", "arguments": {"text": "1"}}', True, ["python: missing a required argument: 'code'"]),
    ],
)
def test_what_a_cell_does_wrong_is_a_reply(cell: str, forgotten: bool, words: list[str]) -> None:
    """Whatever ends its box leaves no trace: the next cell runs after those before it, and has their number."""
    sample = Sample(path=f"python_boxes:{'Waiting' if 'sleep' in cell else 'Computing'}")
    sample.says("x = 1")
    reply = sample.says(cell)
    assert reply.startswith("error: ")
    assert len(reply) <= 8000
    for part in words:
        assert part in reply
    assert f"<cell {2 if forgotten else 3}>" in sample.says("x.no_such_name")
    assert sample.says("x") == "1"


@in_bubblewrap
def test_files_live_as_long_as_their_sample() -> None:
    one, other = Sample("one"), Sample("other")
    assert one.says("_ = open('/tmp/kept', 'w').write('of one')") == ""
    assert "FileNotFoundError" in other.says("open('/tmp/kept').read()")
    assert one.says("open('/tmp/kept').read()") == "'of one'"


@in_bubblewrap
@pytest.mark.parametrize("file", ["self/environ", "self/maps", "1/cmdline", "1/mem", "{test}/environ"])
def test_the_answer_cannot_be_read_from_proc(file: str) -> None:
    path = "/proc/" + file.format(test=os.getpid())
    reply = Sample().says(f"open('{path}', 'rb').read()")
    assert "FileNotFoundError" in reply
    assert ROW["answer"] not in reply


def test_the_answer_is_in_no_object_of_a_cell() -> None:
    cell = "import gc, sys\nstr([gc.get_objects(), sys.argv]).count('-'.join(['answer', 'of', 'the', 'problem']))"
    assert Sample().says(cell) == "0"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(os.geteuid(), stack)


ENDLESS = {**ENDED, "ignoring signals": ["exited"]}
SLOW = [pytest.param(name, marks=pytest.mark.long) for name in ENDLESS]
# A cell has the descriptors of its result and of its shown output.
NAMES = [name for name in {**HARMLESS, **INSIDE} if name not in (*ENDLESS, "other descriptors")]


@in_bubblewrap
@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_attacks_on_the_sandbox_fail_in_cells_too(world: World, name: str) -> None:
    """Against what, and that they succeed without a sandbox, tests/judges/sandbox shows."""
    limits = "Patient" if name not in ENDLESS else "Waiting" if "time" in ENDLESS[name] else "Computing"
    limits = "Computing" if name == "a loop" else limits
    sample = Sample(path=f"python_boxes:{limits}")
    begin = BEGIN.replace("json.loads(sys.stdin.readline())", repr(world.facts))
    try:
        assert "ESCAPED" not in sample.says(begin + {**HARMLESS, **INSIDE}[name], longest=1 << 22)
    # Of those that compute until the clock ends them, on a busy machine.
    except NoBox:
        assert "infrastructure" in ENDLESS[name]
    world.unharmed()
    assert Sample("after").says("42") == "42"


@in_bubblewrap
def test_a_machine_without_a_box_leaves_a_sample_without_a_score() -> None:
    config = EnvironmentConfig(path="python_boxes:Lost", open="", close="=", at_once=1)
    with closing(Conversation(config, HostileTokenizer(), 200, 0)) as conversation:
        (sample,) = conversation.go_on([say("x")], 200)
        (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [sample])
    assert sample.finish_reason == "abort"
    assert "the sandbox could not run a cell: bubblewrap: bwrap is not installed" in score.unscorable
