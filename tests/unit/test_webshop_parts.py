"""The parts that WebShop is made of: terms, ranking, fuzzy texts, nouns, files, and what is kept on disk."""

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_es.envs.webshop import Catalogue, catalogue, nouns, products, shelf
from hpc_es.envs.webshop.analysis import terms
from hpc_es.envs.webshop.fuzzy import token_set_ratio
from hpc_es.envs.webshop.index import PostingsBuilder, Ranking, decode_length, encode_length
from hpc_es.envs.webshop.pages import parse
from hpc_es.envs.webshop.porter import stem
from hpc_es.envs.webshop.prompt import read
from hpc_es.errors import ConfigError, EnvError

# --- terms -------------------------------------------------------------------------------------------------------

STEMS = {
    "caresses": "caress",
    "ponies": "poni",
    "cats": "cat",
    "agreed": "agre",
    "plastered": "plaster",
    "motoring": "motor",
    "conflated": "conflat",
    "hopping": "hop",
    "falling": "fall",
    "filing": "file",
    "happy": "happi",
    "sky": "sky",
    "relational": "relat",
    "conditional": "condit",
    "vietnamization": "vietnam",
    "formaliti": "formal",
    "electrical": "electr",
    "hopefulness": "hope",
    "goodness": "good",
    "adjustment": "adjust",
    "adoption": "adopt",
    "probate": "probat",
    "rate": "rate",
    "controlling": "control",
    "roll": "roll",
    "apology": "apolog",
    "possibly": "possibl",
    "playing": "plai",
    "boxing": "box",
    "snowing": "snow",
    "as": "as",
    "5x": "5x",
    "yes": "ye",
}


def test_words_are_stemmed_as_porter_says() -> None:
    assert {word: stem(word) for word in STEMS} == STEMS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The lamps, and IT'S red", ["lamp", "red"]),
        ("women's Men’s", ["women", "men"]),
        ("v1.5 3,000.50 a.b 1.a size:large snake_case", ["v1.5", "3,000.50", "a.b", "1", "size:larg", "snake_cas"]),
        ("don't o''clock", ["don't", "o", "clock"]),
        ("caf\u00e9 \u2605\u2605 \u2764\ufe0f 1\ufe0f\u20e3 \u00ae \U0001f44d\U0001f3fd \u261e\u2014", None),
        ("\u30c6\u30ec\u30d3 \u7d05\u8336 \u306e", ["\u30c6\u30ec\u30d3", "\u7d05", "\u8336", "\u306e"]),
        ("x" * 300, ["x" * 255, "x" * 45]),
        ("\u0130X \u0391\u03a3", ["ix", "\u03b1\u03c3"]),
    ],
)
def test_texts_are_cut_as_lucene_cuts_them(text: str, expected: list[str] | None) -> None:
    found = list(terms(text))
    if expected is None:
        expected = ["caf\u00e9", "\u2605", "\u2605", "\u2764\ufe0f", "1\ufe0f\u20e3", "\u00ae"]
        expected += ["\U0001f44d\U0001f3fd", "\u261e"]
    assert found == expected


@given(st.text(alphabet="ab1_.:,;' \"-\n"))
def test_the_fast_grammar_for_ascii_finds_the_same_words_as_the_full_one(text: str) -> None:
    from hpc_es.envs.webshop.analysis import _ASCII_WORD, _unicode_word

    assert _ASCII_WORD.findall(text) == _unicode_word().findall(text)


# --- ranking -----------------------------------------------------------------------------------------------------


def _ranking(*documents: str) -> Ranking:
    builder = PostingsBuilder()
    for document in documents:
        builder.add(terms(document))
    return Ranking(builder.build(), np.arange(len(documents), dtype=np.int32))


def test_the_rarer_word_and_the_shorter_text_count_more() -> None:
    ranking = _ranking("red lamp", "lamp", "lamp for a very long shelf in the hall", "tea")
    assert ranking.search("red lamp", 10).tolist() == [0, 1, 2]
    assert ranking.search("lamp", 1).tolist() == [1]
    assert ranking.search("nothing the", 10).tolist() == []


def test_equal_scores_are_in_the_order_of_their_rank() -> None:
    builder = PostingsBuilder()
    for _ in range(5):
        builder.add(["lamp"])
    ranking = Ranking(builder.build(), np.array([3, 1, 4, 0, 2], np.int32))
    assert ranking.search("lamp", 3).tolist() == [3, 1, 4]


