"""Measurements of speed and memory, each a module reached as `python -m experiments.bench NAME`."""
