"""The page that is served: it follows a run that goes on, and only this machine's browsers with the address see it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from browser import CHROMIUM, WITHOUT, Browser, browser
from forks import REPOSITORY, run_python
from limits import limit
from runs_made import group, lines, made_run

from grpo_mega.show.report import serve
from grpo_mega.show.report.serve import MOST_CONNECTIONS, Server, version_of

TEXTS = [["5"], ["2", "3"]]


@contextmanager
def serving(*paths: Path) -> Iterator[Server]:
    """A server of these runs, which ends with the block."""
    with Server(paths) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has ended after the block, whatever happens there."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def going_on(tmp_path: Path) -> Path:
    """A run that has done 3 steps, and has completions of the first two."""
    run = made_run(tmp_path / "run", 3, {step: group(0, f"{step}+3=?", [1.0, 0.0], TEXTS) for step in (1, 2)})
    (run / "summary.json").unlink()
    return run


def one_more_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines([{"step": step, "reward/mean": 0.5, "time/step": 1.0}]))
    (run / "samples" / f"step-{step:06d}.jsonl").write_text(lines(group(0, f"{step}+3=?", [0.0, 1.0], TEXTS)))


def get(server: Server, path: str, host: str = "") -> tuple[int, bytes]:
    """Status and body of what is at `path`, asked for as `host`."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=limit(60))
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_data_come_when_they_are_new(going_on: Path) -> None:
    with serving(going_on) as server:
        path = server.address.partition(str(server.server_port))[2]
        status, body = get(server, f"{path}data")
        first = json.loads(body)
        assert (status, first["runs"][0]["steps"]) == (200, 3)
        assert get(server, f"{path}data?since={first['version']}") == (204, b"")
        one_more_step(going_on, 4)
        status, body = get(server, f"{path}data?since={first['version']}")
        newer = json.loads(body)
        assert (status, newer["runs"][0]["steps"]) == (200, 4)
        assert newer["version"] == version_of([going_on]) != first["version"]
        assert get(server, path)[1].startswith(b"<!doctype html>")


def test_nobody_else_is_answered(going_on: Path) -> None:
    with serving(going_on) as server:
        path = server.address.partition(str(server.server_port))[2]
        assert get(server, path)[0] == get(server, path, f"localhost:{server.server_port}")[0] == 200
        for wrong in (
            "/",
            "/data",
            f"/x{path[1:]}",
            f"{path[:-2]}/data",
            f"{path}../metrics.jsonl",
            f"{path}metrics.jsonl",
            "//",
        ):
            assert get(server, wrong)[0] == 404
        for host in ("elsewhere.example", f"elsewhere.example:{server.server_port}", "127.0.0.1"):
            assert get(server, path, host)[0] == 403
        assert server.server_address[0] == "127.0.0.1"
        assert len(server.secret) >= 20


def test_a_run_that_was_removed_is_said(going_on: Path) -> None:
    with serving(going_on) as server:
        path = server.address.partition(str(server.server_port))[2]
        going_on.rename(going_on.with_name("elsewhere"))
        status, body = get(server, f"{path}data")
        assert status == 500
        assert b"does not exist" in body


