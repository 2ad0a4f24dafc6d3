"""Hooks of mkdocs: what documents link to outside of docs/ becomes pages of the site, so that a link works in both.

README.md and CONTRIBUTING.md, whose links begin at the repository's root, are pages of their own; any other file or
folder that a page links to is a page with its text, or its list of files, under source/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "about.md", "CONTRIBUTING.md": "contributing.md"}
"""{file of the repository's root: page of the site}."""
LINK = re.compile(r"""(\]\(|<img src=")(?!https?:|#)([^)"#]+)""")
"""A link or a picture that is not elsewhere on the web: what stands before its target, and the target."""
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


HEAD = (
    "<style>table { display: block; overflow-x: auto }</style>"  # wide ones scroll, and not the page of a phone
    '<link id="hljs-light"><link id="hljs-dark">'  # which the theme's darkmode.js sets, also without highlightjs
)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Adds what the theme lacks to the head of a page."""
    return output.replace("</head>", f"{HEAD}</head>", 1)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the pages that no document makes, such as that of the search."""
    return output_content.replace("</head>", f"{HEAD}</head>", 1)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file of docs/ makes."""
    texts = [(Path(config.docs_dir), file.content_string) for file in files.documentation_pages()]
    for name, page in ROOT_PAGES.items():
        text = (REPOSITORY / name).read_text()
        texts.append((REPOSITORY, text))
        files.append(File.generated(config, page, content=rewritten(text, REPOSITORY, page)))
    linked = {(folder / target).resolve() for folder, text in texts for _, target in LINK.findall(CODE.sub("", text))}
    for path in sorted(filter(is_source, linked)):
        files.append(File.generated(config, source_page(path), content=source_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page of docs/ that lead out of it."""
    generated = page.file.generated_by is not None
    return markdown if generated else rewritten(markdown, Path(config.docs_dir), page.file.src_uri)


def rewritten(markdown: str, folder: Path, page: str) -> str:
    """The text of a page, with the links that begin in `folder` turned to pages of the site."""

    def turned(found: re.Match[str]) -> str:
        path = (folder / found[2]).resolve()
        name = path.relative_to(REPOSITORY).as_posix()
        target = ROOT_PAGES.get(name) or (source_page(path) if not name.startswith("docs/") else name[len("docs/") :])
        return found[1] + os.path.relpath(target, Path(page).parent)

    pieces, at = [], 0
    for block in [*CODE.finditer(markdown), None]:  # code stays as it is
        end = block.start() if block else len(markdown)
        pieces += [LINK.sub(turned, markdown[at:end]), block[0] if block else ""]
        at = block.end() if block else end
    return "".join(pieces)


def is_source(path: Path) -> bool:
    """Whether a link's target becomes a page under source/. What does not exist is left to mkdocs, which refuses it."""
    outside = path.is_relative_to(REPOSITORY) and not path.is_relative_to(REPOSITORY / "docs")
    return outside and path.exists() and path.relative_to(REPOSITORY).as_posix() not in ROOT_PAGES


def source_page(path: Path) -> str:
    """The page of a source."""
    return f"source/{path.relative_to(REPOSITORY).as_posix()}.md"


def source_text(path: Path) -> str:
    """A source as Markdown: a file's text, or the names in a folder."""
    name = path.relative_to(REPOSITORY).as_posix()
    if path.is_dir():
        shown = "\n".join(sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(("_", "."))))
    else:
        shown = path.read_text()
    indented = "\n".join(f"    {line}" for line in shown.splitlines())
    return f"# {name}\n\n{indented}\n"
