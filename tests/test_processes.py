"""`--two-processes`: each test runs once, in one of them, and the first reports all of them."""

import re
import sys

import pytest
from launch import ROOT, launch

pytestmark = pytest.mark.cpu

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import processes

def pytest_addoption(parser):
    processes.add_options(parser)

def pytest_configure(config):
    if plugin := processes.plugin_for(config):
        config.pluginmanager.register(plugin)
"""
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("number", range(40))
def test_sleeps(number):
    with open("ran", "a") as file:
        file.write(f"{os.getpid()} {number}\\n")
    time.sleep(0.05)
"""
SHARED = """
import os, pytest

@pytest.fixture(scope="module")
def made():
    with open("made", "a") as file:
        file.write("once\\n")

@pytest.mark.parametrize("number", range(40))
def test_uses_what_is_made(made, number):
    pass
"""
FAIL_AND_SKIP = """
import time, pytest

@pytest.mark.parametrize("number", range(40))
def test_fails(number):
    assert number == 1000

@pytest.mark.parametrize("number", range(40))
def test_skips(number):
    time.sleep(0.05)
    pytest.skip("there is no GPU")
"""
DIES = """
import os, sys, time

def test_the_second_process_dies():
    time.sleep(2)

def pytest_generate_tests(metafunc):
    if "--second-process" in " ".join(sys.argv):
        print("the second one is out of memory", flush=True)
        os._exit(9)
"""


@pytest.fixture
def run(tmp_path):
    def run(*flags, **files):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        pytest = [sys.executable, "-m", "pytest", "-q", "--two-processes"]
        return launch([*pytest, "-p", "no:cacheprovider", *flags], tmp_path)

    return run


def test_each_test_runs_once_and_both_processes_run_some(run, tmp_path):
    done = run(sleeps=TESTS)

    assert re.search(r"^40 passed in", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0
    lines = (tmp_path / "ran").read_text().split("\n")[:-1]
    processes, numbers = zip(*map(str.split, lines), strict=True)
    assert sorted(map(int, numbers)) == list(range(40))
    assert len(set(processes)) == 2


def test_what_a_module_makes_is_made_once(run, tmp_path):
    assert "40 passed" in run(shared=SHARED).stdout
    assert (tmp_path / "made").read_text() == "once\n"


def test_failures_and_skips_of_both_are_reported_with_their_reasons(run):
    done = run("-rs", failing=FAIL_AND_SKIP)

    assert done.returncode == 1
    assert "40 failed, 40 skipped" in done.stdout
    assert set(re.findall(r"^E +assert (\d+) == 1000", done.stdout, re.MULTILINE)) == {
        str(number) for number in range(40)
    }
    assert "SKIPPED [40] test_failing.py:11: there is no GPU" in done.stdout


def test_after_a_failure_x_stops_both(run, tmp_path):
    failing = TESTS.replace("time.sleep(0.05)", "time.sleep(0.2); assert number != 0")

    done = run("-x", failing=failing)

    assert done.returncode == 1
    assert len((tmp_path / "ran").read_text().split("\n")) < 30


def test_if_the_second_process_dies_the_run_has_failed(run):
    done = run("-s", dying=DIES)

    assert done.returncode == 3
    assert "the second process ended with status 9" in done.stdout + done.stderr
    assert "the second one is out of memory" in done.stdout + done.stderr
