"""Reads a page of HTML: its elements, their text, and whether each one is closed."""

import html.parser

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
