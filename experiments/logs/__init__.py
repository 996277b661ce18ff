"""A log of one's own, from files to Poisson batches: how long, how much memory."""
