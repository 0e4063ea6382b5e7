"""The learning laboratory, which `bench/learning.py` runs.

matrix.toml    conditions, tasks, sets
matrix.py      a cell: one condition, task and seed, and its run file
pipeline.py    runs a cell as `echoswarm up` does, and reads its results from the log
colocated.py   runs a cell in one process without Kafka: the baseline
parts.py       what some conditions add to a run: a loss, an engine, a reward
statements.py  the claims, their tests and p-values
page.py        the table, and the picture
"""
