"""The benchmarks: what a failure costs under our service and its rivals, and what peace costs.

`python -m jobs.bench recovery` and `python -m jobs.bench overhead`. Nothing under `elastic/`
imports this package.
"""
