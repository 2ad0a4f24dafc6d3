"""Boxes keep nothing of a program: the next one, which inherits a box's memory, searches it for what others had."""

from __future__ import annotations

import secrets
import subprocess
import sys

import pytest

from grpo_mega.judges.sandbox import BoxCall, Limits, Sandbox

THIEF = """
import ctypes, os, re
C = ctypes.CDLL(None)
C.sbrk.restype = ctypes.c_void_p
C.write.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
PAGE, AT_ONCE, reader, writer = 4096, 65536, *os.pipe()
def pieces(low, high):    # of memory that is there: the kernel writes no other, and stops before it
    address, piece = low, b""
    while address < high:
        size = C.write(writer, address, AT_ONCE)
        if size <= 0:
            if piece: yield piece
            address, piece = address + PAGE, b""
            continue
        piece += os.read(reader, size)
        address += size
        if len(piece) > 1 << 23:
            yield piece
            piece = piece[-64:]
    if piece: yield piece
here = [0] * 1000
big = bytearray(1 << 20)
own = ["ow" + "n-TOKEN" + str(here[0]), ("ow" + "n-TOKEN") * 20000, ("ow" + "n-TOKEN") * 200]
ends = [C.sbrk(0), id(here), id(big), ctypes.addressof(ctypes.c_char.from_buffer(big))]
ends.append(ctypes.cast(C.write, ctypes.c_void_p).value)
ranges = []
for low, high in sorted((max(0, end - (160 << 20)) & -PAGE, (end + (160 << 20)) & -PAGE) for end in ends):
    if ranges and low <= ranges[-1][1]: ranges[-1][1] = max(high, ranges[-1][1])
    else: ranges.append([low, high])
counts = [0, 0]
patterns = [re.compile(text) for text in (b"[o]wn-TOKEN", b"[s]tolen-TOKEN")]
for low, high in ranges:
    for piece in pieces(low, high):
        for number, pattern in enumerate(patterns): counts[number] += len(pattern.findall(piece))
print(*counts)
"""
"""Prints how often it sees a text that it has made itself, and how often one of another program."""


@pytest.mark.parametrize("copies", [1, pytest.param(200, marks=pytest.mark.long), 20_000])
def test_a_program_sees_nothing_of_the_one_before_it(sandbox: Sandbox, copies: int) -> None:
    token = secrets.token_hex(8)
    limits = Limits(cpu_seconds=60, wall_seconds=600)
    secret = f"stolen-{token}"
    source = (
        f"# {secret * copies}\ndef f(given):\n    print(open('{secret}').read() == input() == given)\n    return given"
    )
    first = sandbox.python(
        source,
        files={secret: (secret * copies).encode()} | {f"{secret}-{number}": b"" for number in range(100)},
        stdin=(secret * copies).encode(),
        call=BoxCall("f", [secret * copies]),
        limits=limits,
    )
    assert first.stdout == b"True\n", first
    outcome = sandbox.python(THIEF.replace("TOKEN", token), limits=limits)
    own, stolen = map(int, outcome.stdout.split())
    assert own > 20_000, "the search does not see what is there"
    assert stolen == 0


def test_a_thief_sees_what_is_in_memory() -> None:
    """In one process the search sees texts of every size: otherwise the test above would show nothing."""
    texts = "texts = [('sto' + 'len-TOKEN') * copies for copies in (1, 200, 20_000)]\n"
    done = subprocess.run([sys.executable, "-c", texts + THIEF], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1]) >= 20_201
