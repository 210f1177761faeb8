"""Mathematics with a tool: an agent reasons, runs programs in a sandbox, and gives its answer.

Files: `env` plays, `prompt` knows what the agent is told and how its answers are read, `judge` compares an answer with
the right one, and `examples.jsonl` has a few made-up problems.
"""

from hpc_es.envs.math_tool.env import MathTool

__all__ = ["MathTool"]
