"""Files and texts of run directories that others wrote: they are bounded, and no text controls a terminal."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.observe.foreign import contents, finite, printable, read_object, tell

CONTROLS = [
    *map(chr, range(32)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
]
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@given(st.text(st.one_of(st.characters(), st.sampled_from(CONTROLS))))
def test_no_text_controls_a_terminal(text: str) -> None:
    assert not {*printable(text)} & ({*CONTROLS} - {*"\n\t"})
    assert printable(text).encode().decode() == printable(text), "it has no lone surrogates"
    assert printable(printable(text)) == printable(text)
    assert printable(text, keep="", ascii_only=True).isascii()


def test_what_is_escaped_is_seen() -> None:
    assert printable("\x1b[31m red\x9b\n\t\u202e\ud800 é") == "\\x1b[31m red\\x9b\n\t\\u202e\\ud800 é"


@pytest.mark.parametrize(
    ("encoding", "written"), [("utf-8", "é \\x1b]0;title\\x07\n"), ("ascii", "\\xe9 \\x1b]0;title\\x07\n")]
)
def test_what_is_told_can_be_written(encoding: str, written: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    tell("é \x1b]0;title\x07", stream)
    stream.seek(0)
    assert stream.read() == written


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 1e308, -1e301, 10**400, [1]])
def test_what_is_no_ordinary_number_is_none(value: object) -> None:
    assert finite(value) is None


def test_pipes_folders_links_and_large_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    for name in ("pipe", "link", "."):
        with pytest.raises(ValueError, match="is not a file"):
            contents(tmp_path / name)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="has more than 16,777,216 bytes"):
        contents(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases"), ("run: &x {name: 3, self: *x}", "aliases"), ("a: !!binary aGk=", "type bytes"),
        ("a: !!set {b}", "type set"), (f"a: 0x{'f' * 5000}", "64 bits"), ("a: " + "9" * 5000, "limit"),
        ("[" * 5000, "cannot be read"), ("- 1", "cannot be read"), ("a: !!python/object:os.system x", "constructor"),
        ("a: x\n" * 300_000, "more than"),
    ],
)  # fmt: skip
def test_yaml_that_no_run_writes_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=why) as error:
        read_object(file)
    assert "\n" not in str(error.value)