def raw(server: Server, request: bytes) -> bytes:
    """All that the server says to a request before it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=limit(60)) as connection:
        connection.sendall(request.replace(b"HOST", f"127.0.0.1:{server.server_port}".encode()))
        return b"".join(iter(partial(connection.recv, 1 << 16), b""))


BAD_PATHS = [
    "http://[", "http://[::1", "http://HOST:99999999/", "http://HOST[/", "http://\u2100/", "SECRET%zz", "SECRET%",
    "/\0", "SECRET\x1b[31m", "SECRET\xff", "SECRET#x", "*", "x", "/" + "a" * 3000, "SECRETdata?since=%e",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS, ids=range(len(BAD_PATHS)))
def test_a_bad_address_is_a_bad_request(going_on: Path, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(going_on) as server:
        asked = path.replace("SECRET", f"/{server.secret}/").encode("latin-1", "replace")
        answer = raw(server, b"GET " + asked + b" HTTP/1.1\r\nHost: HOST\r\n\r\n")
        assert answer.startswith(b"HTTP/1.0 400 ")
        good = f"GET http://HOST/{server.secret}/data HTTP/1.1\r\nHost: HOST\r\n\r\n"
        assert raw(server, good.encode()).startswith(b"HTTP/1.0 200 ")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"), (b"GET /\r\n\r\n", b"<"), (b"\0\r\n\r\n", b"<"),
        (b"GET / HTTP/9999999999.1\r\n\r\n", b"<"),
        (b"GET / HTTP/1.1\r\nHost: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"), (b"\x16\x03\x01\x02\r\n\r\n", b"<"),
        (b"GET / HTTP/1.1\r\nHost: [\xff\r\n\r\n", b"403"), (b"BREW / HTTP/1.1\r\n\r\n", b"501"), (b"GET / HT", b""),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_request_is_no_error(
    going_on: Path, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SECONDS_TO_ASK", 0.1)
    with serving(going_on) as server, suppress(ConnectionError):  # it may end before all is sent
        answer = raw(server, request_)
        assert status in answer[:20]
    assert capfd.readouterr().err == ""


def test_connections_that_ask_nothing_stop_nobody(going_on: Path) -> None:
    with serving(going_on) as server, ExitStack() as idle:
        before = threading.active_count()
        path = server.address.partition(str(server.server_port))[2]
        for number in range(200):
            one = idle.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            one.sendall(b"GET / HTTP/1.1\r\nHost: "[: number % 20])
        assert get(server, f"{path}data")[0] == 200
        assert len(server._asking) + len(server._answered) <= MOST_CONNECTIONS
        while threading.active_count() - before > MOST_CONNECTIONS:  # those that were ended notice it
            time.sleep(0.01)


@pytest.mark.parametrize("sends", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_connections_that_send_slowly_are_closed(
    going_on: Path, sends: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "SECONDS_TO_ASK", 0.2)
    with serving(going_on) as server:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=0.02) as slow:
            with suppress(ConnectionError):
                slow.sendall(sends)
                ended = time.monotonic() + limit(30)
                while time.monotonic() < ended:  # a byte now and then, as if more were to come
                    slow.sendall(b"a" if sends else b"")
                    with suppress(TimeoutError):
                        if not slow.recv(1):
                            break
            assert time.monotonic() < ended, "it is still open"
        path = server.address.partition(str(server.server_port))[2]
        assert get(server, path)[0] == 200
    assert capfd.readouterr().err == ""


def test_who_goes_before_the_answer_is_no_error(going_on: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(going_on) as server:
        path = server.address.partition(str(server.server_port))[2]
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.server_port)) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                gone.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert get(server, path)[0] == 200
    assert capfd.readouterr().err == ""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_an_open_page_follows_the_run_and_keeps_what_was_chosen(page: Browser, going_on: Path) -> None:
    shown = "document.querySelector('#completions select').selectedOptions[0].text"
    live = "document.getElementById('live').textContent"
    with serving(going_on) as server:
        page.open(server.address)
        page.wait_until(f"{live} === 'live · step 3'")
        assert page.run(shown) == "Step 2"
        page.run("document.querySelector('#curves details').open = true; 1")
        one_more_step(going_on, 4)
        page.wait_until(f"{live} === 'live · step 4'")
        assert page.run(shown) == "Step 4", "the newest step is followed"
        assert page.run("document.querySelector('#curves details').open")
        # Somebody goes back to a step, and has its control in focus: nothing changes until it is left.
        page.run("document.querySelector('[data-walk=\"-1\"]').focus(); document.activeElement.click(); 1")
        assert page.run(shown) == "Step 2"
        one_more_step(going_on, 5)
        page.wait_until(f"{live}.startsWith('step 5 is in')")
        assert page.run("document.querySelectorAll('#completions select')[0].options.length") == 3
        page.run("document.activeElement.blur(); 1")
        page.wait_until(f"{live} === 'live · step 5'")
        assert page.run(shown) == "Step 2", "a step that was chosen stays"
        assert page.run("document.querySelectorAll('#completions select')[0].options.length") == 4
        page.size(1280, 9000)  # every curve comes into sight, and is drawn
        page.settle()
        assert page.run("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('canvas'))")
        assert page.errors == []
        assert all(
            url.startswith(server.address) for url in page.requests if not url.startswith(("data:", "file:", "about:"))
        )
    page.wait_until(f"{live} === 'not live: the server does not answer'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_asked_to_end(going_on: Path, number: signal.Signals) -> None:
    """Also where it was started as scripts start what runs in the background: with SIGINT ignored."""
    command = [sys.executable, REPOSITORY / "tools" / "report.py", going_on, "--serve"]
    ignoring = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    with ended(subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)) as served:
        assert served.stdout is not None
        address = served.stdout.readline().split()[0]
        port, path = address.removeprefix("http://127.0.0.1:").split("/", 1)
        taken = run_python(*map(str, command[1:]), "--port", port)
        assert (taken.returncode, taken.stderr[:6]) == (2, "error:")
        assert "in use" in taken.stderr
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=limit(60))
        connection.request("GET", f"/{path}")
        assert connection.getresponse().status == 200
        served.send_signal(number)
        assert served.wait(limit(60)) == 0
