"""A model's own tokenizer, from a Hugging Face directory, as a `Tokenizer`."""

from __future__ import annotations

import copy
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from grpo_mega.config.from_folder import CHAT, CLOCK
from grpo_mega.data.chat import ASSISTANT, Message, Turn, encoded_parts, encoded_separately, texts_at_cuts, with_tokens
from grpo_mega.data.plain_text import PARSE_SPECIAL, PlainText
from grpo_mega.data.tiktoken_table import is_table, read_table
from grpo_mega.errors import InputError
from grpo_mega.platform.manifest import damage_beside_weights

THINK = "<think>"
"""Tag with which some chat templates begin the completion."""
ORDINARY = "What is 3 + 5?"
"""Test problem that quotes no special token."""
ANOTHER = "What is 4 + 6?"
"""Second test problem, which no template may render like the first."""
CALL = "What the policy calls."
"""Test call, which no template may change."""
SECONDS_TO_RENDER = 10.0
"""CPU seconds for the test problems. A template is a program, written by the author of the folder."""
_ASKS_FOR_DATE = re.compile(rf"{CLOCK}\s*\(\s*(['\"])(.*?)\1\s*\)")


@contextmanager
def _in_time() -> Iterator[None]:
    """Ends an endless template with a ValueError; no limit outside the main thread, which alone may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> NoReturn:
        raise ValueError(f"it runs for more than {SECONDS_TO_RENDER:g} s, perhaps an endless loop")

    # This timer counts the CPU time of the process, so a busy machine does not turn a slow start into an error.
    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_TO_RENDER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class HuggingFaceTokenizer:
    """A fast tokenizer with the token that begins its texts and a template for problems."""

    def __init__(
        self,
        folder: str | Path,
        template: str,
        parse_special: bool = False,
        question: str = "{prompt}",
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        """Reads `folder`, never the network; for the other arguments see `schema.DataConfig`.

        Raises:
            FileNotFoundError: There is no such directory.
            InputError: The directory has no tokenizer, or not the one of the imported checkpoint, the chat template is
                missing or fails, or special tokens cannot be distinguished from text.
        """
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"data.tokenizer={folder}: no such directory; give one with a tokenizer.json, or chars"
            )
        if problem := damage_beside_weights(Path(folder)):
            raise InputError(
                f"data.tokenizer={folder}",
                f"the checkpoint is not what was imported: {problem}",
                "put the file back, import the model again, or set data.tokenizer to another folder",
            )
        self._folder, self._tokenizer = folder, _loaded(Path(folder))
        self._parse_special = parse_special
        self._options = dict(options or {})
        if date is not None:
            self._tokenizer.chat_template = self._of_day(date)
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        bos = self._tokenizer.bos_token_id
        # Whether texts begin with this token depends on the tokenizer's post-processor, so an example is encoded.
        added = bos is not None and self._tokenizer.encode("a")[:1] == [bos]
        self._opening = self._tokenizer.bos_token if added else ""
        self._ask_with(template, question, system)

    def asking(self, template: str, question: str, system: str | None) -> HuggingFaceTokenizer:
        """This tokenizer with another template, question and system message. Raises InputError as `__init__` does."""
        other = copy.copy(self)
        other._ask_with(template, question, system)
        return other

    def _ask_with(self, template: str, question: str, system: str | None) -> None:
        if template == CHAT and not self._tokenizer.chat_template:
            what = f"the tokenizer in {self._folder} has no chat template"
            raise InputError("data.template=chat", what, "write the template out")
        for name in self._options if template == CHAT else ():
            if not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                what = f"has no effect: {self._chat_template} does not read it"
                raise InputError(f"data.template_options.{name}", what, "leave it out")
        self._template, self._question, self._system = template, question, system
        self._plain: PlainText | None = None
        self._of_replies: PlainText | None = None
        if template == CHAT:
            with _in_time():
                ordinary, another = self._rendered(ORDINARY), self._rendered(ANOTHER)
            if ordinary == another:
                raise InputError(
                    self._chat_template,
                    f"has no place for the problem: it renders {ORDINARY!r} as {ordinary!r}",
                    "put {{ message.content }} where the user's words belong, or set data.template to a text with "
                    "{prompt}",
                )
        if not self._parse_special:
            self._plain = self._of_replies = self._plain_text()

    def _of_day(self, date: str) -> str:
        """The chat template with this day in place of its questions for today's date. Raises InputError without any."""
        day, template = datetime.fromisoformat(date), str(self._tokenizer.chat_template or "")
        written = _ASKS_FOR_DATE.sub(lambda asks: json.dumps(day.strftime(asks[2])), template)
        if written == template or f"{CLOCK}(" in written.replace(" ", ""):
            raise InputError(
                f"data.date={date}",
                f"{self._chat_template} has no {CLOCK}('FORMAT'), or also asks for the date in another way",
                "leave data.date out, or write the template out",
            )
        return written

    def prompt(self, problem: str | Sequence[Turn]) -> tuple[str, list[int]]:
        """The policy's prompt: the beginning-of-text token and the problem in the template, as text and as token ids.

        Special tokens are parsed in the template, and in the problem only with `parse_special`. A problem that is a
        chat needs the chat template; the question rephrases its last message if that is the user's.

        Raises:
            InputError: The template refuses the problem, or it cannot be encoded, or has no tokens.
        """
        text, ids = self._split(self._asked(problem))
        return text, with_tokens(text, ids)

    def checked(self, text: str) -> str:
        """Returns the text. Raises InputError for code points that `PlainText` uses to mark special tokens."""
        return text if self._plain is None else self._plain.checked(text)

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of the prompt, (a problem, or a chat that the policy continues), and of the completion.

        Raises:
            InputError: The template refuses the problem, or it cannot be encoded.
        """
        prompt = self._asked(asked)
        # The template has begun the thoughts: a second <think> would never be sampled.
        if prompt.rstrip().endswith(THINK) and completion.lstrip().startswith(THINK):
            completion = completion.lstrip().removeprefix(THINK).lstrip()
        return encoded_parts([prompt, prompt + self.checked(completion)], self._ids)

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Token ids of a chat in alternating parts: text before an assistant turn, that turn, and so on.

        Raises:
            InputError: `template` is not chat, or the chat template fails or renders earlier turns differently when
                others follow.
        """

        def rendered(turns: Sequence[Turn], ask: bool) -> str:
            return self._applied(self._messages(turns), ask)

        return encoded_parts(texts_at_cuts(turns, rendered, self._chat_template), self._ids)

    def end_of_turn(self) -> int | None:
        """Special token that ends the assistant's turn in the chat template; None if it ends in any other way.

        Raises:
            InputError: What follows the answer cannot be encoded.
        """
        if self._template != CHAT:
            return None
        try:
            turns = [{"role": "user", "content": ORDINARY}, {"role": ASSISTANT, "content": ANOTHER}]
            after = self._applied(turns, False).rpartition(ANOTHER)[2]
        # Some templates refuse a chat that ends with an answer.
        except InputError:
            return None
        (first, *_) = self.encode(after) or [-1]
        special = first in self._tokenizer.added_tokens_decoder or first in self._tokenizer.all_special_ids
        return first if special else None

    def quoted(self, problem: str) -> list[str]:
        """Special tokens in the problem's text, which are encoded as text."""
        return self._plain.quoted(problem) if self._plain else []

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens are parsed, and none is added.

        Raises:
            InputError: The text cannot be encoded.
        """
        with self._encoding():
            return self._tokenizer.encode(text, add_special_tokens=False)

    def reply(self, text: str, template: str) -> list[int]:
        """Token ids of an environment's reply in a template with {reply}.

        Special tokens are parsed in the template, and never in the reply: `parse_special` is about problems.

        Raises:
            InputError: The text cannot be encoded, or the tokenizer cannot tell special tokens from text.
        """
        rendered = template.replace("{reply}", self._told.told(text))
        return encoded_separately(rendered, lambda rendered: self._told.encode(rendered)[1])

    def reply_template(self, role: str, close: str, keep_thoughts: bool) -> str:
        """A template with {reply}: what the chat template writes between a call, which ends with `close`, and the
        policy's next turn, for a reply that is a message of this role.

        Raises:
            InputError: The chat template is not used, or fails, or writes something else after another history; or it
                drops the thoughts before a call, which the policy sees, and they are not to be kept.
        """
        where, fix = f"environment.reply={role}: {self._chat_template}", "set environment.reply to a text with {reply}"
        found, kept = set(), True
        # The second has what a template might escape.
        for reply in ("seven", 'a "b"\n{c}'):
            try:
                after, keeps = self._after(self._messages([Turn(role, reply)]), close)
            except InputError as error:
                other = ", or data.template=chat" if self._template != CHAT else ""
                raise InputError(where, error.what, fix + other) from error
            kept &= keeps
            found.add(after.replace(reply, "{reply}") if after and after.count(reply) == 1 else None)
        if len(found) != 1 or None in found:
            raise InputError(where, "changes the reply, the call before it or the text around them", fix)
        if not kept and not keep_thoughts:
            what = "drops thoughts before a call, which the policy has seen when it goes on"
            raise InputError(where, what, "set environment.keep_thoughts=true, or environment.reply to a text")
        return str(found.pop())

    def requested(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The prompt of an agent's request, as text and as token ids, see `Tokenizer`; `data.system` and the question
        are not in it.

        Raises:
            InputError: The chat template is not used, or it refuses the messages, or they cannot be encoded.
        """
        if self._template != CHAT:
            raise InputError(f"data.template={self._template!r}", "has no place for messages", "set data.template=chat")
        messages, tools = self._told.tellable([messages, tools])
        told = [self._told_message(one) for one in messages]
        try:
            rendered = self._applied(told, True, tools)
        except InputError:
            # DeepSeek's templates want the arguments of calls as text, all others as what it stands for.
            if (written := [_with_text_of_arguments(one) for one in told]) == told:
                raise
            rendered = self._applied(written, True, tools)
        with self._encoding():
            text, ids = self._told.encode(rendered)
        return text, with_tokens(text, ids)

    def continued(self, messages: Sequence[Message], end: str, keep_thoughts: bool) -> list[int] | None:
        """Token ids of messages between a turn, which ended with `end`, and the policy's next turn; None where the
        template would write another chat, see `Tokenizer`.

        Raises:
            InputError: The messages cannot be encoded.
        """
        try:
            after, kept = self._after([self._told_message(one) for one in self._told.tellable([*messages])], end)
        except InputError:
            return None
        if after is None or not (kept or keep_thoughts):
            return None
        with self._encoding():
            return encoded_separately(after, lambda rendered: self._told.encode(rendered)[1])

    def _after(self, messages: list[dict[str, Any]], end: str) -> tuple[str | None, bool]:
        """What the template writes after a turn that `end` ended, for these messages, up to the policy's next turn, or
        None if that depends on the chat before; and whether it keeps the thoughts of the turn."""
        found, kept = set(), True
        for question, thought in ((ORDINARY, "One"), (ANOTHER, "Two")):
            said = f"{THINK}\n{thought} thought.\n</think>\n\n{CALL}{end}"
            history = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": said}]
            before, call, after = self._applied([*history, *messages], True).partition(CALL + end)
            kept &= f"{thought} thought." in before
            # A call may end with what ends every turn, and then the template writes it, too.
            found.add(after.removeprefix(end) if call else None)
        return (found.pop() if len(found) == 1 else None), kept

    def _told_message(self, message: Message) -> dict[str, Any]:
        """A message for the template; what spells a special token is protected, except in what the policy said."""
        content = message["content"]
        if message["role"] != ASSISTANT:
            content = self._told.told(content)
        return {**message, "content": content}

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, including special tokens."""
        # Cleaning up would drop spaces before punctuation, but the text must be exactly what the tokens spell.
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int:
        """The id of one token. Raises InputError when there is no such token."""
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            special = ", ".join(self._tokenizer.all_special_tokens)
            raise InputError(repr(token), "not a token", f"choose one, such as the special tokens {special}")
        return token_id

    def token_ids(self) -> dict[str, int]:
        """Every token and its id, special tokens included."""
        return self._tokenizer.get_vocab()

    def _asked(self, problem: str | Sequence[Turn]) -> str:
        """A problem in the template, quoted special tokens protected, up to the start of the assistant's answer."""
        if isinstance(problem, str):
            return self._rendered(self._protected(problem))
        return self._applied(self._worded(self._messages(problem)), True)

    def _rendered(self, problem: str) -> str:
        if self._template != CHAT:
            return self._opening + self._template.replace("{prompt}", self._question.replace("{prompt}", problem))
        return self._applied(self._worded([{"role": "user", "content": problem}]), True)

    def _worded(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Messages with the system message added, if there is one, and the last user message put into the question."""
        adds = self._system and messages[0]["role"] != "system"
        first = [{"role": "system", "content": str(self._system)}] if adds else []
        *earlier, last = messages
        if last["role"] == "user":
            last = last | {"content": self._question.replace("{prompt}", last["content"])}
        return [*first, *earlier, last]

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        if self._template != CHAT:
            raise InputError(
                "messages",
                "need the chat template, in which the policy is then also asked",
                "set data.template=chat, or write 'prompt' and 'completion' as text",
            )
        contents = [self.checked(t.content) if t.role == ASSISTANT else self._protected(t.content) for t in turns]
        return [{"role": turn.role, "content": content} for turn, content in zip(turns, contents, strict=True)]

    @property
    def _told(self) -> PlainText:
        """The encoder of what environments and agents say, with `parse_special`, too, which is about problems.

        Raises:
            InputError: The tokenizer cannot tell special tokens from text.
        """
        if self._of_replies is None:
            try:
                self._of_replies = self._plain_text()
            except InputError as error:
                fix = "choose a tokenizer whose special tokens no reply can write"
                raise InputError(error.where, error.what, fix) from None
        return self._of_replies

    def _applied(self, messages: list[dict[str, Any]], ask: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        options = self._options | ({"tools": [*tools]} if tools else {})
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask, **options)
        # A template is a program and may raise anything.
        except Exception as error:
            what = f"fails: {type(error).__name__}: {error}"
            fix = "correct the template, or set data.template to a text"
            raise InputError(self._chat_template, what, fix) from error

    @property
    def _chat_template(self) -> str:
        return f"the chat template in {self._folder}"

    def _protected(self, text: str) -> str:
        """The text with quoted special tokens protected, for a template to render."""
        return text if self._plain is None else self._plain.protected(text)

    def _ids(self, rendered: str) -> list[int]:
        return self._split(rendered)[1]

    def _split(self, rendered: str) -> tuple[str, list[int]]:
        """Plain text and token ids of a rendered text. Raises InputError when it cannot be encoded."""
        if self._plain is None:
            return rendered, self.encode(rendered)
        with self._encoding():
            return self._plain.encode(rendered)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """Turns what the tokenizer raises into an InputError that names its file."""
        try:
            yield
        except Exception as error:  # a bare Exception is what tokenizers raises
            raise InputError(
                f"data.tokenizer={self._folder}",
                f"its tokenizer.json cannot encode a text: {error}",
                "give its model all bytes or an unknown token, or choose another folder",
            ) from error

    def _plain_text(self) -> PlainText:
        """The encoder that treats special tokens in problems as text; other problems must keep their token ids.

        Raises:
            InputError: The tokenizer does not allow it.
        """
        where = f"data.tokenizer={self._folder}"
        if not self._tokenizer.is_fast:
            raise InputError(where, "not a fast tokenizer", PARSE_SPECIAL)
        try:
            plain = PlainText(self._tokenizer.backend_tokenizer)
        except InputError as error:
            raise InputError(f"{where}: {error.where}", error.what, error.fix) from error
        # A problem without special tokens must get the same ids from the second tokenizer as from the first.
        text = self._rendered(ORDINARY)
        with self._encoding():
            split = plain.encode(text)
        if split != (text, self.encode(text)):
            raise InputError(where, "its special tokens cannot be distinguished from text", PARSE_SPECIAL)
        return plain


def _with_text_of_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    written = [
        call | {"function": call["function"] | {"arguments": text}} for call, text in zip(calls, texts, strict=True)
    ]
    return message | {"tool_calls": written} if calls else message


def _loaded(folder: Path) -> Any:
    # Imported here because it takes seconds and is not always needed.
    from transformers import AutoTokenizer

    program = _program(folder)
    if is_table(folder, program):
        return read_table(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # The library tokenizers raises bare `Exception`.
    except Exception as error:
        if program:
            raise InputError(
                f"data.tokenizer={folder}",
                f"its tokenizer is a program ({program}), and a model's code is never run",
                "set data.tokenizer to a folder with a tokenizer.json of the same tokens, and no auto_map in its "
                "tokenizer_config.json",
            ) from error
        why = (
            ""
            if (folder / "tokenizer.json").exists()
            else "; it has no tokenizer.json, and a model's code is never run"
        )
        what = f"holds no tokenizer that can be read: {error}{why}"
        raise InputError(f"data.tokenizer={folder}", what, "choose a folder with a tokenizer.json") from error


def _program(folder: Path) -> str | None:
    """Class, from the folder's own code, that its tokenizer needs; None if it names none."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = settings["auto_map"]["AutoTokenizer"]
    # The file does not exist, or names no code.
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ", ".join(map(str, filter(None, named))) if isinstance(named, list) else str(named)
