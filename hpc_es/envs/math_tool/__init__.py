"""Mathematics with a tool: an agent reasons, runs programs in a sandbox, and answers.

Files: `env` is the environment, `prompt` writes the prompts and parses answers, `judge` compares an answer with the
right one, and `examples.jsonl` has a few invented problems.
"""

from hpc_es.envs.math_tool.env import MathTool

__all__ = ["MathTool"]
