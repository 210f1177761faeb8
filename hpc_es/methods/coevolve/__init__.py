"""Prompt-parameter co-evolution: a pool of heuristics evolves beside the weights that propose them.

Files: `prompts` writes what the model is asked and reads its answers; `population` ranks, selects and keeps heuristics;
`rewards` turns objectives into rewards. All of it is pure: what it returns follows from the pool and the run's seed.
Source: EoH (Liu et al., 2024) as coded in Agentic ESOpt (Zheng et al., 2026).
"""
