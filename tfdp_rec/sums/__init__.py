"""Private sums on a fixed-point grid: counts of items, items that may be named at all, clicks by predicted logit, moments."""
