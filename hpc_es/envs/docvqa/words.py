"""Invented names, addresses and terms for generated pages."""

import random

FIRST_NAMES = ("Alice", "Bernard", "Clara", "Daniel", "Edith", "Frank", "Grace", "Harold", "Irene", "Martin", "Nora")
LAST_NAMES = ("Ashworth", "Bellamy", "Carver", "Dunmore", "Fairbanks", "Garland", "Hartley", "Kendrick", "Langford")
CITIES = ("Ashford", "Brookhaven", "Clearwater", "Dunbridge", "Eastmoor", "Fairview", "Greenfield", "Harborough")
STREETS = ("Maple Street", "Station Road", "Church Lane", "Park Avenue", "Mill Street", "Harbor Road", "Garden Street")
COMPANIES = ("Northern Paper Company", "Atlas Instruments", "Meridian Foods", "Hudson Textile Works", "Orion Chemical")
DEPARTMENTS = ("Accounting", "Research", "Marketing", "Production", "Shipping", "Quality Control", "Personnel")
POSITIONS = ("Director of Research", "Managing Director", "Secretary of the Board", "Head of Marketing")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "October", "December")
TOPICS = ("Annual Sales Review", "Packaging Study", "Laboratory Safety Program", "Soil Survey", "Export Regulations")
ITEMS = (
    "Steel brackets",
    "Copper wire",
    "Glass bottles",
    "Paper labels",
    "Wooden crates",
    "Rubber gaskets",
    "Filter cartridges",
    "Canvas bags",
    "Printer ribbons",
)


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def street(rng: random.Random) -> str:
    return f"{rng.randint(2, 480)} {rng.choice(STREETS)}"


def date(rng: random.Random, first_year: int, last_year: int) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}, {rng.randint(first_year, last_year)}"


def telephone(rng: random.Random) -> str:
    return f"555-{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def money(cents: int) -> str:
    return f"${cents // 100:,}.{cents % 100:02d}"
