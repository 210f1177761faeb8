"""What a model still knows: MMLU-Pro and HellaSwag through lm-eval, on local files, for any version of a run.

`measure` scores theta_v with the engine that the run had; `tasks` defines the three tasks, `model` is lm-eval's view of
our engines; store/retention.py keeps the scores. Invariant: nothing is fetched from anywhere, and what is measured is
theta_v to the bit. Only the functions import lm-eval, which needs the extra `retention`.
"""
