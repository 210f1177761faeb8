"""Questions about pages: from the DocVQA challenge's files, or about generated pages.

Invariant: task i of a split is always the same question about the same page, and no page of the held-out split appears
in training (the challenge splits by document; the seeds of generated pages differ between splits).
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from hpc_es.data import data_path
from hpc_es.envs.docvqa import pages
from hpc_es.errors import ConfigError, EnvError
from hpc_es.seeds import derive

Split = Literal["train", "eval"]

_FILES = {"train": "train_v1.0*.json", "eval": "val_v1.0*.json"}
"""Annotation file of each split. The answers of the challenge's test split are not public, so evaluation uses the
validation split."""
_LAYOUTS = ("", "spdocvqa_qas", "train", "val")
"""Folders of an unpacked download, in its old and new layout, that may hold an annotation file."""
_PAGE_FOLDERS = ("documents", "spdocvqa_images", "images")
_SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Question:
    text: str
    accepted: tuple[str, ...]
    """The answers that count as right."""
    suffix: str = ".png"
    """Suffix of the page's file name."""


class Questions(ABC):
    """The questions of one split."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def id(self, task: int) -> str:
        """The question's name in its data."""

    @abstractmethod
    def question(self, task: int) -> Question: ...

    @abstractmethod
    def page(self, task: int) -> bytes:
        """Contents of the page's image file. Errors: EnvError when it cannot be read."""


class Drawn(Questions):
    """Generated pages, each drawn for one question."""

    def __init__(self, split: Split, num_tasks: int, seed: int) -> None:
        self._split, self._num_tasks, self._seed = split, num_tasks, seed

    def __len__(self) -> int:
        return self._num_tasks

    def id(self, task: int) -> str:
        return f"{self._split} {self._seed} {task}"

    def question(self, task: int) -> Question:
        drawn = self._drawn(task)
        return Question(drawn.question, drawn.accepted)

    def page(self, task: int) -> bytes:
        return self._drawn(task).image

    def _drawn(self, task: int) -> pages.Page:
        return _draw(derive(self._seed, "docvqa", self._split, task))


_draw = lru_cache(maxsize=64)(pages.draw)
"""Cached, because all members of a version are asked about the same pages."""


@dataclass(frozen=True)
class _Entry:
    id: str
    question: Question
    page: Path


class Official(Questions):
    """Questions from DocVQA's annotation file, in an order that spreads the first tasks over all documents."""

    def __init__(self, annotations: Path) -> None:
        """Read the annotation file. Errors: ConfigError if it is damaged or has no answers, or if a page is missing."""
        find = _PageFinder(annotations.parent)
        read = [_entry(entry, number, annotations, find) for number, entry in enumerate(_entries(annotations))]
        self._entries = sorted(read, key=lambda entry: derive(0, "docvqa", entry.id))

    def __len__(self) -> int:
        return len(self._entries)

    def id(self, task: int) -> str:
        return self._entries[task].id

    def question(self, task: int) -> Question:
        return self._entries[task].question

    def page(self, task: int) -> bytes:
        path = self._entries[task].page
        try:
            return path.read_bytes()
        except OSError as error:
            raise EnvError(f"the page {path} cannot be read: {error}") from error


def official(data_dir: Path, split: Split) -> Official:
    """The questions of a split, read once per process, even if many environments are created at once.

    Errors: ConfigError when `data_dir` has no annotation file of the split; those of `Official`.
    """
    with _reading:
        return _official(data_path(data_dir), split)


_reading = threading.Lock()


@cache
def _official(data_dir: Path, split: Split) -> Official:
    pattern = _FILES[split]
    for folder in (data_dir / layout for layout in _LAYOUTS):
        if found := sorted(folder.glob(pattern)):  # files with and without question types hold the same questions
            return Official(found[0])
    raise ConfigError(
        f"data_dir={data_dir} holds no {pattern} for split={split}; give the folder of DocVQA's annotations (Task 1 of "
        f"the challenge's download page), with the pages in {' or '.join(_PAGE_FOLDERS)}"
    )


def _entries(path: Path) -> list[Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; fetch it again") from error
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} has no list `data` of questions, so it is not an annotation file of DocVQA")
    return entries


def _entry(entry: Any, number: int, path: Path, find: "_PageFinder") -> _Entry:
    """Check and convert one question of an annotation file. Errors: ConfigError naming the entry and the fault."""
    where = f"{path}, data[{number}]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {type(entry).__name__}; each question is an object")
    for key, kinds in (("questionId", (int, str)), ("question", (str,)), ("image", (str,))):
        if not isinstance(entry.get(key), kinds):
            raise ConfigError(f"{where} has {key}={entry.get(key)!r}; the file is damaged, fetch it again")
    accepted = entry.get("answers")
    if not (isinstance(accepted, list) and accepted and all(isinstance(each, str) for each in accepted)):
        raise ConfigError(
            f"{where} has answers={accepted!r}; it must be a list of texts, as in train_v1.0 and val_v1.0 (the test "
            "split has no answers and cannot be scored here)"
        )
    page = find(entry["image"])
    if page is None:
        raise ConfigError(
            f"{where} needs the page {entry['image']}, which is not below {path.parent}, nor in "
            f"{' or '.join(_PAGE_FOLDERS)} there or one folder above: unpack the pages there"
        )
    question = Question(entry["question"], tuple(accepted), page.suffix.lower())
    return _Entry(str(entry["questionId"]), question, page)


class _PageFinder:
    """Finds pages by their name in the annotations. Each folder is listed once, because it may hold thousands of files
    on a slow disk."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._listed: dict[Path, frozenset[str]] = {}

    def __call__(self, image: str) -> Path | None:
        folder, _, name = image.rpartition("/")
        if not name.lower().endswith(_SUFFIXES) or image.startswith("/") or ".." in folder.split("/"):
            return None
        return next((place / name for place in self._places(folder) if name in self._names(place)), None)

    def _places(self, folder: str) -> Iterator[Path]:
        yield self._home / folder
        for home in (self._home, self._home.parent):
            yield from (home / each for each in _PAGE_FOLDERS)

    def _names(self, folder: Path) -> frozenset[str]:
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(entry.name for entry in folder.iterdir())
            except OSError:  # only one of several possible folders
                self._listed[folder] = frozenset()
        return self._listed[folder]
