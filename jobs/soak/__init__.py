"""Soaks: what must hold every time, done many times."""
