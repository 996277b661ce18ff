"""Steps of a row's own size against one size for all: what each is worth at an ε."""
