"""Noise that takes back what it added: DPFTRL with one plan, and streams of data for it."""
