"""The command's own machinery, and its accounting commands."""

import errno
import json
import os
import subprocess
import sys

import pytest

from tfdp_rec import cli
from tfdp_rec.cli import quiet
from tfdp_rec.data import Items
from tfdp_rec.serving import export
from tfdp_rec.spectral import SpectralRecommender

SETTING = "--units 110794 --batch-size 1024 --steps 500 --delta 1e-6 --rdp"


def test_epsilon_and_calibrate_agree(capsys):
    assert cli.main(f"calibrate --epsilon 2 {SETTING} --also 20".split()) == 0
    noise = capsys.readouterr().out.split()[3].rstrip(":")
    assert cli.main(f"epsilon --noise-multiplier {float(noise) + 1e-4} {SETTING} --also 20".split()) == 0
    assert 1.98 < float(capsys.readouterr().out.split()[2]) <= 2.0


def test_epsilon_of_two_gaussians(capsys):
    assert cli.main(f"epsilon --noise-multiplier 3 --noise-multiplier 4 {SETTING}".split()) == 0
    pair = capsys.readouterr().out
    assert cli.main(f"epsilon --noise-multiplier 2.4 {SETTING}".split()) == 0
    assert capsys.readouterr().out == pair


def test_numbers_are_taken_as_people_write_them(capsys):
    for units in ("100000", "1e5"):
        assert cli.main(f"epsilon --noise-multiplier 1 --units {units} --batch-size 100 --steps 10 --rdp".split()) == 0
    first, odds, *again = capsys.readouterr().out.splitlines()
    assert again == [first, odds] and "odds of a guess about one user" in odds


def test_the_statement(capsys):
    assert cli.main(f"epsilon --noise-multiplier 1 {SETTING} --statement".split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("Guarantee:") and "one user" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "the following arguments are required: COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("epsilon", "the following arguments are required: --noise-multiplier"),
        (f"epsilon --noise-multiplier loud {SETTING}", "invalid float value: 'loud'"),
        (f"epsilon --noise-multiplier -1 {SETTING}", "--noise-multiplier must be from 0 to 10^100"),
        (f"epsilon --noise-multiplier 1 {SETTING} --delta 2", "--delta must be above 0 and below 1"),
        (f"epsilon --noise-multiplier 1 {SETTING} --delta 0.01", "above 1 / --units = 9.03e-06"),
        (f"epsilon --noise-multiplier 1 {SETTING} --delta 0.01", "or pass --allow-large-delta."),
        (f"epsilon --noise-multiplier 1 {SETTING} --units 100", "fewer units than a batch"),
        (f"calibrate --epsilon -1 {SETTING}", "--epsilon must be positive"),
    ],
)
def test_wrong_arguments_get_one_line_and_exit_code_2(arguments, message, capsys):
    try:
        code = cli.main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err and err.startswith("tfdp-rec")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("--epsilon 0", "--epsilon must be positive and finite, got 0.0"),
        ("--batch-size 0", "--batch-size must be positive"),
        ("--units 0", "--units must be a positive integer"),
        ("--delta 3", "--delta must be above 0 and below 1"),
        ("--steps 0", "--steps must be at least 1"),
    ],
)
def test_errors_name_what_was_typed_and_not_the_librarys_arguments(wrong, words, capsys):
    assert cli.main(f"calibrate --epsilon 2 {SETTING} {wrong}".split()) == 2
    assert f"error: {words}" in capsys.readouterr().err


def test_errors_of_ours_keep_their_trace_for_who_asks(monkeypatch):
    monkeypatch.setenv("TFDP_REC_DEBUG", "1")
    with pytest.raises(ValueError, match="epsilon must be positive"):
        cli.main(f"calibrate --epsilon -1 {SETTING}".split())


def test_help_and_accounting_do_without_tensorflow():
    probe = (
        "import sys; from tfdp_rec.cli import main\n"
        "for given in sys.argv[1:]:\n"
        "    try: main(given.split())\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "    slow = sorted({'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)); assert not slow, (given, slow)"
    )
    asked = ["--help", "calibrate --help", f"epsilon --noise-multiplier 1 {SETTING} --statement"]
    done = subprocess.run([sys.executable, "-c", probe, *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: tfdp-rec") == 2 and "\nGuarantee" in done.stdout


def test_every_command_explains_itself_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in (command.name for command in cli.COMMANDS):
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        out = capsys.readouterr().out
        assert stop.value.code == 0 and "tfdp-rec " + name in out and len(out) > 300
        assert max(map(len, out.splitlines())) <= 80, out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_version_is_the_packages(capsys):
    import tfdp_rec

    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"tfdp-rec {tfdp_rec.__version__}\n"


@pytest.mark.parametrize(
    "problem, said",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Free some space, and try again"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.csv"), "No such file or directory: x.csv"),
        (OSError("--out: nothing can be written to x."), "--out: nothing can be written to x."),
    ],
)
def test_errors_of_the_system_are_said_without_their_numbers(capsys, monkeypatch, problem, said):
    def fail(args):
        raise problem

    monkeypatch.setattr("tfdp_rec.cli.epsilon.run", fail)
    assert cli.main(f"epsilon --noise-multiplier 1 {SETTING}".split()) == 2
    assert f"error: {said} (TFDP_REC_DEBUG" in capsys.readouterr().err


@pytest.mark.parametrize("version, flags", [("2.21.3", "--xla_cpu_prefer_vector_width=512"), ("2.22.0", None)])
def test_commands_set_what_makes_large_steps_quick_and_no_flag_that_may_be_unknown(monkeypatch, version, flags):
    monkeypatch.setattr("tensorflow.__version__", version)
    for name in ("XLA_FLAGS", "TF_CPU_ALLOCATOR_USE_BFC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    quiet.import_tensorflow()
    assert os.environ.get("XLA_FLAGS") == flags and os.environ["TF_CPU_ALLOCATOR_USE_BFC"] == "1"


@pytest.mark.slow
def test_tensorflow_is_imported_without_a_word():
    probe = "from tfdp_rec.cli import quiet; import sys; quiet.import_tensorflow(); print('said', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "said\n")


@pytest.mark.slow
def test_what_would_move_a_terminals_cursor_is_written_as_what_it_is(tmp_path, capsys):
    """Titles and ids of others, in answers and in errors; also as JSON, which leaves some of them as they are."""
    bad, shown = "\x1b[2J\x9b1A\u202e", "\\u001b[2J\\u009b1A\\u202e"
    recommender = SpectralRecommender([1, 2], epsilon=8.0, delta=1e-4).fit([[1, 2]] * 300, verbose=0)
    export(tmp_path / "servable", recommender, Items([f"a{bad}", "b"]), {f"a{bad}": f"title{bad}"}, k=2)
    capsys.readouterr()
    assert cli.main(["recommend", str(tmp_path / "servable"), "--history", f"c{bad}"]) == 0
    out = capsys.readouterr().out
    assert f"c{shown}" in out and f"a{shown}  title{shown}" in out and not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert cli.main(["recommend", str(tmp_path / "servable"), "--json"]) == 0
    out = capsys.readouterr().out
    assert f"a{bad}" in [each["id"] for each in json.loads(out)["recommendations"]] and "\x9b" not in out
    assert cli.main(["recommend", str(tmp_path / f"no{bad}")]) == 2
    assert shown in capsys.readouterr().err
