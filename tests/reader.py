"""Reads a page of HTML: its elements, their text, and whether each one is closed; and opens it in a browser."""

import html.parser
import json
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FRAME = """<!doctype html><body><script>
onmessage = ({ data }) => document.body.append(Object.assign(document.createElement("pre"), { textContent: data }));
</script><iframe src="page.html" style="width: %dpx; height: 900px; border: 0"></iframe>"""

VOID = ("meta", "input", "br", "wbr")  # elements without an end


class Reader(html.parser.HTMLParser):
    """Elements with their attributes, and the text of those that have some."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.unclosed = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", **dict(attributes)})

    def handle_endtag(self, tag):
        if self.open and self.open[-1]["tag"] == tag:
            self.open.pop()
        else:
            self.unclosed.append(tag)

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag, **wanted):
        return [one for one in self.elements if one["tag"] == tag and all(one.get(k) == v for k, v in wanted.items())]


def run_in_a_browser(folder, page, visit, width):
    """What the script `visit` posts as JSON from a page that is `width` pixels wide; skips where no browser is."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on the PATH")
    (folder / "page.html").write_text(page.replace("</body>", f"{visit}</body>"), encoding="utf-8")
    # In a frame, because a browser's own window has a least width that is wider than a phone.
    (folder / "frame.html").write_text(FRAME % width, encoding="utf-8")
    command = [browser, "--headless", "--disable-gpu", "--window-size=1500,1000", "--virtual-time-budget=5000",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom", "--no-sandbox",
               (folder / "frame.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    (printed,) = Reader(done.stdout).find("pre")
    return json.loads(printed["text"])
