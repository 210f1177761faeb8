"""The pages of WebShop as its text environment shows them, and the target of each click.

A page's text is what BeautifulSoup extracts from the original's HTML. A text node of only white space becomes a
newline, which is not shown, or a space, which is shown as an empty text; an empty node does not exist. Invariant: text
and clickables depend only on the page; a refused action changes nothing. Source: WebShop's templates and
`envs/web_agent_text_env.py` (Yao et al., 2022).
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpc_es.envs.webshop.catalogue import Catalogue
from hpc_es.envs.webshop.goals import Goal
from hpc_es.envs.webshop.products import Product
from hpc_es.envs.webshop.reward import Reward

PAGE_SIZE = 10
SEPARATOR = " [SEP] "
_SUB_PAGES = ("description", "features", "reviews", "attributes")
_HTML_SPACES = "\x20\x0a\x09\x0c\x0d"

Place = Literal["search", "results", "item", "sub page", "done"]


def parse(action: str) -> tuple[str, str | None]:
    """Name and lower-case argument of `name[argument]`; the argument is None if the action has another form.

    The result equals the groups of the original's expression, (.+)[(.+)], which takes seconds on repeated brackets.
    """
    line = action.partition("\n")[0]
    last = line.rfind("]")
    first = line.rfind("[", 1, max(last - 1, 0))
    return (line[:first], line[first + 1 : last].lower()) if first > 0 else (action, None)


@dataclass(frozen=True)
class Outcome:
    reward: float = 0.0
    done: bool = False
    accepted: bool = True
    details: Reward | None = None
    """Parts of the reward of a purchase; None for other actions."""


REFUSED = Outcome(accepted=False)


@dataclass
class Session:
    """One visit to the shop."""

    catalogue: Catalogue
    goal: Goal
    rng: random.Random
    """Random generator of the random search."""
    place: Place = "search"
    query: str = ""
    page: int = 0
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    """Chosen values by option name."""
    hits: Sequence[int] = ()
    """Numbers of the products that the query found."""
    text: str = ""
    """The observation: the text of the current page."""
    clickables: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._show_search()

    @property
    def has_search_bar(self) -> bool:
        return self.place == "search"

    def act(self, action: str) -> Outcome:
        """Search or click. Errors: EnvError for a purchase, as for `Catalogue.reward`."""
        name, argument = parse(action)
        if argument is not None and name == "search":
            self._show_results(argument, 1)
            return Outcome()
        if name == "click" and argument in self.clickables and argument != "search":
            return self._click(argument)
        return REFUSED

    def _click(self, name: str) -> Outcome:
        """Click by name. Button names come first, as in the original: an option named like a button acts as the
        button."""
        address = self._address()
        if name == "buy now":
            return self._buy()
        if name == "back to search":
            self._show_search()
        elif name == "next >" and address == "results":
            self._show_results(self.query, self.page + 1)
        elif name == "< prev" and address == "results":
            self._show_results(self.query, self.page - 1)
        elif name == "< prev" and address == "sub page":
            self._show_item()
        elif name == "< prev" and address == "item":
            self._show_results(self.query, self.page)
        elif name in _SUB_PAGES:
            self._show_sub_page(name)
        else:
            self._follow(name)
        return Outcome()

    def _address(self) -> Place:
        """The page as the original determines it: the first page name in the address, which also contains the query."""
        address = f"{self.query}{self.options}"
        if self.place == "results" or "search_results" in address:
            return "results"
        return "item" if "item_page" in address else self.place

    def _follow(self, name: str) -> None:
        """Follow a product's link or choose an option's value; if two options share a value, the last option's."""
        if self.place == "results":
            self.product = next(product for product in self._listed() if product.asin.lower() == name)
        elif self.product is not None:
            owner = [option for option, values in self.product.options.items() if name in values][-1]
            self.options[owner] = name
        self._show_item()

    def _buy(self) -> Outcome:
        assert self.product is not None
        price = self.catalogue.price(self.product.asin)
        details = self.catalogue.rewarded(self.goal, self.product.asin, price, self.options)
        self.place, self.clickables = "done", []
        self.text = SEPARATOR.join(_done(self.product.asin, self.options, details.total))
        return Outcome(details.total, done=True, details=details)

    def _show_search(self) -> None:
        self.place, self.product, self.options = "search", None, {}
        self._show(["WebShop", "Instruction:", *_node(self.goal["instruction_text"]), "Search"], ["search"])

    def _show_results(self, query: str, page: int) -> None:
        self.place, self.query, self.page, self.product, self.options = "results", query, page, None, {}
        self.hits = self.catalogue.hits(query, self.rng)
        buttons = ["< Prev", "Next >"] if page > 1 else ["Next >"]
        products = self._listed()
        shown = [f"Page {page} (Total results: {len(self.hits)})", *buttons]
        for product in products:
            shown += [*_node(product.asin), *_node(product.title), *_node(product.price_tag)]
        names = ["back to search", *(button.lower() for button in buttons)]
        self._show_framed(shown, names + [product.asin.lower() for product in products])

    def _listed(self) -> list[Product]:
        return [self.catalogue.at(number) for number in self.hits[(self.page - 1) * PAGE_SIZE : self.page * PAGE_SIZE]]

    def _show_item(self) -> None:
        assert self.product is not None
        self.place = "item"
        product, shown, names = self.product, ["< Prev"], ["back to search", "< prev"]
        for option, values in product.options.items():
            shown += [*_node(option), *(text for value in values for text in _node(value))]
        buttons = ["Description", "Features", "Reviews", "Buy Now"]
        shown += [*_node(product.title), f"Price: {product.price_tag}", "Rating: N.A.", *buttons]
        names += [button.lower() for button in buttons]
        names += [value for values in product.options.values() for value in values]
        self._show_framed(shown, names)

    def _show_sub_page(self, name: str) -> None:
        assert self.product is not None
        self.place = "sub page"
        shown = ["< Prev", *(text for node in _sub_page_nodes(self.product, name) for text in _node(node))]
        self._show_framed(shown, ["back to search", "< prev"])

    def _show_framed(self, shown: Iterable[str], names: Iterable[str]) -> None:
        """Show a page with the instruction and the link back at the top, as on every page but the first."""
        self._show(["Instruction:", *_node(self.goal["instruction_text"]), "Back to Search", *shown], names)

    def _show(self, shown: Iterable[str], names: Iterable[str]) -> None:
        self.text = SEPARATOR.join(shown)
        self.clickables = list(dict.fromkeys(names))


def _node(text: str) -> list[str]:
    """The texts shown for a text node: none or one."""
    if text.strip(_HTML_SPACES):
        return [text.strip()]
    return [""] if text and "\n" not in text else []


def _sub_page_nodes(product: Product, name: str) -> list[str]:
    if name == "description":
        return [product.description]
    if name == "features":
        return [f" {bullet}" for bullet in product.bullets]
    if name == "attributes":
        listed = [f" {attribute}" for attribute in product.attributes]
        return [*listed, product.category, product.query, product.product_category]
    return []  # the original shows no reviews either


def _done(asin: str, options: dict[str, str], reward: float) -> list[str]:
    listed = json.dumps(options, sort_keys=True)
    for character in "<>&'":
        listed = listed.replace(character, f"\\u{ord(character):04x}")
    return [
        *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"),
        *("Purchased", "asin", asin, "options", listed, "attrs", "None", "category", "None", "query", "None"),
        *("product category", "None", "Target", "asin", "options", "attrs", "price upper", "instuction text"),
        *("category", "product category", "query", "Goal", "None", "Reward"),
        *("Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"),
    ]
