"""Layers for losses over candidates: scores of a vocabulary, scores of a tower, drawn negatives."""