def test_scores_are_bm25_as_lucene_has_it() -> None:
    """Two documents of 1 and 3 terms, average 2: idf ln(1.2), tf part 1 / (1 + k1 * (1 - b + b * length / 2))."""
    builder = PostingsBuilder()
    builder.add(["lamp"])
    builder.add(["lamp", "red", "red"])
    postings = builder.build()
    where = postings.find("lamp")
    assert where is not None
    assert postings.dampings[where].tolist() == pytest.approx([1 + 1 / 0.72, 1 + 1 / 1.08])
    red = postings.find("red")
    assert red is not None
    assert postings.dampings[red].tolist() == pytest.approx([1 + 2 / 1.08])


def test_lengths_keep_three_bits_after_the_leading_one() -> None:
    assert [encode_length(n) for n in (0, 23, 24, 39, 40)] == [0, 23, 24, 39, 40]
    assert [decode_length(encode_length(n)) for n in (55, 56, 57, 255, 256, 1000)] == [54, 56, 56, 248, 248, 984]
    assert all(encode_length(decode_length(byte)) == byte for byte in range(200))


# --- fuzzy texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "ratio"),  # by thefuzz 0.22.1
    [
        ("machine wash", "wash machine, cold", 100),
        ("a2-wine", "('color', 'b3-wine')", 73),
        ("wine", "('color', 'b3-wine')", 100),
        ("stainless steel", "steel frame", 62),
        ("size 7", "size 8", 83),
        ("Queen_Size", "queen size", 100),
        ("caf\u00e9", "caf", 100),
        ("", "red", 0),
        ("\u2605", "\u2605", 0),
        ("\u0130x", "ix", 100),
        ("navy blue", "navy blu", 94),
    ],
)
def test_texts_are_compared_as_thefuzz_compares_them(one: str, two: str, ratio: int) -> None:
    assert token_set_ratio(one, two) == ratio


@given(st.text(alphabet="abc \u00e9_-", max_size=12), st.text(alphabet="abc \u00e9_-", max_size=12))
def test_the_comparison_is_symmetric_and_bounded(one: str, two: str) -> None:
    assert 0 <= token_set_ratio(one, two) == token_set_ratio(two, one) <= 100


# --- nouns -------------------------------------------------------------------------------------------------------


def test_the_nouns_that_ship_are_the_models(shared_data: Path) -> None:
    pytest.importorskip("spacy")
    for product in list(products.read(products.find(shared_data / "webshop")))[:40]:
        assert nouns.nouns(product.title) == nouns._by_model(product.title)


def test_catalogues_without_spacy_have_their_nouns(shared_data: Path) -> None:
    for folder in (shared_data / "webshop", catalogue.made_up()):
        assert all(nouns.key(product.title) in nouns._shipped() for product in products.read(products.find(folder)))


def test_a_new_title_without_spacy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nouns, "_MODELS", ("no_such_model",))
    nouns._model.cache_clear()
    with pytest.raises(EnvError, match=r"pip install 'hpc_es\[webshop\]'"):
        nouns.nouns("A title that nobody has seen")


# --- answers -----------------------------------------------------------------------------------------------------


@given(st.text("ab[]\n", max_size=12))
@example("a[b]\n]")
@example("[[a]]]")
def test_an_action_is_parsed_as_the_originals_expression_parses_it(action: str) -> None:
    match = re.match(r"(.+)\[(.+)\]", action)
    assert parse(action) == ((match[1], match[2]) if match else (action, None))


@given(st.lists(st.sampled_from(["<action>", "</action>", "</ACTION>", "a", "\u0130"]), max_size=8).map("".join))
def test_the_last_tags_of_an_answer_count(answer: str) -> None:
    tagged = re.findall("<action>(.*?)</action>", answer, re.DOTALL | re.IGNORECASE)
    assert read(answer) == (tagged[-1].strip().lower() if tagged else answer.strip())


def test_no_answer_takes_long_to_read() -> None:
    began = time.perf_counter()
    for text in ("[" * 50_000, "[" * 30_000 + "\n" + "]" * 30_000, "</action>" + "<action>" * 8000):
        parse(read(text))
    assert time.perf_counter() - began < 3


