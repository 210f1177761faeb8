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
    """Path of a data file or folder. An absolute path is used as it is; a relative one is looked for in the working
    directory first, as on any command line, and then in the data folder.

    Errors: ConfigError when a relative path is in neither.
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
