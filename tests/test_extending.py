"""docs/extending.md runs as it stands, and its mechanism keeps what every mechanism promises."""

import functools
import importlib
import pathlib
import re
import sys
import types

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "extending.md"
SECTIONS = {
    part.splitlines()[0]: re.findall(r"```python\n(.*?)```", part, re.S)
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
}


@pytest.fixture(scope="module")
def ran():
    """The names that a section leaves behind, in a module of its own: classes must be found again when loaded."""
    from tfdp_rec.core.claim import events

    modules, kinds = {}, dict(events.KINDS)

    def of(section):
        if section not in modules:
            module = modules[section] = types.ModuleType(f"extending_{len(modules)}")
            sys.modules[module.__name__] = module
            for number, block in enumerate(SECTIONS[section]):
                exec(compile(block, f"docs/extending.md: {section}, block {number + 1}", "exec"), vars(module))
        return modules[section]

    yield of
    for module in modules.values():
        del sys.modules[module.__name__]
    events.KINDS.clear()
    events.KINDS.update(kinds)


def test_the_page_has_what_can_be_added():
    assert list(SECTIONS) == [
        "A mechanism", "A clipping rule", "A sampling scheme", "A privacy event", "A data set", "A source of logs"
    ]  # fmt: skip
    assert all(len(blocks) >= 2 for blocks in SECTIONS.values())


@pytest.mark.fast_cases("A sampling scheme", "A privacy event", "A source of logs")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs_and_shows_that_what_it_adds_works(section, ran):
    assert any("assert" in block for block in SECTIONS[section])
    ran(section)


def test_the_event_costs_the_same_to_every_accountant_and_filter(ran):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    from tfdp_rec.privacy import RenyiFilter, epsilon_of

    mean, same = ran("A privacy event").MeanAnswerDpEvent(8.0, answers=4), GaussianDpEvent(4.0)
    for around in (lambda event: event, lambda event: SelfComposedDpEvent(PoissonSampledDpEvent(0.1, event), 3)):
        for accountant in ("pld", "rdp"):
            assert epsilon_of(around(mean), 1e-6, accountant) == epsilon_of(around(same), 1e-6, accountant)
        assert RenyiFilter(8.0, 1e-6).used(around(mean)) == RenyiFilter(8.0, 1e-6).used(around(same)) > 0


CONTRACT = (
    "test_privacy_settings_are_given_by_name",
    "test_config_holds_every_argument",
    "test_config_makes_the_same_again",
    "test_noise_is_never_in_the_config",
    "test_every_setting_is_fixed",
    "test_raw_gradients_are_refused",
    "test_it_must_be_told_its_tables_and_serves_one_model",
    "test_untrained_models_are_saved_too",
    "test_save_and_load",
)


@pytest.mark.slow_cases("test_save_and_load")
@pytest.mark.parametrize("promise", CONTRACT)
def test_the_mechanism_joins_the_contract_by_being_listed(promise, ran, tmp_path, monkeypatch):
    contract = importlib.import_module("optimizers.test_contract")
    kind = ran("A mechanism").HeadSGD
    monkeypatch.setitem(contract.MECHANISMS, kind, {"head": 7})

    @functools.cache
    def trained(kind, rule):
        model = contract.model_of(kind, table_rule=rule, compile_options={"run_eagerly": True})
        model.fit(contract.batches(), verbose=0)
        return model

    def loaded(kind, rule):
        return contract.saved_and_loaded(trained(kind, rule), tmp_path / "model.keras")

    given = {"kind": kind, "rule": None, "trained": trained, "loaded": loaded, "tmp_path": tmp_path}
    assert_promise = getattr(contract, promise)
    code = assert_promise.__code__
    assert_promise(*(given[name] for name in code.co_varnames[: code.co_argcount]))
