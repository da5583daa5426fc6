"""Loggers: where else the values of a run go, besides its own metrics. Rewind-clean: a step that is
done again replaces its earlier value. Must not import ray."""
