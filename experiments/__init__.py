"""Published experiments repeated, and measurements of speed and memory: a folder each, outside the product.

    python -m experiments.eana movielens | kg       EANA: precision and exposure
    python -m experiments.adafest                   AdaFEST: gradient size reduction
    python -m experiments.news                      PrivateRec: federated news
    python -m experiments.bench NAME                time and memory

From the root of a checkout; each explains itself with --help.
"""
