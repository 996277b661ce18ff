"""Criteo: logs of shown advertisements, with 13 numbers and 26 categories each."""
