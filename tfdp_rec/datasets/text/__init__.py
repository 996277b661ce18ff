"""Short texts with a label."""
