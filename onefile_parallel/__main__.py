"""The command `onefile-parallel`. In a clone: `python -m onefile_parallel`.

    onefile-parallel run NAME [-n RANKS] [FLAGS]       train with a technique, under torchrun
    onefile-parallel check --KIND FILE.py:NAME [...]   does an implementation hold the claims?
    onefile-parallel learn [LESSON [--check]]          write one yourself
    onefile-parallel compare ONE MANY [FLAGS]          where a run on ranks leaves one device
    onefile-parallel estimate [FLAGS]                  memory, traffic and time on paper

`run` alone lists the techniques, and `check` alone the kinds of implementations. Each command has
--help. The exit status is that of the demo, or 0 if no claim is wrong, or if the runs agree.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "ddp.py").exists() else HERE.parent  # installed, or in a clone


def main():
    command, *arguments = sys.argv[1:] or ["--help"]
    if command not in COMMANDS:
        is_help = command in ("--help", "-h")
        print(__doc__ if is_help else f"error: there is no command {command}; see --help")
        return 0 if is_help else 2
    return COMMANDS[command](arguments)


def run(arguments):
    names = [name for name in arguments[:1] if not name.startswith("-")]
    if not names:
        return show_techniques()
    name = names[0].removesuffix(".py")
    path = ROOT / f"{name}.py"
    if name not in techniques():
        print(f"error: there is no technique {name}; one of {', '.join(techniques())}")
        return 2
    flags = arguments[1:]
    ranks = re.search(r"^RANKS = (\d+)", path.read_text(), re.MULTILINE)
    ranks = int(ranks[1]) if ranks else 2
    if flags[:1] == ["-n"]:
        ranks = flags[1] if len(flags) > 1 else ""
        if not str(ranks).isdecimal() or int(ranks) < 1:
            print(f"error: -n {ranks}: give a number of ranks, 1 or more")
            return 2
        flags = flags[2:]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # Share the cores among the ranks. Without the variable torchrun sets it to 1, and warns.
    threads = max(1, number_of_cores() // int(ranks))
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    return call([*torchrun, str(path), *flags], environment)


def number_of_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def techniques():
    """Return {name: first line of the docstring} of the files that have a demo."""
    found = {}
    for path in sorted(ROOT.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if path.parent != HERE or not path.name.startswith("_"):
            found[path.stem] = docstring.partition("\n")[0]
    return found


def show_techniques():
    for name, line in techniques().items():
        print(f"{name:22} {line}")
    return 0


def check(arguments):
    """Run the oracle on what the arguments name. Other arguments are pytest's."""
    environment = os.environ | {"CALLED_FROM": os.getcwd()}
    pytest = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    return call([*pytest, *arguments], environment, cwd=ROOT)


def learn(arguments):
    environment = os.environ | {"CALLED_FROM": os.getcwd()}
    return call([str(ROOT / "tests" / "learn" / "__main__.py"), *arguments], environment)


def compare(arguments):
    return call([str(ROOT / "compare.py"), *arguments])


def estimate(arguments):
    return call([str(ROOT / "estimate.py"), *arguments])


def call(arguments, environment=None, cwd=None):
    """Run Python. Ctrl-C goes to it, too, and it ends by itself."""
    process = subprocess.Popen([sys.executable, *arguments], env=environment, cwd=cwd)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


COMMANDS = {
    "run": run,
    "check": check,
    "learn": learn,
    "compare": compare,
    "estimate": estimate,
}

if __name__ == "__main__":
    sys.exit(main())
