"""EANA (Berlowitz et al., RecSys 2022): the precision of four mechanisms, and how exposed their users are."""
