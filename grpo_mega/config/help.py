"""Text of `--help`: settings with their docstrings, defaults and values, from the schema itself.

Only the schema is imported, so that it prints fast.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain

from grpo_mega.config import listing
from grpo_mega.config.load import groups
from grpo_mega.errors import meant

INTRODUCTION = """\
Trains a policy with GRPO.

Arguments are settings: GROUP=OPTION selects configs/GROUP/OPTION.yaml, FIELD=VALUE sets a field.

    torchrun --nproc-per-node 2 -m grpo_mega.train experiment=tiny run.name=mine run.steps=20
    python -m grpo_mega.train experiment=tiny layout=single optimizer.lr=1e-4 --cfg job   prints the configuration only
    python -m grpo_mega.train experiment=tiny --dry-run                                   lists all its problems
    python -m grpo_mega.train --help rollout                                              all settings of one section
    python -m grpo_mega.train --help all                                                  all settings

Quote lists and text with special characters twice, because the shell removes one pair of quotes:

    "rollout.stop=['<|im_end|>']"     'reward.terms=[{name: mine, weight: 1.0, function: my_rewards:mine}]'

FIELD=null means none. A run of your own also needs a name, run.name=NAME.

Groups, with the default option in brackets:
"""
WIDTH = 110


def answer(words: list[str]) -> None:
    """Prints the help and ends the process when the command line has -h or --help."""
    if not {"-h", "--help"} & {*words}:
        return
    chosen = [word for word in words if word in listing.section_types()]
    unknown = [word for word in words if word not in (*chosen, "all") and not re.search("^-|=", word)]
    # `| head` closes the pipe early, which Python would report as a BrokenPipeError.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # Under torchrun every rank gets this command line, and one prints.
    if os.environ.get("RANK", "0") == "0":
        for word in unknown:
            sections = (one for name, owner in listing.section_types().items() for one in listing.sections(owner, name))
            named = [setting for section in sections for setting in section.settings if word in setting.name]
            exact = [setting for setting in named if setting.name == word]
            if not exact:
                close = meant(word, listing.section_types())
                print(f"{word} is not a section{close}. Settings with it in their names:{'' if named else ' none'}\n")
            print("\n".join(chain.from_iterable(map(_of_setting, exact or named))))
        if not unknown or chosen:
            every = "all" in words
            print("\n".join(help_text([*listing.section_types()] if every else chosen, introduced=every)))
    sys.exit(0)


def help_text(chosen: list[str], introduced: bool = False) -> Iterator[str]:
    """Yields the lines of the help: all settings of the `chosen` sections, `introduced` by the groups; without any the
    groups, the settings that matter most, and the names of the sections."""
    if introduced or not chosen:
        yield INTRODUCTION
        defaults = listing.chosen_options()
        for group, options in groups().items():
            taken = f"[{defaults.get(group) or 'none'}]"
            yield from textwrap.wrap(
                f"{group:<12} {taken:<16} {' '.join(options)}", WIDTH, initial_indent="  ", subsequent_indent=" " * 32
            )
    if not chosen:
        yield "\nSettings that most experiments set:\n"
        for setting in listing.most_given():
            yield from _of_setting(setting)
        yield ""
        names = ", ".join(listing.section_types())
        yield from textwrap.wrap(
            f"Sections, each shown by --help SECTION, and all of them by --help all: {names}", WIDTH
        )
    for name in chosen:
        for section in listing.sections(listing.section_types()[name], name):
            yield f"\n{section.name}: {section.about}"
            for setting in section.settings:
                yield from _of_setting(setting)
        if name == "reward":
            yield "\nOptions of the kinds of reward terms, given in reward.terms.0.options:"
            for section in listing.kinds():
                yield f"\n{section.name}"
                for setting in section.settings:
                    yield from _of_setting(setting)


def _of_setting(setting: listing.Setting) -> Iterator[str]:
    """Yields the lines for a setting."""
    default = ", must be given" if setting.default is None else f"={setting.default}"
    notes = "  ".join(filter(None, (setting.values, setting.needs and f"({setting.needs})")))
    yield f"  {setting.name}{default}  {notes}".rstrip()
    yield textwrap.fill(setting.meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
