"""Automatic heuristic design: a model writes a program that decides within a given algorithm.

Files: `instances` draws the published instances; `tasks` says what programs decide and scores it, with `admissible` and
`colonies` for the heavy tasks; `evaluate` runs a program in the sandbox, in which `inside` asks it; `env` is the
environment; `reference` has programs and values to compare with.
"""

from hpc_es.envs.ahd.env import Ahd

__all__ = ["Ahd"]
