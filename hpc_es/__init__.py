"""Post-training of LLM agents by evolution strategies on Slurm clusters."""

__version__ = "0.1.0"
