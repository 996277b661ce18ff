"""How far one example moves the clipped sum, as computed."""
