"""Lazy noise: drawn for a row when the row is next read."""
