"""Hooks of mkdocs: pages of the site that stand elsewhere in the repository, and the files that pages link to."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from gspmd_lm.sharding import axes
from gspmd_lm.show import config_keys

ROOT = Path(__file__).parent.parent
# Page of the site -> its file in the repository. All other pages stand in docs/.
ELSEWHERE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"} | {
    f"benchmarks/{path.name.replace('README', 'index')}": f"benchmarks/{path.name}"
    for path in ROOT.glob("benchmarks/*.md")
}
PAGES = {source: page for page, source in ELSEWHERE.items()}
# Comment in a page -> the table that the site has in its place.
TABLES = {
    "<!-- arrays -->": "\n".join(
        ["| array | what it is |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in axes.ARRAYS.items())]
    )
}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files, config):
    """The files of the site: those of docs/, the pages that stand elsewhere, and every file that a page links to."""
    sources = [f"docs/{path.name}" for path in ROOT.glob("docs/*.md")]
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "config.md", content=config_keys.page()))
    linked = set()
    for source in (*sources, *PAGES):
        links = LINK.findall((ROOT / source).read_text(encoding="utf-8"))
        linked |= {resolve(link, source) for link in links}
    for path in sorted(linked):
        if place(path).startswith("repository/"):
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """The text of a page with its tables, whose links lead to where the site has their files."""
    here = page.file.src_uri
    source = ELSEWHERE.get(here, f"docs/{here}")
    for comment, table in TABLES.items():
        markdown = markdown.replace(comment, table)
    return LINK.sub(
        lambda link: f"]({posixpath.relpath(place(resolve(link[1], source)), posixpath.dirname(here) or '.')}", markdown
    )


def resolve(link, source):
    """The file that a link of a file means, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def place(path):
    """Where the site has a file of the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}")
