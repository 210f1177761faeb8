"""Check whether an engine supports a model, as far as possible without loading it.

The tables of transformers are read from its source, because importing it takes five seconds or more and a run that
cannot work should say so at once. Invariant: a model is refused here only if it certainly cannot work; the engine
decides on all others.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_es.errors import ModelError

_TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""Names of the tables in transformers that list model types which generate text."""


def check_supported(engine: str, path: Path, described: Mapping[str, Any]) -> None:
    """Refuse a model that the engine has no code for. `described`: its config.json. Errors: ModelError."""
    if engine != "transformers" or not (known := set(_generating_types())):
        return
    model_type = described.get("model_type")
    if model_type not in known:
        raise ModelError(
            f"engine.kind=transformers cannot generate text with {path}: model_type={model_type!r} in its config.json "
            f"is not one of the {len(known)} types that the installed transformers supports; install a newer "
            "transformers, or try engine.kind=vllm"
        )


def _generating_types() -> Iterator[str]:
    """Model types that the installed transformers supports; nothing if it is missing or its source looks different."""
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
