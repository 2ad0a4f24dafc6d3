"""The process that an SGLang engine lives in; `process.py` starts it, and says why it is one of its own.

    python -m grpo_mega.rollout.sglang.host FILE_DESCRIPTOR

Reads requests (request's number, method, arguments) from the connection and answers each but "abort", with ("answer",
request's number, value) or ("error", request's number, text). While it generates, ("sample", ...) comes for every
finished sample and ("alive",) when there are new tokens, and it hears only "abort" and further "generate". The first
request holds the server arguments. Nothing of the trainer is imported here.

Releases of SGLang from 0.5.6 on are served; docs/STATUS.md says which were tried. From 0.5.21 on weights are pushed
between `begin_weight_update` and `end_weight_update`, before that there are no such methods.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

SECONDS_BETWEEN_LOOKS = 1.0
"""How long after the death of the trainer, or of a part of its own, the engine may live."""
SECONDS_BETWEEN_POLLS = 0.1
"""How long what is said to a generating engine may wait to be heard."""
SECONDS_BETWEEN_SIGNS = 0.5
"""How often the trainer hears of new tokens, at most."""

NOT_ALWAYS = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")
"""Server arguments of the trainer's own that turn off what other releases do not have, or call otherwise."""
OLDEST = "0.5.6"
"""The first release that takes weights as bytes."""
NEEDED = {
    "enable_return_routed_experts": ("return_routed_experts", "0.5.9"),
    "enable_dp_attention": ("routed_dp_rank", "0.5.10"),
}
"""Server arguments for which requests need a parameter, and the first release that has it."""
Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of tensors, in the order of their bytes."""


class Refused(Exception):
    """What was asked cannot be done; the engine is as it was."""


class Outbox:
    """Sends messages in a thread: the engine works on while the trainer does not listen, or is itself sending."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, *message: Any) -> None:
        """Sends a message after those before it."""
        self._messages.put(message)

    def _send_all(self) -> None:
        try:
            while True:
                self._connection.send(self._messages.get())
        finally:  # the trainer is gone
            os.killpg(0, signal.SIGKILL)


