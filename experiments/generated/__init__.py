"""Data made from nothing but a seed, with the truth known, for studies, tutorials and tests."""
