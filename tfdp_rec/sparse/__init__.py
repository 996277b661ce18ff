"""Mechanisms that add noise to some rows: EANA with its bound, AdaFEST, FEST, exponential selection."""
