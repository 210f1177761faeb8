"""WebShop's reward of a purchase, with all its quirks.

`total = r_type * (attributes + options + price) / (num_attributes + num_options + 1)`. Invariant: equal to the original
to the last bit. One quirk limits what can be reached: if a goal has its options as a dict, they are compared as (name,
value) tuples, so their text contains quotes and brackets, and colours are recognised only if they stand alone. About
one synthetic goal in fifteen therefore cannot be met at all (see `Catalogue.ceiling`). Source: WebShop's
`engine/goal.py` and `engine/normalize.py` (Yao et al., 2022).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_es.envs.webshop.fuzzy import token_set_ratio
from hpc_es.envs.webshop.nouns import nouns
from hpc_es.envs.webshop.products import Product

ALIKE = 85
"""Texts with a ratio above this count as equal."""

_COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
)
COLOURS = tuple(_COLOURS.split())
"""Colours in the original's order: the first that matches counts."""


@dataclass(frozen=True)
class Reward:
    total: float
    r_type: float
    r_att: float
    r_option: float | None
    """None if the goal has no options."""
    r_price: bool
    query_match: bool
    category_match: bool
    title_score: float


def reward(product: Product, goal: Mapping[str, Any], price: float, options: Mapping[str, str]) -> Reward:
    """The reward of buying `product` at `price` with these options (name to value) for a goal. Errors: see `nouns`."""
    r_type, query_match, category_match, title_score = _type(product, goal)
    wanted = goal["goal_options"]
    num_attributes = sum(_has(product, attribute) for attribute in goal["attributes"])
    num_options = _num_matching(list(options.values()), list(wanted.items()) if isinstance(wanted, dict) else wanted)
    r_price = price <= goal["price_upper"]
    share = (num_attributes + num_options + r_price) / (len(goal["attributes"]) + len(wanted) + 1)
    return Reward(
        total=share * r_type,
        r_type=r_type,
        r_att=num_attributes / len(goal["attributes"]),
        r_option=num_options / len(wanted) if wanted else None,
        r_price=r_price,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def _type(product: Product, goal: Mapping[str, Any]) -> tuple[float, bool, bool, float]:
    query_match = product.query == goal["query"]
    category_match = len(_categories(product.product_category) & _categories(goal["product_category"])) >= 2
    wanted = nouns(goal["name"])
    title_score = len(set(nouns(product.title)) & set(wanted)) / len(wanted) if wanted else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0.0:
        r_type = 0.0
    return r_type, query_match, category_match, title_score


def _categories(path: str) -> set[str]:
    return {step.strip() for step in path.split("›")}


def _has(product: Product, attribute: str) -> bool:
    if any(token_set_ratio(own, attribute) > ALIKE for own in product.attributes):
        return True
    return (
        attribute in product.title.lower()
        or attribute in " ".join(product.bullets).lower()
        or attribute in product.description.lower()
    )


def _num_matching(bought: list[str], wanted: list[Any]) -> int:
    """Number of wanted options that are similar to some bought option."""
    bought_texts = [str(_colour(option)) for option in bought]
    wanted_texts = [str(_colour(option)) for option in wanted]
    return sum(any(token_set_ratio(one, text) > ALIKE for one in bought_texts) for text in wanted_texts)


def _colour(option: Any) -> Any:
    """The first colour that an option contains; a (name, value) tuple contains a colour only if one of the two is
    it."""
    return next((colour for colour in COLOURS if colour in option), option)
