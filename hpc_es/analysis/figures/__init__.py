"""Figures of runs: each module draws the numbers of one or two modules of `statistics`.

To add a figure, write `plot_NAME(runs) -> Figure` with the helpers of canvas.py, taking its numbers from `statistics`,
and name it in plots.py, which is what notebooks use. To show it in reports, add an `Entry` in report/figures.py.
A figure without data raises NothingToShow with the reason.
"""
