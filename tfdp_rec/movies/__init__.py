"""What `tfdp-rec train` does: data to trained, accounted and exported recommender, and a report of it."""
