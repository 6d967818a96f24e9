"""Hooks of mkdocs: pages of the site that stand elsewhere in the repository, and the files that pages link to."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")  # links of pages in docs/ to files that are not in it
BESIDE = re.compile(r"\]\((?!\w+:|#)(docs/)?")  # links of pages that stand beside docs/


def on_files(files, config):
    """The files of the site: those of docs/, README as its first page, and every file that a page links to."""
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        texts.append(BESIDE.sub(lambda link: "](" if link[1] else "](../", text))
        files.append(File.generated(config, page, content=texts[-1]))
    linked = {link for text in texts for link in OUTSIDE.findall(text)}
    for link in sorted(linked - {*PAGES.values()}):
        files.append(File.generated(config, f"repository/{link}", abs_src_path=str(ROOT / link)))
    return files


def on_page_markdown(markdown, page, config, files):
    """The text of a page, whose links lead to the copies of `on_files`."""
    moved = {source: page for page, source in PAGES.items()}
    return OUTSIDE.sub(lambda link: f"]({moved.get(link[1], 'repository/' + link[1])}", markdown)
