"""Which models an engine can take, as far as that is known without loading one.

The tables of transformers are read from its source: importing it takes five seconds or more, and a run that cannot
work should say so at once. Invariant: what is not known for certain to be impossible is left to the engine.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_es.errors import ModelError

_TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""In transformers: model types that generate text."""


def check_supported(engine: str, path: Path, described: Mapping[str, Any]) -> None:
    """`described`: the model's config.json. Errors: ModelError when the engine has no code for such a model."""
    if engine != "transformers" or not (known := set(_generating_types())):
        return
    model_type = described.get("model_type")
    if model_type not in known:
        raise ModelError(
            f"engine.kind=transformers cannot generate text with {path}: model_type={model_type!r} in its config.json "
            f"is none of the {len(known)} that the installed transformers has code for; install a newer transformers, "
            "or try engine.kind=vllm"
        )


def _generating_types() -> Iterator[str]:
    """Nothing where transformers is missing or looks different."""
    package = find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return
    source = Path(package.submodule_search_locations[0], "models", "auto", "modeling_auto.py")
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError):
        return
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in _TABLES for t in node.targets):
            for entry in ast.walk(node.value):
                if isinstance(entry, ast.Tuple) and entry.elts and isinstance(entry.elts[0], ast.Constant):
                    yield str(entry.elts[0].value)
