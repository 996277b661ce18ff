"""What an event costs: events, their composition, and the noise that a target ε asks for."""
