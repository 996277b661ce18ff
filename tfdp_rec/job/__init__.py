"""`tfdp-rec train`: log → budget → recommender → test → report → answers, whatever the log and the recommender are."""
