"""Process that hosts an SGLang engine; `process.py` starts it, and explains why the engine has its own process.

    python -m grpo_mega.rollout.sglang.host FILE_DESCRIPTOR

Reads requests (request's number, method, arguments) from the connection and answers each except "abort", with
("answer", request's number, value) or ("error", request's number, text). While it generates, it sends ("sample", ...)
for every finished sample and ("alive",) when there are new tokens, and it reads only "abort" and further "generate"
requests. The first request contains the server arguments. Nothing of the trainer is imported here.

Releases of SGLang from 0.5.6 on are supported; docs/STATUS.md lists the tested ones. From 0.5.21 on weights are pushed
between `begin_weight_update` and `end_weight_update`; older releases have no such methods.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from grpo_mega.rollout.sglang.payload import Described, bucket, metadata
from grpo_mega.rollout.sglang.release import EngineRefused, supported

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between the engine's checks that the trainer and its own parts are alive; how long it may outlive them."""
SECONDS_BETWEEN_POLLS = 0.1
"""Seconds between a generating engine's checks for messages."""
SECONDS_BETWEEN_SIGNS = 0.5
"""Shortest interval, in seconds, between reports of new tokens to the trainer."""


class Outbox:
    """Sends messages in a thread, so that the engine continues while the trainer does not read or is itself sending.

    A full pipe blocks its writer: without the thread, trainer and engine could wait for each other to read.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, *message: Any) -> None:
        """Queues a message; messages are sent in order."""
        self._messages.put(message)

    def _send_all(self) -> None:
        try:
            while True:
                self._connection.send(self._messages.get())
        finally:
            # Sending fails when the trainer has closed its end, or has ended.
            os.killpg(0, signal.SIGKILL)


class Host:
    """An SGLang engine; requests name its public methods."""

    def __init__(self, connection: Connection, outbox: Outbox, arguments: dict[str, Any]) -> None:
        # These imports take long, and stand here so that the thread that watches the trainer is started before them.
        import torch
        from sglang.srt.entrypoints.engine import Engine

        arguments = supported(arguments)
        if arguments.get("nnodes", 1) > 1:
            # By default CPU tensors travel as file descriptors, which only related processes can pass on.
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._connection, self._outbox = connection, outbox
        self._engine = Engine(**arguments)
        # SGLang names its processes like this. Other children, such as Python's resource tracker, compute nothing.
        parts = [child for child in _children() if child.name().startswith("sglang::")]
        threading.Thread(target=_end_without, args=(parts,), daemon=True).start()
        self._aborting = self._updating = False
        self._submissions: set[asyncio.Future[None]] = set()

    def facts(self) -> dict[str, Any]:
        """{"version": SGLang's version, "pids": ids of the processes that hold memory}."""
        return {"version": version("sglang"), "pids": [os.getpid(), *(child.pid for child in _children())]}

    def generate(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        """Generates; sends ("sample", number, *fields of `SGLangCompletion`) as each ends, then answers.

        Ids and log-probs are arrays of C ints and floats: neither the pipe nor the trainer then handles tokens one by
        one. Further "generate" requests that arrive meanwhile are served too, until an "abort" arrives.
        """
        self._engine.loop.run_until_complete(self._generate(request, samples))

    def score(self, token_ids: list[int], copies: int) -> list[list[float]]:
        """Log-prob of every token but the first, by each rank of data parallel attention."""
        # Each rank is asked, because each has its own copy of the attention weights, and one alone may be wrong.
        results = [
            self._engine.generate(
                input_ids=token_ids,
                sampling_params={"max_new_tokens": 1, "temperature": 1.0},
                return_logprob=True,
                logprob_start_len=0,
                **({"routed_dp_rank": copy} if copies > 1 else {}),
            )
            for copy in range(copies)
        ]
        return [[logprob for logprob, *_ in one["meta_info"]["input_token_logprobs"][1:]] for one in results]

    def begin_update(self) -> None:
        """Opens an update session if this release has them; one that was abandoned half-way is closed first."""
        if self._updating:
            self.end_update()
        self._updating = True
        if hasattr(self._engine, "begin_weight_update"):
            _succeeded(self._engine.begin_weight_update())

    def push(self, parts: list[tuple[Any, Described]]) -> None:
        """Replaces weights by those of a bucket.

        Args:
            parts: For each rank of the engine, its bytes (or torch's `reduce_tensor` of a [bytes] tensor), and the
                names, shapes and dtypes of the tensors in them.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [
            MultiprocessingSerializer.serialize({"flattened_tensor": bucket(part), "metadata": metadata(described)})
            for part, described in parts
        ]
        # The KV cache of the old weights is emptied once, by `end_update`, not with every bucket.
        _succeeded(self._engine.update_weights_from_tensor(payloads, "flattened_bucket", flush_cache=False))

    def join(self, address: str, port: int, group: str, first: int, ranks: int, backend: str) -> None:
        """Makes the engine's ranks join a process group of `ranks` ranks, as the ranks from `first` on."""
        _succeeded(self._engine.init_weights_update_group(address, port, first, ranks, group, backend))

    def receive(self, group: str, tensors: list[Described]) -> None:
        """Replaces weights by tensors that each rank of the engine receives through a process group."""
        self._fetch({"group": group, "tensors": tensors})

    def load(self, folder: str, experts: list[list[int] | None]) -> None:
        """Replaces all weights by those of a model directory; each rank reads its experts, or all for None."""
        from grpo_mega.rollout.sglang.loader import missing

        if files := missing(Path(folder)):
            raise EngineRefused(
                f"{folder} is incomplete where the engine runs, it lacks {files[0]}; do all nodes see it?"
            )
        if any(experts):
            self.begin_update()
            self._fetch({"folder": folder, "experts": experts})
            self.end_update()
        # SGLang's own loader gives every rank all experts. Where that is wanted it is preferred, as it also converts
        # weights to the layouts of kernels, which releases before 0.5.21 do not do for pushed weights.
        else:
            _succeeded(self._engine.update_weights_from_disk(folder, "auto"))
            self.flush()

    def end_update(self) -> None:
        """Closes the update session; KV caches made with the old weights are emptied."""
        self._updating = False
        if hasattr(self._engine, "end_weight_update"):
            _succeeded(self._engine.end_weight_update())
        self.flush()

    def flush(self) -> None:
        """Empties all KV caches once the engine is idle; SGLang refuses to do so before."""
        # No time limit is needed here: the trainer kills an engine that does not answer within `answer_seconds`.
        while not all(self._engine.loop.run_until_complete(self._flush())):
            time.sleep(0.05)

    def release(self, tags: list[str]) -> None:
        """Releases memory. SGLang ends itself, and this process, when asked while it is busy."""
        self.flush()
        _succeeded(self._engine.release_memory_occupation(tags=tags))

    def resume(self, tags: list[str]) -> None:
        """Resumes released memory."""
        _succeeded(self._engine.resume_memory_occupation(tags=tags))

    def _fetch(self, source: dict[str, Any]) -> None:
        """Makes the engine's ranks load weights themselves; `source` is in the format of `loader.load`."""
        import torch

        from grpo_mega.rollout.sglang.loader import NAME

        # A custom loader gets named tensors and nothing else, so the source travels as the name of an empty tensor.
        message = [(json.dumps(source), torch.empty(0))]
        _succeeded(self._engine.update_weights_from_tensor(message, NAME, flush_cache=False))

    async def _flush(self) -> list[bool]:
        """Whether each KV cache was emptied; `flush_cache` reports only one, even with data parallel attention."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        manager = self._engine.tokenizer_manager
        # Starts the task that receives SGLang's answers, unless an earlier request has started it.
        manager.auto_create_handle_loop()
        return [cache.success for cache in await manager.flush_cache_communicator(FlushCacheReqInput())]

    async def _generate(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        self._aborting = False
        self._submit(request, samples)
        background = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._give_signs())]
        try:
            while self._submissions:
                done, _ = await asyncio.wait([*self._submissions, *background], return_when=asyncio.FIRST_COMPLETED)
                # A background task ends only when it fails, and its error must not be lost.
                for task in done:
                    task.result()
                self._submissions -= done
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            # Submissions are left only if a background task failed. They must end here, because the event loop does not
            # run between two requests, and SGLang would keep computing for nobody.
            await self._abort_until([*self._submissions])
            self._submissions.clear()

    def _submit(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        self._submissions.add(asyncio.ensure_future(self._answer(request, samples)))

    async def _answer(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        """Generates samples; when one fails, the others are aborted."""
        tasks = [asyncio.ensure_future(self._complete(number, sample)) for number, sample in samples.items()]
        try:
            await asyncio.gather(*tasks)
            self._outbox.send("answer", request, None)
        except Exception as error:
            await self._abort_until(tasks)
            self._outbox.send("error", request, _reason("generate", error))

    async def _complete(self, number: int, sample: dict[str, Any]) -> None:
        result = await self._engine.async_generate(**sample, return_logprob=True)
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        # Without an abort from the trainer, this is how SGLang reports a request that it refuses or gives up.
        if reason["type"] == "abort" and not self._aborting:
            raise EngineRefused(f"a sample was not generated: {reason.get('message', reason)}")
        # Tokens and log-probs may be missing from an aborted request.
        token_ids = array("i", result.get("output_ids", []))
        logprobs = array("f", [logprob for logprob, *_ in meta.get("output_token_logprobs") or ()])
        experts = _experts(meta.get("routed_experts"))
        cached = meta.get("cached_tokens") or 0
        self._outbox.send("sample", number, token_ids, logprobs, reason["type"], experts, cached)

    async def _give_signs(self) -> None:
        """Sends ("alive",) whenever SGLang's scheduler has sent tokens, at most every `SECONDS_BETWEEN_SIGNS`.

        The scheduler sends the tokens of a request 50 at a time.
        """
        last = None
        while True:
            if (now := self._engine.tokenizer_manager.last_receive_tstamp) != last:
                self._outbox.send("alive")
                last = now
            await asyncio.sleep(SECONDS_BETWEEN_SIGNS)

    async def _listen(self) -> None:
        """Accepts further "generate" requests; at an "abort" ends all requests, and accepts no more."""
        while True:
            # Not loop.add_reader: uvloop would make reading from the connection fail when it is empty.
            while not self._connection.poll():
                await asyncio.sleep(SECONDS_BETWEEN_POLLS)
            request, method, arguments = self._connection.recv()
            if method == "abort":
                # This future never completes: requests are aborted until `_generate`, when none is left, cancels this
                # task. Requests that arrive meanwhile stay in the pipe and start the next generation.
                await self._abort_until([asyncio.get_running_loop().create_future()])
            self._submit(request, arguments["samples"])

    async def _abort_until(self, waiting: Sequence[asyncio.Future]) -> None:
        """Aborts requests repeatedly until `waiting` have ended.

        SGLang aborts only requests that its scheduler knows; those still on their way need another call.
        """
        while not all(future.done() for future in waiting):
            self._aborting = True
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            await asyncio.sleep(SECONDS_BETWEEN_POLLS)


def _experts(returned: Any) -> Any:
    """Experts of each token as SGLang returns them, [tokens * layers * top k]; None if not requested.

    They are encoded in base64; before 0.5.10 they are a tensor.
    """
    import numpy

    if isinstance(returned, str):
        return numpy.frombuffer(base64.b64decode(returned), dtype=numpy.int32)
    return None if returned is None else returned.flatten().numpy()


def _succeeded(result: Any) -> None:
    """Raises `EngineRefused` when SGLang's return value, (success, message, ...) or None, reports a failure."""
    success, message, *_ = result if isinstance(result, tuple) else (result is None, str(result))
    if not success:
        raise EngineRefused(message)


def _children() -> list[Any]:
    import psutil

    return psutil.Process().children(recursive=True)


def _end_with(parent: int) -> None:
    """Kills the whole process group when the process `parent`, the trainer, has ended in any way."""
    # The pipe cannot tell in time: nothing reads it while SGLang starts or answers a request. A process whose parent
    # has ended gets a different one.
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


def _end_without(parts: list[Any]) -> None:
    """Kills the whole process group when a part of the engine has ended, which not every release of SGLang notices."""
    import psutil

    # A part that has ended is a zombie until SGLang reaps it, and unknown (NoSuchProcess) after that.
    with suppress(psutil.NoSuchProcess):
        while all(part.status() != psutil.STATUS_ZOMBIE for part in parts):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


def serve(connection: Connection) -> None:
    """Answers requests until the connection is closed."""
    host: Host | None = None
    outbox = Outbox(connection)
    while True:
        request, method, arguments = connection.recv()
        try:
            if host is None:
                host = Host(connection, outbox, arguments)
                outbox.send("answer", request, host.facts())
            elif method == "generate":
                host.generate(request, **arguments)
            # An abort that arrives here came too late, as the generation had just ended; it must not abort the next.
            elif method != "abort":
                outbox.send("answer", request, getattr(host, method)(**arguments))
        # SystemExit would otherwise end the process, and the trainer would learn the cause only from the log.
        except (Exception, SystemExit) as error:
            outbox.send("error", request, _reason(method, error))


def _reason(method: str, error: BaseException) -> str:
    """Message of an error, with the method that failed."""
    return f"{method}: {error}" if isinstance(error, EngineRefused) else f"{method}: {type(error).__name__}: {error}"


def main() -> None:
    """Entry point of the engine's process."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        serve(Connection(int(sys.argv[1])))
    # The trainer closed the connection, or has ended. The whole group is killed, as SGLang's processes hold the memory.
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
