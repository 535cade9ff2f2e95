"""`--two-processes`: a second process runs tests, too, and the first one reports the tests of both.

A test often waits for one of its workers, so one process leaves a part of two cores idle. Both
processes collect all tests, and take the next few that the other one has not taken.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import groupby
from pathlib import Path

AT_ONCE = 8  # tests of a file that a process takes


def add_options(parser):
    parser.addoption("--two-processes", action="store_true", help="run two tests at a time")
    parser.addoption("--second-process", metavar="FOLDER", help="which it shares with the first")


def plugin_for(config):
    """Return what runs the tests if two processes share them, or None."""
    option = config.option
    if option.collectonly or not (option.two_processes or option.second_process):
        return None
    return Second(config) if option.second_process else First(config)


def take(items, folder):
    """Yield the tests that the other process has not taken before."""
    for number, few in enumerate(in_parts(items)):
        with suppress(FileExistsError):
            (folder / f"taken{number}").touch(exist_ok=False)
            yield from few


def in_parts(items):
    """Yield lists of tests of a file. Those that share a fixture stay together."""
    for _, of_file in groupby(items, key=lambda item: item.path):
        by_itself = []
        together = []
        for item in of_file:
            (together if shares(item) else by_itself).append(item)
        if together:
            yield together
        for start in range(0, len(by_itself), AT_ONCE):
            yield by_itself[start : start + AT_ONCE]


def shares(item):
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(definition[-1].scope == "module" for definition in definitions)


class Process:
    def __init__(self, config, folder):
        self.config = config
        self.folder = Path(folder)

    def pytest_runtestloop(self, session):
        """As pytest's own, for the tests that this process takes."""
        if session.testsfailed:  # while it collected
            return None
        items = take(session.items, self.folder)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.after_each()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        self.after_all()
        return True

    def after_each(self):
        """Report what the other process wrote."""

    def after_all(self):
        """Wait for the other process."""


class Second(Process):
    def __init__(self, config):
        super().__init__(config, config.option.second_process)
        self.reports = (self.folder / "reports").open("a")

    def pytest_runtest_logreport(self, report):
        """Write it as a line of the file that the first process reads."""
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(data), file=self.reports, flush=True)


class First(Process):
    def __init__(self, config):
        self.temporary = tempfile.TemporaryDirectory()
        super().__init__(config, self.temporary.name)
        (self.folder / "reports").touch()
        self.reports = (self.folder / "reports").open()
        self.rest = ""  # of a line that is being written
        arguments = [*config.invocation_params.args, f"--second-process={self.folder}"]
        with (self.folder / "output").open("w") as output:
            self.second = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=config.invocation_params.dir,
                stdout=output,
                stderr=output,
            )

    def after_each(self):
        *lines, self.rest = (self.rest + self.reports.read()).split("\n")
        hook = self.config.hook
        for line in lines:
            data = json.loads(line)
            if isinstance(data["longrepr"], list):
                data["longrepr"] = tuple(data["longrepr"])  # where a test is skipped, and why
            report = hook.pytest_report_from_serializable(config=self.config, data=data)
            hook.pytest_runtest_logreport(report=report)

    def after_all(self):
        status = self.second.wait()
        self.after_each()
        if status not in (0, 1):
            output = (self.folder / "output").read_text()[-4000:]
            raise RuntimeError(f"the second process ended with status {status}:\n{output}")

    def pytest_unconfigure(self):
        self.second.terminate()  # does nothing if it has ended
        self.second.wait()
        self.reports.close()
        self.temporary.cleanup()
