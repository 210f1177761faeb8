"""Generated pages (forms, invoices and letters), each with a question whose answer is written on the page.

Invariant: the same seed gives the same page and question, and with the same release of Pillow the same bits. All names,
numbers and addresses are invented. The fonts come with matplotlib, so that pages do not depend on the machine's fonts.
"""

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

from hpc_es.envs.docvqa import words
from hpc_es.errors import ConfigError

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise ConfigError("pages need Pillow: pip install 'hpc_es[docvqa]'") from error

DPI = 150
WIDTH, HEIGHT, MARGIN = 1240, 1754, 110
"""Size and margin of an A4 page in dots."""
MAX_ITEMS = 7

Question = tuple[str, tuple[str, ...]]
"""A question and its accepted answers."""


@dataclass(frozen=True)
class Page:
    image: bytes
    """A PNG file."""
    question: str
    accepted: tuple[str, ...]


def draw(seed: int) -> Page:
    """Draw a page of a random kind, with one of the questions that it answers."""
    rng = random.Random(seed)
    sheet = _Sheet(serif=rng.random() < 0.5)
    question, accepted = rng.choice(rng.choice(KINDS)(rng, sheet))
    return Page(sheet.png(), question, accepted)


def form(rng: random.Random, sheet: "_Sheet") -> list[Question]:
    """Draw a registration form: ruled boxes with labels and entries."""
    entries = [
        ("Full name", words.person(rng)),
        ("Employee number", f"{rng.randrange(10_000, 99_999)}"),
        ("Date of birth", words.date(rng, 1950, 1995)),
        ("Department", rng.choice(words.DEPARTMENTS)),
        ("Office telephone", words.telephone(rng)),
        ("Home address", words.street(rng)),
        ("City", rng.choice(words.CITIES)),
        ("Supervisor", words.person(rng)),
        ("Start date", words.date(rng, 2001, 2019)),
        ("Monthly salary", words.money(rng.randrange(1800, 9000) * 100)),
    ]
    shown = sorted(rng.sample(range(len(entries)), rng.randint(6, len(entries))))
    sheet.text(rng.choice(words.COMPANIES), size=40, bold=True)
    sheet.text("Employee Registration Form", size=32)
    sheet.skip(40)
    for label, value in (entries[each] for each in shown):
        sheet.row([(0.0, label), (0.4, value)], boxed=True)
    sheet.skip(60)
    sheet.text("Please return this form to the personnel office.", size=24)
    return [(f"What is the {entries[each][0].lower()} in this form?", (entries[each][1],)) for each in shown]


def invoice(rng: random.Random, sheet: "_Sheet") -> list[Question]:
    """Draw an invoice: a table of items with quantities and prices, and the total."""
    number, date, customer = f"INV-{rng.randrange(1000, 9999)}", words.date(rng, 1995, 2020), words.person(rng)
    names = rng.sample(words.ITEMS, rng.randint(3, MAX_ITEMS))
    items = [(name, rng.randint(2, 60), rng.randrange(150, 9900)) for name in names]
    total = sum(quantity * price for _, quantity, price in items)
    sheet.text(rng.choice(words.COMPANIES), size=40, bold=True)
    sheet.text(words.street(rng) + ", " + rng.choice(words.CITIES), size=24)
    sheet.skip(40)
    for label, value in (("Invoice number:", number), ("Invoice date:", date), ("Bill to:", customer)):
        sheet.row([(0.0, label), (0.25, value)])
    sheet.skip(40)
    columns = (0.0, 0.45, 0.6, 0.8)
    header = ("Description", "Quantity", "Unit price", "Amount")
    sheet.row(list(zip(columns, header, strict=True)), boxed=True, bold=True)
    for name, quantity, price in items:
        cells = (name, str(quantity), words.money(price), words.money(quantity * price))
        sheet.row(list(zip(columns, cells, strict=True)), boxed=True)
    sheet.row([(0.6, "Total"), (0.8, words.money(total))], boxed=True, bold=True)
    dearest = max(items, key=lambda item: item[2])
    name, quantity, price = rng.choice(items)
    asked = [
        ("What is the invoice number?", (number,)),
        ("What is the date of the invoice?", (date,)),
        ("Who is billed?", (customer,)),
        ("What is the total amount?", _amounts(total)),
        (f"What quantity of {name.lower()} is billed?", (str(quantity),)),
        (f"What is the unit price of {name.lower()}?", _amounts(price)),
    ]
    if [item[2] for item in items].count(dearest[2]) == 1:
        asked.append(("Which item has the highest unit price?", (dearest[0],)))
    return asked


