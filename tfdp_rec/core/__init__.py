"""What one ε rests on: four rooms, read from the ground up."""
