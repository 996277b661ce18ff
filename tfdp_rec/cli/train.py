"""`tfdp-rec train`: a log of one's own, MovieLens files or generated timelines to a private recommender."""

from tfdp_rec.job.command import HELP, add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]
