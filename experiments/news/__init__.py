"""PrivateRec (Liu et al., 2022): private federated news recommendation."""
