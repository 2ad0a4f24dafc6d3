"""Prints docs/configuration.md, generated from the schema and the files of configs/:

python -m grpo_mega.config.setting_page > docs/configuration.md
"""

from __future__ import annotations

import re
from dataclasses import fields

from grpo_mega.config.listing import Setting, chosen_options, most_given, section_types, sections
from grpo_mega.config.load import config_dir, groups
from grpo_mega.config.schema import PartsConfig

HEAD = """# Configuration

Every setting, and every file in `configs`. Generated from `grpo_mega/config/schema` and the files' first comments by
`python -m grpo_mega.config.setting_page`. `python -m grpo_mega.train --help all` prints the same, `--help rollout` one
section, `--help` the twelve settings below.

A command is a list of words, of which later ones win. `FIELD=VALUE` sets one field. `GROUP=OPTION` takes that file of
the group's folder in `configs`; without it the experiment decides, or else the group's default:

```bash
python -m grpo_mega.train experiment=tiny layout=single optimizer.lr=1e-4 --cfg job   # prints what would run
python -m grpo_mega.train experiment=tiny --dry-run                                   # lists every problem
```

- Text with special characters is quoted twice, because the shell removes one pair: `"rollout.stop=['<|im_end|>']"`.
- `FIELD=null` means none.
- A setting that does not exist, is out of its range or does not go with another is refused before anything is built,
  with what to change (exit code 2).
- With a Hugging Face folder as `run.init_from`, its model, tokenizer and chat template are defaults
  ([data.md](data.md)).
- Settings that belong together go into a file: copy one of `configs/experiment`, or let
  `python -m grpo_mega.new` write it ([models.md](models.md)).
"""
PARTS = [f"optimizer.parts.{field.name}" for field in fields(PartsConfig)]
"""Sections that differ only in their names; the page has the first, under the name optimizer.parts.PART."""


def page() -> str:
    """The whole document, as Markdown."""
    table = ["| setting | default; range | meaning |", "| --- | --- | --- |", *map(_row, most_given()), ""]
    besides = "Most also choose an algorithm, a model and a layout from the groups below.\n"
    parts = [HEAD, "## The twelve that most experiments give\n", besides, *table, "## Groups and their options\n"]
    for group, options in groups().items():
        chosen = chosen_options().get(group)
        taken = f"Default: `{group}={chosen}`." if chosen else "None by default."
        rows = [f"| `{option}` | {_cell(_comment(group, option))} |" for option in options]
        parts += [f"### Group {group}\n", f"{taken}\n", "| option | what it is |", "| --- | --- |", *rows, ""]
    parts.append("## Settings\n")
    listed = [section for name, owner in section_types().items() for section in sections(owner, name)]
    for section in (section for section in listed if section.name not in PARTS[1:]):
        depth = "#" * min(5, 3 + section.name.count("."))
        parts += [f"{depth} {section.name}\n", f"{section.about}\n"]
        # There are none if all of them are in nested dataclasses.
        if section.settings:
            parts += ["| setting | default; range | meaning |", "| --- | --- | --- |", *map(_row, section.settings), ""]
    return "\n".join(parts).replace(PARTS[0], "optimizer.parts.PART")


def _comment(group: str, option: str) -> str:
    """First comment of a file of configs/, which describes it.

    Raises:
        ValueError: The file has no comment.
    """
    path = config_dir() / group / f"{option}.yaml"
    lines = path.read_text().splitlines()
    # A line `# @package` is an instruction to hydra, not a comment.
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ") and "@package" not in line]
    if not comments:
        raise ValueError(f"{path} does not say what it is: begin it with a comment of one line")
    return comments[0]


def _row(setting: Setting) -> str:
    """Table row of a setting."""
    default = "must be given" if setting.default is None else f"`{setting.default}`" if setting.default else "empty"
    meaning, values = setting.meaning, setting.values.removeprefix("one of ").split(", ")
    if setting.values.startswith("in "):
        default += f"; {setting.values.removeprefix('in ')}"
    # Choices that the docstring names are not listed again.
    elif not all(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", meaning) for value in values):
        meaning += f" One of {', '.join(values)}."
    meaning += f" Only {setting.needs}." if setting.needs else ""
    return f"| `{setting.name}` | {default} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    """The text escaped for a table cell."""
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
