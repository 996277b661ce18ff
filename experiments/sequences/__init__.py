"""Sequences: a private causal transformer against private sums of ordered histories, by the number of users."""
