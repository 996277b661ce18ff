"""By how much one example moves a sum: clip factors, and the reading of a loss."""
