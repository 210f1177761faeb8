"""Base class and common types of the configuration's sections."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from hpc_es.config.yaml12 import seconds

MAX_NAME = 200


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError("must be a duration above 0")
    return value


def file_name(value: str) -> str:
    """Check a name that is used in file names. File systems allow 255 bytes; prefixes and suffixes need the rest."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("must consist of letters, digits, '.', '_' and '-', and begin with a letter or digit")
    if len(value) > MAX_NAME:
        raise ValueError(f"must have at most {MAX_NAME} characters")
    return value


Seconds = Annotated[float, BeforeValidator(seconds), AfterValidator(_positive)]
"""Seconds; YAML also takes 90s, 15m, 2h, 24:00:00 (see yaml12.py)."""


class Model(BaseModel):
    """Base class of sections: unknown keys are errors, values are frozen and finite."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # options of an environment may contain them
        protected_namespaces=(),
    )
