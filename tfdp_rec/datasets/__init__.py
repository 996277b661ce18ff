"""Data sets: `files` reads what is published, `generated` makes data of the same shape. NumPy alone, no TensorFlow."""
