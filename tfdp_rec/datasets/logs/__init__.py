"""Logs of (user, item, time, features): read from files or frames once, then mapped from disk, grouped by user."""
