"""Find the data of tasks: files that are not part of hpc_es, such as WebShop's catalogue or the problems of DAPO.

HPC_ES_DATA names the folder that holds webshop/, math/, sudoku/, retention/ and so on. The default is data/ in the
working directory.
"""

import os
from pathlib import Path

from hpc_es.errors import ConfigError

VARIABLE = "HPC_ES_DATA"
DEFAULT = "data"


def data_path(given: Path) -> Path:
    """Return the path of a data file or folder. A relative path is searched in the working directory, then in the data
    folder; an absolute path is returned unchanged.

    Errors: ConfigError if a relative path is in neither.
    """
    root = os.environ.get(VARIABLE)
    in_data_folder = Path(root or DEFAULT) / given
    for candidate in (given, in_data_folder):
        if given.is_absolute() or candidate.exists():
            return candidate
    state = f"{VARIABLE}={root}" if root else f"{VARIABLE} is not set"
    raise ConfigError(
        f"there is no {given} in the working directory ({Path.cwd()}) and no {in_data_folder} ({state}): set "
        f"{VARIABLE} to the folder that holds {given}, or give an absolute path"
    )
