"""What every room stands on: refusals in graphs, files that are whole or absent, what Keras does not promise."""