class Host:
    """An engine, and what it can be asked for: the public methods are what requests name."""

    def __init__(self, connection: Connection, outbox: Outbox, arguments: dict[str, Any]) -> None:
        import torch
        from sglang.srt.entrypoints.engine import Engine  # slow, and after the watch over the parent has begun

        arguments = {name: value for name, value in arguments.items() if name not in NOT_ALWAYS or _known(name)}
        _check_release(arguments)
        _check(arguments)
        if arguments.get("nnodes", 1) > 1:
            # Tensors on a CPU travel as file descriptors else, which only relatives can hand on to each other.
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._connection, self._outbox = connection, outbox
        self._engine = Engine(**arguments)
        parts = [child for child in _children() if child.name().startswith("sglang::")]
        threading.Thread(target=_end_without, args=(parts,), daemon=True).start()
        self._aborting = self._updating = False
        self._submissions: set[asyncio.Future[None]] = set()

    def facts(self) -> dict[str, Any]:
        """The release of SGLang, and the processes that hold memory."""
        return {"version": version("sglang"), "pids": [os.getpid(), *(child.pid for child in _children())]}

    def generate(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        """Sends ("sample", its number, token ids, log-probs, reason, experts) as each ends, then answers the request.

        What is heard meanwhile is part of it: further requests to generate, until one says "abort".
        """
        self._engine.loop.run_until_complete(self._generate(request, samples))

    def score(self, token_ids: list[int], copies: int) -> list[list[float]]:
        """Log-prob of every token but the first, by each rank of data parallel attention."""
        found = [
            self._engine.generate(
                input_ids=token_ids,
                sampling_params={"max_new_tokens": 1, "temperature": 1.0},
                return_logprob=True,
                logprob_start_len=0,
                **({"routed_dp_rank": copy} if copies > 1 else {}),
            )
            for copy in range(copies)
        ]
        return [[logprob for logprob, *_ in one["meta_info"]["input_token_logprobs"][1:]] for one in found]

    def begin_update(self) -> None:
        """Opens a session where this release of SGLang has them; one that was given up half-way is closed before."""
        if self._updating:
            self.end_update()
        self._updating = True
        if hasattr(self._engine, "begin_weight_update"):
            _succeeded(self._engine.begin_weight_update())

    def push(self, parts: list[tuple[Any, Described]]) -> None:
        """Replaces weights.

        Args:
            parts: For each rank of the engine all of its bytes, or where they lie: what torch's `reduce_tensor` made of
                a [bytes] tensor; and what the bytes are.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [
            MultiprocessingSerializer.serialize({"flattened_tensor": _tensor(part), "metadata": _places(described)})
            for part, described in parts
        ]
        # The KV cache of the old weights goes with `end_update`, once and not with every bucket.
        _succeeded(self._engine.update_weights_from_tensor(payloads, "flattened_bucket", flush_cache=False))

    def join(self, address: str, port: int, group: str, first: int, ranks: int, backend: str) -> None:
        """The engine's ranks join a process group of so many `ranks` as numbers `first` and following."""
        _succeeded(self._engine.init_weights_update_group(address, port, first, ranks, group, backend))

    def receive(self, group: str, tensors: list[Described]) -> None:
        """Replaces weights by what each rank of the engine is sent now."""
        self._fetch({"group": group, "tensors": tensors})

    def load(self, folder: str, experts: list[list[int] | None]) -> None:
        """Replaces all weights by those of a model directory, of which each rank reads some experts, or all of them."""
        from grpo_mega.rollout.sglang.loader import missing

        if files := missing(Path(folder)):
            raise Refused(f"{folder} is not whole where the engine runs, it lacks {files[0]}; do all nodes see it?")
        if any(experts):
            self.begin_update()
            self._fetch({"folder": folder, "experts": experts})
            self.end_update()
        else:
            _succeeded(self._engine.update_weights_from_disk(folder, "auto"))
            self.flush()

    def end_update(self) -> None:
        """Closes the session; what the old weights had cached is forgotten."""
        self._updating = False
        if hasattr(self._engine, "end_weight_update"):
            _succeeded(self._engine.end_weight_update())
        self.flush()

    def flush(self) -> None:
        """Empties all KV caches, as soon as the engine has nothing to do; SGLang refuses before."""
        while not all(self._engine.loop.run_until_complete(self._flush())):
            time.sleep(0.05)

    def release(self, tags: list[str]) -> None:
        """Gives memory back. SGLang ends itself, and us, when it is asked while it has something to do."""
        self.flush()
        _succeeded(self._engine.release_memory_occupation(tags=tags))

    def resume(self, tags: list[str]) -> None:
        """Takes memory again."""
        _succeeded(self._engine.resume_memory_occupation(tags=tags))

    def _fetch(self, order: dict[str, Any]) -> None:
        """Has the engine's ranks get weights by themselves."""
        import torch

        from grpo_mega.rollout.sglang.loader import NAME

        words = [(json.dumps(order), torch.empty(0))]
        _succeeded(self._engine.update_weights_from_tensor(words, NAME, flush_cache=False))

    async def _flush(self) -> list[bool]:
        """Whether each cache is empty; SGLang's `flush_cache` tells of one, also under data parallel attention."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        manager = self._engine.tokenizer_manager
        manager.auto_create_handle_loop()
        return [cache.success for cache in await manager.flush_cache_communicator(FlushCacheReqInput())]

    async def _generate(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        self._aborting = False
        self._submit(request, samples)
        aside = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._give_signs())]
        try:
            while self._submissions:
                done, _ = await asyncio.wait([*self._submissions, *aside], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # what stands aside ends only when it fails
                self._submissions -= done
        finally:
            for task in aside:
                task.cancel()
            await asyncio.gather(*aside, return_exceptions=True)
            await self._abort_until([*self._submissions])  # there are none, but when what stands aside failed
            self._submissions.clear()

    def _submit(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        self._submissions.add(asyncio.ensure_future(self._answer(request, samples)))

    async def _answer(self, request: int, samples: dict[int, dict[str, Any]]) -> None:
        """Generates samples; when one fails, nothing that is under way is generated to its end."""
        tasks = [asyncio.ensure_future(self._complete(number, sample)) for number, sample in samples.items()]
        try:
            await asyncio.gather(*tasks)
            self._outbox.send("answer", request, None)
        except Exception as error:
            await self._abort_until(tasks)
            self._outbox.send("error", request, _reason("generate", error))

    async def _complete(self, number: int, sample: dict[str, Any]) -> None:
        found = await self._engine.async_generate(**sample, return_logprob=True)
        meta = found["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and not self._aborting:
            raise Refused(f"a sample was not generated: {reason.get('message', reason)}")
        logprobs = [logprob for logprob, *_ in meta.get("output_token_logprobs") or ()]
        experts = _experts(meta.get("routed_experts"))
        self._outbox.send("sample", number, found.get("output_ids", []), logprobs, reason["type"], experts)

    async def _give_signs(self) -> None:
        """Tells the trainer of every change in when SGLang's scheduler last sent tokens: of any request, every 50."""
        last = None
        while True:
            if (now := self._engine.tokenizer_manager.last_receive_tstamp) != last:
                self._outbox.send("alive")
                last = now
            await asyncio.sleep(SECONDS_BETWEEN_SIGNS)

    async def _listen(self) -> None:
        """Takes further requests to generate; when it hears "abort", no more, but ends all that there are."""
        while True:
            # Not loop.add_reader: uvloop would make reading from the connection fail when nothing is there.
            while not self._connection.poll():
                await asyncio.sleep(SECONDS_BETWEEN_POLLS)
            request, method, arguments = self._connection.recv()
            if method == "abort":
                await self._abort_until([asyncio.get_running_loop().create_future()])
            self._submit(request, arguments["samples"])

    async def _abort_until(self, waiting: Sequence[asyncio.Future]) -> None:
        """Aborts requests until those that are waited for have ended.

        SGLang aborts what its scheduler knows of; requests on their way there need another call.
        """
        while not all(future.done() for future in waiting):
            self._aborting = True
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            await asyncio.sleep(SECONDS_BETWEEN_POLLS)


class _Elsewhere:
    """Pickles as the tensor that another process shares, without opening it here."""

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = rebuild, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def _tensor(part: Any) -> Any:
    import torch

    if not part:  # nothing for this rank
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else _Elsewhere(*part)


def _experts(found: Any) -> Any:
    """[tokens * layers * top k] which experts the tokens went to, when it was asked for; a tensor before 0.5.10."""
    import numpy

    if isinstance(found, str):
        return numpy.frombuffer(base64.b64decode(found), dtype=numpy.int32)
    return None if found is None else found.flatten().numpy()


def _places(tensors: Described) -> list[Any]:
    """Where in the bytes each tensor lies, in SGLang's words."""
    import torch
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    places, end = [], 0
    for name, shape, kind in tensors:
        dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        places.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, end, end + size, size))
        end += size
    return places


