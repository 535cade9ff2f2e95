"""What other libraries hold: `./run_all.sh tests --peers [LIBRARY, KIND or LIBRARY/KIND ...]`.

The files beside this one adapt a library each. The docstring begins with the library and version,
in pip's form. A function or class that is named like a kind is tried, in a process of its own.
"""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import environment  # noqa: E402, F401  before torch: it hides the GPUs
import pool  # noqa: E402
from claims import KINDS, verdicts  # noqa: E402

PYTORCHS = {"lora": "peft==0.21.2", "diloco": "torchft==0.2.0"}  # the others are torch's
TORCH = "torch==2.13.0"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", **os.environ}  # else DeepSpeed looks for a GPU
LIMIT = 1200.0  # seconds for all claims of a kind
HANGS_AFTER = 40.0  # seconds for a claim; some libraries compile in it
PRELOADED = ["torch.distributed.fsdp", "torch.testing", "pytest"]
COLUMNS = ["holds", "wrong", "refuses", "lacks", "not offered"]


class Peer(NamedTuple):
    requirement: str  # library==version
    kind: str
    spec: str

    @property
    def library(self):
        return self.requirement.partition("==")[0]

    @property
    def names(self):
        return {self.library, self.kind, f"{self.library}/{self.kind}"}

    @property
    def installed(self):
        """Return the version that is installed, or None."""
        try:
            return importlib.metadata.version(self.library).partition("+")[0]  # torch's has "+cpu"
        except importlib.metadata.PackageNotFoundError:
            return None


def adapters():
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def peers_in(path):
    """Return the peers of an adapter. It is not imported, because its library may be missing."""
    tree = ast.parse(path.read_text())
    (requirement,) = re.findall(r"^[\w-]+==[\w.]+", ast.get_docstring(tree))
    definitions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names = [node.name for node in definitions]
    kinds = [kind for kind in KINDS if kind.replace("-", "_") in names]
    return [Peer(requirement, kind, f"{path}:{kind.replace('-', '_')}") for kind in kinds]


def imports_of(spec):
    """Return the modules that an adapter imports."""
    path = Path(spec.rpartition(":")[0])
    if path.suffix != ".py":
        return []
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    return found


def all_peers():
    found = [peer for path in adapters() for peer in peers_in(path)]
    for name, kind in KINDS.items():
        if kind.pytorchs:
            found.append(Peer(PYTORCHS.get(name, TORCH), name, kind.pytorchs))
    return found


def chosen(words):
    """Return the peers that the words name, or all."""
    return [peer for peer in all_peers() if not words or peer.names & set(words)]


# ---- in a process of its own


def judge_all(kind, spec, path):
    """Write {claim: [group, why]} to a file."""
    pool.HANGS_AFTER = HANGS_AFTER
    pool.forkserver.set_forkserver_preload([*PRELOADED, *imports_of(spec)])
    found = {}
    for name in verdicts.names_of_claims(kind):
        verdict = verdicts.judge(kind, name, spec)
        why, *_ = [*verdict.why.splitlines(), ""]
        found[name] = [verdicts.group_of(kind, name, verdict), why]
        Path(path).write_text(json.dumps(found))
    pool.shut_down()


def judge_apart(peer):
    """Return {claim: [group, why]} and how the process ended, if badly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts"
        command = [sys.executable, __file__, "--judge", peer.kind, peer.spec, str(path)]
        log = (Path(folder) / "log").open("w+")
        problem = ""
        how = {"stdout": log, "stderr": log, "timeout": LIMIT, "env": ENVIRONMENT}
        try:
            done = subprocess.run(command, check=False, **how)
            if done.returncode:
                log.seek(0)
                lines = ["no output", *log.read().strip().splitlines()]
                problem = lines[-1]
        except subprocess.TimeoutExpired:
            problem = f"not ready after {LIMIT:.0f} s"
        return json.loads(path.read_text()) if path.exists() else {}, problem


# ---- the table


def counts(found):
    number = Counter(group for group, _ in found.values())
    return [str(number[column]) for column in COLUMNS]


def row(peer, cells):
    return "| " + " | ".join([peer.library, peer.installed or "-", peer.kind, *cells]) + " |"


def main(words):
    rows = []
    for peer in chosen(words):
        if not peer.installed:
            continue
        print(f"{peer.library} {peer.installed}, {peer.kind}", flush=True)
        found, problem = judge_apart(peer)
        for name, (group, why) in found.items():
            if group != "holds":
                print(f"  {group}: {name}: {why}", flush=True)
        if problem:
            print(f"  {problem}")
        rows.append(row(peer, [*counts(found)]))
    print("\n| library | version | kind | " + " | ".join(COLUMNS) + " |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for line in rows:
        print(line)
    missing = {peer.requirement for peer in chosen(words) if not peer.installed}
    for requirement in sorted(missing):
        print(f"not installed: pip install {requirement}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        judge_all(*sys.argv[2:])
    else:
        main(sys.argv[1:])
