"""What `tfdp-rec train --user ... --item ...` does: a log of one's own to a private, served recommender."""
