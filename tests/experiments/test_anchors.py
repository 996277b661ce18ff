"""The published protocols, on files small enough to check by hand; the tables they print."""

import json

import numpy as np
import pytest

from experiments import anchors


@pytest.fixture
def ratings(tmp_path):
    """User 1 rates items 1 to 6 in order, item 3 badly; user 2 has three liked items at one time; user 3 too few."""
    rows = [(1, 1, 5, 10), (1, 2, 4, 20), (1, 3, 1, 25), (1, 4, 5, 30), (1, 5, 4, 40), (1, 6, 2, 50)]
    rows += [(2, 7, 4, 5), (2, 8, 4, 5), (2, 9, 4, 5), (3, 1, 5, 1), (3, 2, 2, 2), (3, 4, 5, 3)]
    path = tmp_path / "ml-100k.inter"
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    path.write_text("\n".join([*lines, *("\t".join(map(str, row)) for row in rows)]) + "\n")
    return path


def test_the_course_projects_protocol(ratings):
    protocol = anchors.cs_670(ratings)
    assert (protocol.num_items, protocol.delta, protocol.metric) == (1682, 1e-5, "nDCG@10")
    assert protocol.counted[0].tolist() == [1, 2] and protocol.told[0].tolist() == [1, 2, 4]
    assert protocol.target[0] == 5 and protocol.excluded[0].tolist() == [1, 2, 3, 4]  # disliked ones are not ranked
    assert len(protocol.target) == 2  # user 3 likes two items
    second = [*protocol.counted[1], protocol.told[1][-1], protocol.target[1]]
    assert sorted(second) == [7, 8, 9] and second == sorted(second, key=_digest)


def _digest(item):
    import hashlib

    return hashlib.sha256(f"2:{item}:2026".encode()).hexdigest()


def test_next_items_and_what_is_asked_to_choose_by(tmp_path):
    (tmp_path / "some.txt").write_text("1 1 2 3 4\n2 2 1\n3 4 3 2\n")
    protocol = anchors.next_item(tmp_path / "some.txt")
    assert [each.tolist() for each in protocol.counted] == [[1, 2], [4]]
    assert [each.tolist() for each in protocol.told] == [[1, 2, 3], [4, 3]] and protocol.target.tolist() == [4, 2]
    earlier = anchors.next_item(tmp_path / "some.txt", validate=True)
    assert [each.tolist() for each in earlier.counted] == [[1], [4]] and earlier.target.tolist() == [3, 3]


def test_ties_count_against_the_recommender_and_excluded_items_do_not():
    one = anchors.Protocol("made up", 12, [], [np.array([1])], [np.array([1])], np.array([2]), 1e-6, "nDCG@10")
    assert one.measured(lambda told: np.zeros((1, 12), np.float32))[0] == 0  # ten others are as good
    best = np.arange(12, 0, -1, dtype=np.float32)[None]
    assert one.measured(lambda told: best)[0] == 1  # item 1 is better, and excluded
    best[0, 5] = best[0, 1]
    assert one.measured(lambda told: best)[0] == pytest.approx(1 / np.log2(3))


def test_it_prints_a_table(tmp_path, capsys):
    rng = np.random.default_rng(0)
    walks = [(rng.integers(40) + np.cumsum(rng.integers(1, 4, 8))) % 40 + 1 for _ in range(300)]
    (tmp_path / "walks.txt").write_text("".join(f"{u} {' '.join(map(str, walk))}\n" for u, walk in enumerate(walks, 1)))
    asked = ["next-item", str(tmp_path / "walks.txt"), "--epsilon", "8", "--seeds", "2", "--ridges", "10"]
    (tmp_path / "near.json").write_text(json.dumps({item: [item // 5] for item in range(1, 41)}))
    asked += ["--features", str(tmp_path / "near.json")]
    assert anchors.main(asked) == 0
    said = capsys.readouterr()
    cells = [line.split("|") for line in said.out.splitlines() if "|" in line]
    rows = {name.strip(): value.split()[0] for _, name, value, *_ in cells}
    assert float(rows["private sums, near pairs"]) > float(rows["popularity, no privacy"])
    assert {"EASE, ridge 10, no privacy", "private sums, by a vote", "private sums, by a vote, features"} <= set(rows)
    assert "by a vote, ε 8" in said.err


def test_features_are_read_from_either_kind_of_file(tmp_path):
    (tmp_path / "some.json").write_text('{"3": [7, 9], "1": [7], "8": [1]}')
    assert anchors.features_in(str(tmp_path / "some.json"), 3) == [[7], [], [7, 9]]
    rows = "item_id:token\tmovie_title\trelease_year\tclass\n2\tAlien\t1979\tHorror Sci-Fi\n1\tOther\t\tDrama\n"
    (tmp_path / "films.item").write_text(rows)
    assert anchors.features_in(str(tmp_path / "films.item"), 3) == [["Drama"], ["Horror", "Sci-Fi", 395], []]
