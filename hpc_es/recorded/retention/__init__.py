"""Measure how much general knowledge a version retains: MMLU-Pro and HellaSwag through lm-eval, on local files.

`measure` scores theta_v with the run's engine; `tasks` defines the three tasks; `model` presents our engines to
lm-eval; store/retention.py keeps the scores. Invariant: nothing is downloaded, and the measured parameters are theta_v
to the bit. lm-eval, which needs the extra `retention`, is imported only inside functions.
"""
