"""What people submit: pretraining and benchmarks, with their text and their model.

`elastic` never imports it.
"""
