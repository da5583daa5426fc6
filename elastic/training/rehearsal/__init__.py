"""A rehearsal: a training function run, killed, and resumed here, before it is run for real.

`python -m elastic.training.rehearsal PLAN` runs one, PLAN being the JSON of a `Plan`; the verb
`elastic rehearse` does so. Needs no cluster. Must not import ray.
"""

from __future__ import annotations
