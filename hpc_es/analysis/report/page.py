"""The HTML page of a report. Invariant: the page is self-contained; it refers to nothing outside itself."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1160px; padding: 1.5em; }
h1 { font-size: 1.7em; margin: 0 0 .2em; }
h2 { font-size: 1.3em; margin: 2.2em 0 .6em; border-bottom: 1px solid #ccc; padding-bottom: .2em; }
h3 { font-size: 1.05em; margin: 1.6em 0 .4em; }
nav { margin: 1em 0; } nav a { margin-right: 1.2em; }
a { color: #0072B2; text-decoration: none; } a:hover { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93em; }
th, td { padding: .25em .8em; text-align: left; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { border-bottom: 1px solid #888; font-weight: 600; }
th.number, td.number { text-align: right; }
.foot, .reading, .absent, .lead { color: #555; max-width: 62em; }
.foot { font-size: .88em; margin-top: .5em; }
.absent { border-left: 3px solid #ccc; padding-left: .8em; }
figure { margin: 0 0 1.5em; } figure img { max-width: 100%; height: auto; }
.reading { margin: 0 0 .6em; }
"""


@dataclass(frozen=True)
class Section:
    """A section of the page, with an entry in its table of contents."""

    title: str
    blocks: Sequence[str]
    """Blocks of HTML, from the functions below."""


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the whole HTML document."""
    links = " ".join(f'<a href="#{_anchor(section)}">{html.escape(section.title)}</a>' for section in sections)
    body = "\n".join(
        f'<h2 id="{_anchor(section)}">{html.escape(section.title)}</h2>\n' + "\n".join(section.blocks)
        for section in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n<nav>{links}</nav>\n{body}\n'
        "</body>\n</html>\n"
    )


def table_block(title: str, table: str) -> str:
    """Return a table, given as HTML, under its title."""
    return f"<h3>{html.escape(title)}</h3>\n{table}"


def figure_block(title: str, reading: str, png: bytes) -> str:
    """Return an embedded picture with the note on how to read it."""
    data = base64.b64encode(png).decode()
    return (
        f'<h3>{html.escape(title)}</h3>\n<p class="reading">{html.escape(reading)}</p>\n'
        f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{data}"></figure>'
    )


def absent_block(title: str, reason: str) -> str:
    """Return a block that says why a figure is missing."""
    return f'<h3>{html.escape(title)}</h3>\n<p class="absent">Not shown: {html.escape(reason)}.</p>'


def _anchor(section: Section) -> str:
    return section.title.lower().replace(" ", "-")
