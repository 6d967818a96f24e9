"""The text of an HTML page."""

import codecs
import html.parser
import re
from typing import Any

_CHARSET = re.compile(rb"""<meta[^>]*charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
# Elements that begin a new line.
_BLOCKS = set(
    re.findall(
        r"\w+",
        """address article aside blockquote br caption dd details div dl dt fieldset figcaption figure footer form
        h1 h2 h3 h4 h5 h6 header hr li main nav ol option p pre section summary table td th title tr ul""",
    )
)


class _Visible(html.parser.HTMLParser):
    """Collects the text that a browser shows."""

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []
        self._hidden = self._kept = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden = self._hidden or tag in ("script", "style")
        self._kept = self._kept or tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden = False
        self._kept = self._kept and tag != "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._kept else re.sub(r"\s+", " ", data))


def visible(raw: bytes) -> bytes:
    """The text that a browser shows of a page, as UTF-8. Bytes that are not UTF-8 stay if the page names no charset."""
    named = _CHARSET.search(raw[:1024])
    try:
        charset = codecs.lookup(named[1].decode("ascii", "replace")).name if named else "utf-8"
        text = raw.decode(charset, "surrogateescape" if charset == "utf-8" else "replace")
    except (LookupError, ValueError):  # Python does not know the charset, or it is a codec of something else
        text = raw.decode("utf-8", "surrogateescape")
    visible = _Visible()
    visible.feed(text)
    visible.close()
    lines = (line.rstrip() for line in "".join(visible.parts).replace("\u00a0", " ").split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line[1:] if line[:1] == " " != line[1:2] else line for line in lines))
    return text.strip("\n").encode("utf-8", "surrogateescape")
