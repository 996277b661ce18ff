"""Private sums on a fixed-point grid: counts, moments, items that may be named at all, clicks by logit."""
