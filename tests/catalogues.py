"""Catalogues of news and their ids, for the tests of federated training."""

from tfdp_rec.datasets.mind.files import NewsCatalogue


def named(*rows):
    """The ids of the news that stand in these rows of `catalogue_of`."""
    return tuple(f"N{row}" for row in rows)


def catalogue_of(features):
    """A catalogue of features alone, row 0 the anonymous news."""
    ids = ("", *named(*range(1, len(features["title"]))))
    return NewsCatalogue(ids, features, (), ("", "politics", "sport"), ("", "a", "b"))
