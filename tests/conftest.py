import claims
import hypothesis
import pool
import pytest

# No shrinking: a failing example already names its arguments, and each try may restart the workers.
hypothesis.settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def _workers():
    yield
    pool.shut_down()


# ---- the oracle: an option for each kind of implementation (README, "Is yours right?")

VERDICTS = {}  # (kind, claim): "" where it holds, None where it is not offered, else why not


def pytest_addoption(parser):
    for kind, ours in claims.OURS.items():
        parser.addoption(
            f"--{kind}",
            metavar="MODULE:NAME",
            help=f"run the claims about {ours} on this, and no others",
        )


def chosen(config):
    return {kind: spec for kind in claims.OURS if (spec := config.getoption(f"--{kind}"))}


def pytest_configure(config):
    if chosen(config):
        config.option.tbstyle = "no"  # the table says why


def pytest_collection_modifyitems(config, items):
    if chosen(config):
        items[:] = [item for item in items if item.name.startswith("test_claim[")]


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_claim":
        specs = chosen(metafunc.config) or claims.OURS
        cases = [(kind, name, specs[kind]) for kind, name in claims.CLAIMS if kind in specs]
        metafunc.parametrize(
            ("kind", "name", "spec"), cases, ids=["-".join(case[:2]) for case in cases]
        )


@pytest.fixture
def verdicts():
    return VERDICTS


def pytest_terminal_summary(terminalreporter, config):
    for kind, spec in chosen(config).items():
        terminalreporter.section(f"{kind}: {spec}")
        for (of, name), answer in VERDICTS.items():
            if of == kind:
                verdict = {"": "holds", None: "not offered"}.get(answer, f"DOES NOT HOLD: {answer}")
                terminalreporter.write_line(f"{claims.CLAIMS[of, name].sentence}\n    {verdict}")
