"""The suite's options: `--device`, and one for each kind of implementation that it can try."""

import json
from collections import Counter
from pathlib import Path

import environment  # before torch: it hides the GPUs, unless they are asked for
import hypothesis
import pool
import pytest
import torch
from claims import KINDS, causes, registry, verdicts

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
def _workers(request):
    yield
    for kind, spec in chosen(request.config).items():
        DIAGNOSES[kind] = causes.find(kind, spec, verdicts_of(kind))
    pool.shut_down()


@pytest.fixture(autouse=True)
def _skip_muon_before_torch_2_9(request):
    arguments = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    kind = arguments.get("kind", arguments.get("name"))
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon to compare with")


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where tests run")
    parser.addoption("--json", metavar="FILE", help="write the verdicts of the claims to FILE")
    for name, kind in KINDS.items():
        parser.addoption(
            f"--{name}",
            metavar="MODULE:NAME",
            nargs="?",
            const="",
            help=f"try only the claims about {kind.ours}, on this; `--{name} --help` says more",
        )


def chosen(config):
    """Return {kind: specification} of what the user wants to try: ours, if an option has none."""
    specs = {kind: config.getoption(f"--{kind}") for kind in KINDS}
    return {kind: spec or KINDS[kind].ours for kind, spec in specs.items() if spec is not None}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if not config.option.help or not chosen(config):
        return None
    for kind in chosen(config):
        print(*verdicts.how_to_call(kind), sep="\n")
    return 0


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: a test that does not run under --device cuda")
    if config.getoption("--device") != environment.DEVICE_TYPE:
        raise pytest.UsageError("write --device cuda on the command line")
    if environment.DEVICE_TYPE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no GPU here")
    for kind, spec in chosen(config).items():
        try:
            registry.resolve(spec)
        except ValueError as error:
            raise pytest.UsageError(f"--{kind} {spec}: {error}") from None
    if chosen(config):
        config.option.tbstyle = "no"  # the table says why
        config.option.reportchars = ""
        pool.HANGS_AFTER = 12.0  # and with a restart of the workers at most 15
    if getattr(config.option, "numprocesses", None) and (chosen(config) or config.option.json):
        raise pytest.UsageError("the verdicts are those of one process: leave out -n")


def pytest_ignore_collect(collection_path, config):
    """If a kind is given, import the claims' file alone."""
    is_other = collection_path.match("test_*.py") and collection_path.stem != "test_oracle"
    return True if chosen(config) and is_other else None


def pytest_collection_modifyitems(config, items):
    if chosen(config):
        items[:] = [item for item in items if item.name.startswith("test_claim[")]
    elif environment.DEVICE_TYPE == "cuda":
        items[:] = [item for item in items if item.get_closest_marker("cpu") is None]


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_claim":
        specs = chosen(metafunc.config) or {name: kind.ours for name, kind in KINDS.items()}
        cases = [
            pytest.param(kind, name, specs[kind], id=f"{kind}-{name}")
            for kind, name in registry.CLAIMS
            if kind in specs
        ]
        metafunc.parametrize(("kind", "name", "spec"), cases)


# ---- what the suite prints

VERDICTS = {}  # (kind, claim): Verdict
DIAGNOSES = {}  # kind: causes.Diagnosis


def verdicts_of(kind):
    return {name: verdict for (of, name), verdict in VERDICTS.items() if of == kind}


@pytest.fixture
def remember(record_property):
    def remember(claim, verdict):
        record_property("claim", claim)
        VERDICTS[claim] = verdict

    return remember


def pytest_collection_finish(session):
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line(pool.header())
    if chosen(session.config):
        limit = f"a claim that does not end is stopped after {pool.HANGS_AFTER:.0f} s"
        terminal.write_line(f"{len(session.items)} claims; {limit}")


def pytest_report_teststatus(report, config):
    """One line for each claim about the user's implementation, instead of dots."""
    if not chosen(config) or report.when != "call":
        return None
    claim = dict(report.user_properties)["claim"]
    is_property = registry.CLAIMS[claim].about == "property"
    word = verdicts.WORDS[VERDICTS[claim].outcome][is_property]
    return report.outcome, f"{claim[1]}: {word}\n", word


def pytest_sessionfinish(session):
    """Write --json FILE. Its path is relative to where the user stands."""
    name = session.config.getoption("--json")
    if name is None:
        return
    specs = {kind: made.ours for kind, made in KINDS.items()} | chosen(session.config)
    answers = VERDICTS
    if session.config.option.collectonly:  # which claims are there?
        not_run = verdicts.Verdict("not run", "--collect-only")
        answers = {
            claim: not_run for claim in registry.CLAIMS if claim[0] in chosen(session.config)
        }
    found = [f"{kind}: {each.sentence}" for kind, each in DIAGNOSES.items() if each.cause]
    if len(DIAGNOSES) == 1:
        found = [each.sentence for each in DIAGNOSES.values()]
    page = verdicts.versions() | {"cause": "\n".join(found), "claims": []}
    for (kind, claim), verdict in answers.items():
        diagnosis = DIAGNOSES.get(kind, causes.NONE)
        line = verdicts.as_json(kind, claim, specs[kind], verdict, diagnosis)
        page["claims"].append(line)
    path = Path(environment.CALLED_FROM) / name
    path.write_text(json.dumps(page, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    for kind, spec in chosen(config).items():
        terminalreporter.section(f"{kind}: {spec}")
        diagnosis = DIAGNOSES.get(kind, causes.NONE)
        for line in verdicts.table(kind, verdicts_of(kind), diagnosis):
            terminalreporter.write_line(line)
    skipped = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    if skipped and not chosen(config):
        reasons = [f"{n} ({reason.removeprefix('Skipped: ')})" for reason, n in skipped.items()]
        terminalreporter.write_line(f"skipped: {', '.join(reasons)}")
