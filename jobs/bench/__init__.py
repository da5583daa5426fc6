"""The benchmarks: what a failure costs under our service and its rivals, what a new node costs, and
what peace costs.

`python -m jobs.bench recovery`, `growth` and `overhead`. Nothing under `elastic/` imports this
package.
"""
