"""MovieLens: timelines of users and the movies they watched."""
