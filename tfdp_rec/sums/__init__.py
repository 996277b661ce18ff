"""Private sums on a fixed-point grid: counts of items, and the items that may be named at all."""
