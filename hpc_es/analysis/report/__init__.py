"""The report of a run or several: one HTML page, with its figures as PNG files and its tables as CSV files.

`figures.py` and `tables.py` list what a report shows, in order; `page.py` is the HTML; `build.py` writes the files.
"""
