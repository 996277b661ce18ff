"""What every room stands on: refusals in graphs, files that are whole or absent, Keras as nobody promises it."""
