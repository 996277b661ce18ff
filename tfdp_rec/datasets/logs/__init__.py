"""Logs of (user, item, time, features): read from files or frames once, then mapped from disk, grouped by user."""

from tfdp_rec.core.ground.lazy_imports import optional

optional("pyarrow", "job")  # what the modules here stand on
