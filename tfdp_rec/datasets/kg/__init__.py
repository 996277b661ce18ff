"""Timelines of individuals over a graph of entities."""
