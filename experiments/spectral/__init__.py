"""Recommendations from private sums: what they are worth beside popularity and what needs no privacy."""