def _check_release(arguments: dict[str, Any]) -> None:
    """Refuses releases that would fail later, in words that do not say why."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if not hasattr(FlattenedTensorBucket, "supports_multi_dtypes"):
        raise Refused(f"SGLang {version('sglang')} does not take weights as bytes; install {OLDEST} or newer")
    there = inspect.signature(Engine.async_generate).parameters
    for argument, (parameter, oldest) in NEEDED.items():
        if arguments.get(argument) and parameter not in there:
            raise Refused(f"{argument}: SGLang {version('sglang')} cannot be asked for it; install {oldest} or newer")


def _check(arguments: dict[str, Any]) -> None:
    """Refuses server arguments that the installed release does not have."""
    for name in arguments:
        if not _known(name):
            close = get_close_matches(name, _parameters(), n=1)
            raise Refused(
                f"rollout.sglang.arguments.{name}: SGLang {version('sglang')} has no such server argument"
                + (f"; did you mean {close[0]}?" if close else "")
            )


def _known(argument: str) -> bool:
    return argument in _parameters()


def _parameters() -> list[str]:
    """The names of the installed release's server arguments."""
    from sglang.srt.server_args import ServerArgs

    return [*inspect.signature(ServerArgs).parameters]


def _succeeded(result: Any) -> None:
    """SGLang reports failures in what it returns: (success, message, ...), or nothing when there is nothing to say."""
    success, message, *_ = result if isinstance(result, tuple) else (result is None, str(result))
    if not success:
        raise Refused(message)


def _children() -> list[Any]:
    import psutil

    return psutil.Process().children(recursive=True)


def _end_with(parent: int) -> None:
    """Ends the whole process group when the trainer is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


def _end_without(parts: list[Any]) -> None:
    """Ends the whole process group when a part of the engine is gone: not every release of SGLang sees that it is."""
    import psutil

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
            elif method != "abort":  # it comes too late: the generation has just ended
                outbox.send("answer", request, getattr(host, method)(**arguments))
        except (Exception, SystemExit) as error:
            outbox.send("error", request, _reason(method, error))


def _reason(method: str, error: BaseException) -> str:
    """Why a method failed, for people."""
    return f"{method}: {error}" if isinstance(error, Refused) else f"{method}: {type(error).__name__}: {error}"


def main() -> None:
    """The entry point."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the trainer closed the connection, or is gone
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
