"""The benchmarks: what a failure and a preemption cost under our service and its rivals, what a new
node costs, and what peace costs.

`python -m jobs.bench recovery`, `growth`, `preemption` and `overhead`. Nothing under `elastic/`
imports this package.
"""
