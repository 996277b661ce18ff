"""The MIND reader on hand-written files, and on what the generator of `experiments` writes."""

import numpy as np
import pytest

from experiments.generated.news_readers import SyntheticNews
from tfdp_rec.datasets.mind import files as mind

NEWS = (
    "N1\tsport\tgolf\tA big win\tThe golfer won\turl\t[]\t[]\n"
    "N2\thealth\tdiet\tEat a big apple\t\turl\t[]\t[]\n"
)
GOOD = "1\tU1\t11/11/2019 9:05:58 AM\tN1 N9\tN1-0 N2-1 N8-0\n"


def folder(tmp_path, behaviours, news=NEWS):
    (tmp_path / "news.tsv").write_text(news, encoding="utf-8")
    (tmp_path / "behaviors.tsv").write_text(behaviours, encoding="utf-8")
    return tmp_path


def test_reads_features_and_impressions(tmp_path):
    data = mind.read(folder(tmp_path, GOOD), title_length=4, body_length=2, min_word_count=1)
    catalogue = data.catalogue
    assert catalogue.ids == ("", "N1", "N2")
    assert [catalogue.vocabulary[t] for t in catalogue.features["title"][2]] == ["eat", "a", "big", "apple"]
    assert catalogue.features["title"][1, 3] == 0 and not catalogue.features["title"][0].any()
    assert [catalogue.categories[c] for c in catalogue.features["category"][1:]] == ["sport", "health"]
    assert catalogue.rows(["N2", "N9", ""]) == [2, 0, 0]
    (shown,) = data.impressions
    assert (shown.user, shown.history, shown.candidates, shown.clicks) == (
        "U1", ("N1", "N9"), ("N1", "N2", "N8"), (1,)
    )  # fmt: skip
    assert (shown.time.hour, shown.time.day) == (9, 11)


def test_rare_words_become_the_unknown_word(tmp_path):
    data = mind.read(folder(tmp_path, GOOD), title_length=4, min_word_count=2)
    assert [data.catalogue.vocabulary[t] for t in data.catalogue.features["title"][2]] == [
        "?",
        "a",
        "big",
        "?",
    ]


def test_what_the_catalogue_lacks_stays_under_its_id(tmp_path):
    lines = GOOD + "2\tU2\t11/12/2019 9:05:58 PM\t\tN8-1 N1-0\n3\tU3\t11/12/2019 9:05:58 PM\tN2\tN1 N2\n"
    data = mind.read(folder(tmp_path, lines))
    assert data.impressions[0].history == ("N1", "N9") and data.impressions[1].history == ()
    assert data.impressions[1].candidates == ("N8", "N1") and data.impressions[1].clicks == (0,)
    assert data.impressions[2].candidates == ("N1", "N2")


@pytest.mark.parametrize(
    "line, complaint",
    (
        ("1\tU1\t11/11/2019 9:05:58 AM\tN1\n", "line 2: 4 columns where 5 belong"),
        ("1\tU1\t2019-11-11\tN1\tN1-1\n", "line 2: time data"),
        ("1\tU1\t11/11/2019 9:05:58 AM\tN1\tN1-7\n", "line 2: candidate 'N1-7' has no label"),
    ),
)
def test_malformed_lines_are_named(tmp_path, line, complaint):
    place = folder(tmp_path, GOOD + line)
    with pytest.raises(ValueError, match=complaint):
        mind.read(place)


def test_a_malformed_news_line_and_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="news.tsv line 3"):
        mind.read(folder(tmp_path, GOOD, NEWS + "N3\tonly two\n"))
    with pytest.raises(ValueError, match="title_length"):
        mind.read(tmp_path, title_length=0)
    with pytest.raises(FileNotFoundError):
        mind.read(tmp_path / "nowhere")


def test_a_second_split_can_refer_to_the_first_catalogue(tmp_path):
    first = mind.read(folder(tmp_path, GOOD))
    second = mind.read(folder(tmp_path, GOOD), catalogue=first.catalogue)
    assert second.catalogue is first.catalogue and second.impressions == first.impressions


def test_generated_files_read_back_repeat_and_follow_interests(tmp_path):
    settings = SyntheticNews(num_users=150, num_news=120, num_days=3, drift=0.0, interest_strength=6.0)
    settings.write(tmp_path / "one")
    settings.write(tmp_path / "two")
    data = mind.read(tmp_path / "one")
    assert (tmp_path / "one" / "behaviors.tsv").read_bytes() == (
        tmp_path / "two" / "behaviors.tsv"
    ).read_bytes()
    assert len(data.impressions) == 450
    for shown in data.by_user().values():
        assert len(shown[1].history) == len(shown[0].history) + 1
        assert shown[1].history[-1] == shown[0].candidates[shown[0].clicks[0]]
    category, rows = data.catalogue.features["category"], data.catalogue.rows
    known = [category[rows(s.history)] for s in data.impressions]
    offered = [category[rows(s.candidates)] for s in data.impressions]
    clicked = np.mean([topics[s.clicks[0]] in past for s, topics, past in zip(data.impressions, offered, known)])
    assert clicked > np.mean([np.isin(topics, past).mean() for topics, past in zip(offered, known)]) + 0.1


def test_drift_changes_what_a_reader_clicks(tmp_path):
    def overlap(drift):
        settings = SyntheticNews(
            num_users=100, num_news=200, num_days=8, drift=drift, interest_strength=8.0, history_length=8
        )
        settings.write(tmp_path / str(drift))
        data = mind.read(tmp_path / str(drift))
        category, rows = data.catalogue.features["category"], data.catalogue.rows
        return np.mean(
            [
                category[rows(s[-1].candidates)][s[-1].clicks[0]] in category[rows(s[0].history)]
                for s in data.by_user().values()
            ]
        )

    assert overlap(0.0) > overlap(0.9) + 0.1


@pytest.mark.parametrize("change", ({"num_users": 0}, {"num_topics": 1}, {"num_news": 5}, {"drift": 1.5}))
def test_generator_refuses_impossible_settings(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        SyntheticNews(**change)
