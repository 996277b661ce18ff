"""The MovieLens reader on files in both formats, whole and broken."""

import numpy as np
import pytest

from tfdp_rec.datasets.movielens import files as movielens

MOVIES = (
    'movieId,title,genres\n5,Alien (1979),Horror\n9,"Good, the Bad and the Ugly, The (1966)",Western\n2,Zoë,Drama\n'
)
RATINGS = "userId,movieId,rating,timestamp\n7,9,4.0,300\n7,5,3.5,100\n3,2,5.0,50\n7,2,1.0,300\n3,5,0.5,50\n"


@pytest.fixture
def write(tmp_path):
    def files(**texts):
        for name, text in texts.items():
            encoding = "latin-1" if name.endswith("dat") else "utf-8"
            (tmp_path / name.replace("_", ".")).write_bytes(text.encode(encoding))
        return tmp_path

    return files


def as_dat(text):
    rows = [line.replace('"', "") for line in text.splitlines()[1:]]
    return "\n".join("::".join(row.replace(", ", ";").split(",")).replace(";", ", ") for row in rows) + "\n"


def expect_both_users(timelines):
    assert timelines.user_ids.tolist() == [3, 7]
    assert [timelines.movie_ids[timelines[u] - 1].tolist() for u in range(2)] == [[2, 5], [5, 9, 2]]
    assert timelines.titles == ["Alien (1979)", "Good, the Bad and the Ugly, The (1966)", "Zoë"]
    assert timelines.index_of([5, 9, 2, 1]).tolist() == [1, 2, 3, 0]


def test_csv_by_time_with_ties_in_the_files_order(write):
    expect_both_users(movielens.read(write(ratings_csv=RATINGS, movies_csv=MOVIES)))


def test_dat_gives_the_same(write):
    movies = as_dat(MOVIES)
    assert "9::Good, the Bad and the Ugly, The (1966)::Western" in movies
    ratings = as_dat(RATINGS).replace(".0::", "::")
    expect_both_users(movielens.read(write(ratings_dat=ratings, movies_dat=movies)))


def test_windows_line_ends(write):
    expect_both_users(movielens.read(write(ratings_csv=RATINGS.replace("\n", "\r\n"), movies_csv=MOVIES)))


def test_the_catalogue_is_the_public_file_not_what_was_rated(write):
    rated_once = "userId,movieId,rating,timestamp\n1,5,3,1\n"
    assert movielens.read(write(ratings_csv=rated_once, movies_csv=MOVIES)).num_movies == 3


@pytest.mark.parametrize("form", ["csv", "dat"])
@pytest.mark.parametrize(
    "row",
    ["7,9,4.0", "7,9,4.0,300,1", "x,9,4.0,300", "7,9,4.0,later", "7,9,,300", ",9,4.0,300", "", "7,9.5,4.0,300",
     "-7,9,4,300", "7,9,nan,300"],
)  # fmt: skip
def test_a_malformed_rating_is_an_error_with_file_and_line(write, form, row):
    lines = RATINGS.splitlines()
    broken = "\n".join([*lines[:4], row, *lines[4:]]) + "\n"
    line = 5
    if form == "dat":
        broken, line = as_dat(broken), 4
    folder = write(**{f"ratings_{form}": broken, f"movies_{form}": MOVIES if form == "csv" else as_dat(MOVIES)})
    with pytest.raises(ValueError, match=rf"ratings\.{form}, line {line}: expected userId"):
        movielens.read(folder)


def test_an_unknown_movie_is_an_error_with_file_and_line(write):
    with pytest.raises(ValueError, match=r"ratings.csv, line 4: movie 77 is not in movies.csv"):
        movielens.read(write(ratings_csv=RATINGS.replace("3,2,5.0", "3,77,5.0"), movies_csv=MOVIES))


@pytest.mark.parametrize(
    "ratings, movies, message",
    [
        ("user,movie,rating,time\n1,5,3,1\n", MOVIES, "line 1: expected the header"),
        ("userId,movieId,rating,timestamp\n", MOVIES, "holds no rating"),
        ("", MOVIES, "line 1: expected the header"),
        (RATINGS, "movieId,title,genres\n5,Alien\nnine,Brazil,\n", r"movies.csv, line 3: expected a movie id"),
        (RATINGS, MOVIES + "5,Alien again,\n", r"movies.csv, line 5: movie 5 is there twice"),
        (RATINGS, "movieId,title,genres\n", "lists no movie"),
    ],
)
def test_other_broken_files(write, ratings, movies, message):
    with pytest.raises(ValueError, match=message):
        movielens.read(write(ratings_csv=ratings, movies_csv=movies))


def test_bytes_that_are_no_text(tmp_path, write):
    folder = write(ratings_csv=RATINGS)
    (folder / "movies.csv").write_bytes(b"movieId,title,genres\n5,\xff\xfe,\n")
    with pytest.raises(ValueError, match="movies.csv"):
        movielens.read(folder)


def test_missing_files(tmp_path, write):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        movielens.read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="unpack the archive"):
        movielens.read(tmp_path / "ml-20m.zip")
    with pytest.raises(FileNotFoundError, match="neither ratings.csv nor ratings.dat"):
        movielens.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no movies.csv, the public catalogue"):
        movielens.read(write(ratings_csv=RATINGS))


def test_many_ratings_agree_with_a_slow_reading(write):
    rng = np.random.default_rng(0)
    count = 200_000
    users, movies = rng.integers(1, 500, count), rng.choice([5, 9, 2], count)
    times = rng.integers(0, 1000, count)
    rows = [f"{u},{m},3.5,{t}" for u, m, t in zip(users, movies, times)]
    text = "userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n"
    timelines = movielens.read(write(ratings_csv=text, movies_csv=MOVIES))
    slow: dict[int, list] = {}
    for user, movie, time in zip(users.tolist(), movies.tolist(), times.tolist()):
        slow.setdefault(user, []).append((time, movie))
    for place, user in enumerate(timelines.user_ids.tolist()):
        by_time = [movie for _, movie in sorted(slow[user], key=lambda event: event[0])]
        assert timelines.movie_ids[timelines[place] - 1].tolist() == by_time
