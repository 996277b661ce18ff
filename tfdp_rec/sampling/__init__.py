"""How units come into batches, and the proof that they did."""
