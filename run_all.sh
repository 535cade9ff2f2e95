#!/usr/bin/env bash
# ./run_all.sh [-n RANKS] [NAME ...]     run the technique files (all, or those named) under torchrun
# ./run_all.sh tests [PYTEST ARGUMENTS]  run the test suite
# ./run_all.sh tests --peers [LIBRARY or KIND ...]  try the installed ones of the libraries in docs/peers.md
# ./run_all.sh learn [LESSON [--check]]  write an implementation yourself
# All first install what is missing into .venv. The default of RANKS is what a file says ("RANKS = 4"), or 2.
# The exit status is the number of files that failed, or pytest's.
set -u
if [ "${1-}" = --help ] || [ "${1-}" = -h ]; then
    sed -n '2,7s/^# //p' -- "${BASH_SOURCE[0]}"
    exit
fi
called_from=$PWD
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" || exit 1

# The order in which to read them. A file that is not in the list comes last.
order="data_parallel ddp zero fsdp tensor_parallel pipeline amp fp8 lora activation_checkpoint flash_attention
linear_cross_entropy context_parallel expert_parallel collectives muon diloco data checkpoint parallel_3d parallel_5d
estimate compare"

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A Python is suitable if it has the packages that the files and the tests import.
suitable() {
    "$1" - 2>/dev/null <<'EOF'
from importlib.metadata import version
for name in ("hypothesis", "numpy", "pytest"):
    version(name)  # raises if it is not installed. To import torch would take seconds
raise SystemExit(tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 6))
EOF
}

set_up() {
    python=$(command -v python3 || command -v python) || fail "no python3 on the PATH; install Python 3.10 or newer"
    "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old; Python 3.10 or newer is needed"
    suitable "$python" && return
    if ! suitable .venv/bin/python; then
        echo "setting up: $python has no torch 2.6 or newer with numpy, pytest and hypothesis;" \
            "installing requirements.txt into .venv (a few minutes)"
        "$python" -m venv .venv || fail "could not make .venv; on Debian and Ubuntu: apt install python3-venv"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
            fail "pip could not install requirements.txt"
    fi
    python=$PWD/.venv/bin/python
}

count_cores() {
    "$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())'
}

if [ "${1-}" = learn ]; then
    set_up
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    cd -- "$called_from" || exit 1
    exec "$python" -m onefile_parallel "$@"
fi

if [ "${1-}" = tests ]; then
    shift
    set_up
    if [ "${1-}" = --peers ]; then
        shift
        exec "$python" tests/peers/table.py "$@"
    fi
    # One process of the whole suite leaves a part of two cores idle, so pytest-xdist starts two.
    if [ $# -eq 0 ] && [ "$(count_cores)" -ge 2 ] && "$python" -c 'import xdist' 2>/dev/null; then
        set -- -n 2 --dist worksteal
    fi
    CALLED_FROM=$called_from exec "$python" -m pytest "$@"
fi

given=
names=()
while [ $# -gt 0 ]; do
    case $1 in
        -n)
            given=${2-}
            [[ $given =~ ^[1-9][0-9]*$ ]] || fail "-n ${given:-without a number}: give a number of ranks, 1 or more"
            shift 2
            ;;
        -*) fail "there is no option $1; see ./run_all.sh --help" ;;
        *)
            names+=("$1")
            shift
            ;;
    esac
done
if [ ${#names[@]} -eq 0 ]; then
    for name in $order; do
        [ -f "$name.py" ] && names+=("$name")
    done
    for file in *.py; do
        [[ " bench "${order//$'\n'/ }" " != *" ${file%.py} "* ]] && names+=("${file%.py}")
    done
fi
for name in "${names[@]}"; do
    [ -f "${name%.py}.py" ] || fail "there is no ${name%.py}.py here"
done
set_up

# Share the cores among the ranks. Without OMP_NUM_THREADS torchrun sets it to 1 and warns.
cores=$(count_cores)
logs=$(mktemp -d) || exit 1
trap 'rm -rf -- "$logs"' EXIT
failed=0
minutes=$(((${#names[@]} * 18 + 59) / 60)) # 18 s for each, on two idle cores
files="${#names[@]} files"
[ ${#names[@]} -eq 1 ] && files="1 file"
printf 'Running %s, in about %s min on two idle cores: %s\n' "$files" $minutes "${names[*]%.py}"
for name in "${names[@]}"; do
    name=${name%.py}
    ranks=${given:-$(sed -n 's/^RANKS = \([0-9]*\).*/\1/p' "$name.py")}
    ranks=${ranks:-2}
    threads=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    printf '\n$ torchrun --standalone --nproc-per-node %s %s.py\n' "$ranks" "$name"
    OMP_NUM_THREADS=$threads "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$name.py" 2>&1 | tee "$logs/$name"
    status=${PIPESTATUS[0]}
    echo "$status" >"$logs/$name.status"
    [ "$status" -eq 0 ] || failed=$((failed + 1))
done

# What the demos printed, field by field (docs/running.md), as one table.
"$python" - "$logs" "${names[@]}" <<'EOF'
import re
import sys
from pathlib import Path

logs, *names = sys.argv[1:]
rows = [("file", "run", "ranks", "equal to one device", "held/rank MB", "sent/rank MB", "time ms (1 device)", "verdict")]
for name in names:
    name = name.removesuffix(".py")
    text, status = (Path(logs) / name).read_text(), (Path(logs) / f"{name}.status").read_text().strip()
    runs = re.split(r"^(?=[\w ]+ · \d+ ranks? ·)", text, flags=re.MULTILINE)[1:]  # zero.py has three
    for run in runs or [text]:

        def find(pattern, run=run):
            match = re.search(pattern, run, re.MULTILINE)
            return " / ".join(match.groups()) if match else "-"

        equal = find(r"^vs 1 device .*?(NOT equal|bitwise|within \S+(?=:))")
        held = find(r"^held/rank +params (\S+) MB +grads (\S+) MB +optimizer (\S+) MB")
        time = re.sub(r" / (\S+)", r" (\1)", find(r"^time +(\S+) ms per step +\(1 device: (\S+)\)"))
        ranks, sent, verdict = find(r"· (\d+) ranks? ·"), find(r"^sent/rank +(\S+) MB"), f"FAILED ({status})"
        verdict = "ok" if status == "0" else verdict
        rows.append((f"{name}.py", find(r"^([\w ]+) ·"), ranks, equal, held, sent, time, verdict))
widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
print()
for row in rows:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
EOF
printf '\nNext: read a file from top to bottom, or run ./run_all.sh tests. docs/running.md explains the columns.\n'
exit "$failed"
