"""Numbers and tables of runs, and how certain they are. Nothing here draws, so nothing imports matplotlib.

To add a table, write a function that takes a run (or runs, see runs.py) and returns a pandas DataFrame. To show it in
reports, add a `Table` in report/tables.py. A table for people is a `TextTable` (text_table.py); csv_files.py writes
DataFrames as CSV files.
"""