def letter(rng: random.Random, sheet: "_Sheet") -> list[Question]:
    """Draw a letter of invitation, with the facts in running text."""
    sender, recipient, company = words.person(rng), words.person(rng), rng.choice(words.COMPANIES)
    written, day = words.date(rng, 1960, 1999), rng.choice(words.WEEKDAYS)
    hour, city = f"{rng.randint(1, 11)}:{rng.choice(('00', '15', '30', '45'))} p.m.", rng.choice(words.CITIES)
    topic, guests = rng.choice(words.TOPICS), str(rng.randint(12, 95))
    sheet.text(company, size=40, bold=True)
    sheet.text(words.street(rng) + ", " + rng.choice(words.CITIES), size=24)
    sheet.skip(60)
    sheet.text(written)
    sheet.skip(20)
    sheet.text(f"To: {recipient}")
    sheet.text(f"Subject: {topic}", bold=True)
    sheet.skip(40)
    surname = recipient.split()[-1]
    sheet.paragraph(
        f"Dear {surname}, we are pleased to invite you to our meeting on the {topic.lower()}. It will be held next "
        f"{day} at {hour} in our offices in {city}. We expect {guests} guests from all parts of the country."
    )
    sheet.paragraph("Please let us know whether you will be able to attend, and whether you need a room for the night.")
    sheet.skip(20)
    sheet.text("Sincerely yours,")
    sheet.skip(80)
    sheet.text(sender)
    sheet.text(rng.choice(words.POSITIONS), size=24)
    return [
        ("Who signed the letter?", (sender,)),
        ("To whom is the letter addressed?", (recipient,)),
        ("What is the date of the letter?", (written,)),
        ("What is the subject of the letter?", (topic,)),
        ("On which day of the week is the meeting?", (day,)),
        ("At what time is the meeting?", (hour,)),
        ("In which city is the meeting held?", (city,)),
        ("How many guests are expected?", (guests,)),
    ]


KINDS: tuple[Callable[[random.Random, "_Sheet"], list[Question]], ...] = (form, invoice, letter)


def _amounts(cents: int) -> tuple[str, str]:
    """An amount with and without the dollar sign."""
    return words.money(cents), words.money(cents).removeprefix("$")


class _Sheet:
    """A white page that is filled from top to bottom."""

    def __init__(self, *, serif: bool) -> None:
        self._image = Image.new("L", (WIDTH, HEIGHT), 255)
        self._draw = ImageDraw.Draw(self._image)
        self._family = "DejaVuSerif" if serif else "DejaVuSans"
        self._y = MARGIN

    def skip(self, height: int) -> None:
        self._y += height

    def text(self, line: str, *, size: int = 28, bold: bool = False) -> None:
        self._draw.text((MARGIN, self._y), line, font=self._font(size, bold), fill=0)
        self._y += size * 3 // 2

    def paragraph(self, text: str, *, size: int = 28) -> None:
        line = ""
        for word in text.split():
            longer = f"{line} {word}".strip()
            if self._font(size).getlength(longer) > WIDTH - 2 * MARGIN:
                self.text(line, size=size)
                longer = word
            line = longer
        self.text(line, size=size)
        self.skip(size // 2)

    def row(self, cells: Sequence[tuple[float, str]], *, boxed: bool = False, bold: bool = False) -> None:
        """Draw a row of cells, each with its share of the width."""
        size, height, width = 26, 56, WIDTH - 2 * MARGIN
        for at, text in cells:
            left = MARGIN + int(at * width)
            self._draw.text((left + 14, self._y + 12), text, font=self._font(size, bold), fill=0)
            if boxed:
                self._draw.rectangle((left, self._y, WIDTH - MARGIN, self._y + height), outline=0, width=2)
        self._y += height

    def png(self) -> bytes:
        file = io.BytesIO()
        self._image.save(file, "PNG", dpi=(DPI, DPI))
        return file.getvalue()

    def _font(self, size: int, bold: bool = False) -> Any:
        return _font(f"{self._family}{'-Bold' if bold else ''}.ttf", size)


@cache
def _font(name: str, size: int) -> Any:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