# --- files and what is kept on disk ------------------------------------------------------------------------------


def _same(one: Catalogue, two: Catalogue) -> bool:
    queries = ("lamp", "<c> beauty", "<a> dry hair", "women's rubber sole")
    return list(one.goals) == list(two.goals) and all(one.search(query) == two.search(query) for query in queries)


def test_a_catalogue_on_disk_is_the_one_in_memory_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = Catalogue()
    monkeypatch.setattr(shelf, "SMALL_BYTES", 0)
    assert _same(in_memory, Catalogue(cache_dir=tmp_path))

    def never(*_: Any) -> Any:
        raise AssertionError("made twice")

    for module, name in ((shelf, "build"), (catalogue, "draw"), (catalogue, "_index")):
        monkeypatch.setattr(module, name, never)
    again = Catalogue(cache_dir=tmp_path)
    assert _same(in_memory, again)
    assert isinstance(again._shelf.arrays["records"], np.memmap)


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "SMALL_BYTES", 0)
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for source in catalogue.made_up().glob("items_*"):
        (data / source.name).write_bytes(source.read_bytes())
    before = len(Catalogue(data, cache_dir=cache))
    items = json.loads((data / "items_shuffle_1000.json").read_text())
    (data / "items_shuffle_1000.json").write_text(json.dumps(items[:10]))
    assert before == 60
    assert len(Catalogue(data, cache_dir=cache)) == 10


def test_files_may_be_compressed_and_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_CHUNK", 100)
    for source in catalogue.made_up().glob("items_*"):
        (tmp_path / f"{source.name}.gz").write_bytes(gzip.compress(source.read_bytes()))
    assert list(products.read(products.find(tmp_path))) == list(products.read(products.find(catalogue.made_up())))


def test_the_invented_catalogue_drops_the_same_products_as_the_original() -> None:
    items = json.loads((catalogue.made_up() / "items_shuffle_1000.json").read_text())
    asins = [item["asin"] for item in items]
    assert len(asins) == 62
    assert [product.asin for product in products.read(products.find(catalogue.made_up()))] == asins[:60]


def test_half_an_emoji_does_not_stop_a_catalogue(tmp_path: Path) -> None:
    items = json.loads((catalogue.made_up() / "items_shuffle_1000.json").read_text())[:2]
    items[0]["name"] = "Lamp \ud83d"
    (tmp_path / "items_shuffle.json").write_text(json.dumps(items))
    (tmp_path / "items_ins_v2.json").write_text("{}")
    cut = Catalogue(tmp_path)
    assert cut.product(items[0]["asin"]).title == "Lamp ?"
    assert cut.search("\ud83d") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"as', "cannot be read"),
        ('[{"asin": "A1"}]', "is not a WebShop product"),
        ("[3]", "is not a WebShop product"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "items_shuffle.json").write_text(content)
    (tmp_path / "items_ins_v2.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"items_shuffle\.json.*{message}"):
        Catalogue(tmp_path)


def test_a_compressed_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    whole = gzip.compress((catalogue.made_up() / "items_shuffle_1000.json").read_bytes())
    (tmp_path / "items_shuffle.json.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "items_ins_v2.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"items_shuffle\.json\.gz cannot be read"):
        Catalogue(tmp_path)


def test_a_folder_without_a_catalogue_says_which_files_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no catalogue: it needs items_shuffle\.json and items_ins_v2\.json"):
        Catalogue(tmp_path)


def test_special_queries_list_by_attribute_category_and_query_in_the_order_of_the_file() -> None:
    made_up = Catalogue()
    found = [made_up.product(asin) for asin in made_up.search("<c> beauty")]
    assert found
    assert all(product.category == "beauty" for product in found)
    assert [p.asin for p in found] == sorted(p.asin for p in found)
    assert all(made_up.product(asin).query == "hdmi cables" for asin in made_up.search("<q> hdmi cables"))
    assert all("dry hair" in made_up.product(asin).attributes for asin in made_up.search("<a> dry hair"))
    assert made_up.search("<a> no such thing") == made_up.search("<c>") == []
    assert len(set(made_up.search("<r>"))) == 50


def test_an_unknown_asin_is_an_error() -> None:
    with pytest.raises(EnvError, match="no product has the ASIN 'B000'"):
        Catalogue().price("B000")
