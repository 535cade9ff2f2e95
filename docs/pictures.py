"""Draw the README's pictures from what the demos, fsdp_units.py and a simulation of schedules say.

    pip install matplotlib
    python docs/pictures.py          writes docs/*.svg: in half a minute, on two ranks

Grey text and a transparent ground, so that they can be read on white and on black.
"""

import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))
import pipeline  # noqa: E402

GREY, BLUE, ORANGE, GREEN, PURPLE = "#808890", "#4a90d9", "#e08a3c", "#4aa564", "#9b6fc4"
plt.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "the same file each time",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def demo(name, *flags, ranks=2):
    """What a demo prints: {run: its lines}."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    done = subprocess.run(
        [*command, f"{name}.py", "--steps", "3", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{name}.py ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    runs = re.split(r"^(?=[\w ]+ · \d+ ranks? ·)", done.stdout, flags=re.MULTILINE)[1:]
    return {run.partition(" ·")[0]: run for run in runs}


def numbers(pattern, text):
    return [float(number) for number in re.search(pattern, text, re.MULTILINE).groups()]


def save(figure, name):
    figure.savefig(
        DOCS / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
    )
    plt.close(figure)


def memory(runs):
    """Bytes that a rank holds, by technique, beside one device."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    held = {
        name: numbers(
            r"^held/rank +params (\S+) MB +grads (\S+) MB +optimizer (\S+) MB", runs[name]
        )
        for name in runs
    }
    alone = numbers(r"\(1 device: (\S+) / (\S+) / (\S+)\)", runs["ddp"])
    rows = {"one device": alone, **held}
    left = [0.0] * len(rows)
    for i, (what, color) in enumerate(
        (("parameters", BLUE), ("gradients", ORANGE), ("optimizer", GREEN))
    ):
        values = [row[i] for row in rows.values()]
        axes.barh(list(rows), values, left=left, color=color, label=what)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(
        "MB held by each of two ranks; 1.9M parameters in fp32 (tensor_parallel: fp64, halved)"
    )
    axes.legend(frameon=False, loc="lower right")
    save(figure, "memory")


def sent(runs):
    """Bytes that a rank sends in a step."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    values = {name: numbers(r"^sent/rank +(\S+) MB", run)[0] for name, run in runs.items()}
    bars = axes.barh(list(values), list(values.values()), color=PURPLE)
    axes.bar_label(bars, [f" {value:.1f}" for value in values.values()], color=GREY)
    axes.invert_yaxis()
    axes.set_xlabel("MB sent by a rank in a step, of two ranks")
    save(figure, "sent")


def schedules(p=4, m=8):
    """The five schedules as they were simulated: a backward takes as long as two forwards.

    This SVG is written here, with one path per color. matplotlib's has an element per action, and
    20 times the bytes.
    """
    colors = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
    parts = []
    for panel, name in enumerate(pipeline.SCHEDULES):
        v = 2 if name == "interleaved_1f1b" else 1
        cost = {kind: cost / v for kind, cost in pipeline.COST.items()}
        schedule = pipeline.build_schedule(name, p, m, v)
        times = pipeline.simulate(schedule, cost)
        peak = max(times.peak_activations)
        idle = f"idle {times.bubble_fraction:.0%}"
        top = 105 * panel + 20
        title = f"{name}: {idle}, activations of at most {peak} forwards"
        parts.append(label(title, [LEFT], top - 6, GREY, 13))
        boxes = {}  # (color, opacity) -> a path of rectangles
        for rank, actions in enumerate(schedule):
            y = top + 20 * rank
            parts.append(label(f"rank {rank}", [4], y + 12.5, GREY, 11))
            digits = {}  # left side -> the number of a micro-batch, where it has room
            for action in actions:
                ((stage, kind, number),) = pipeline.parse([action])
                x = LEFT + UNIT * times.start[action]
                width = UNIT * cost[kind]
                key = colors[kind], 1 if stage < p else 0.65
                box = f"M{x:g} {y}h{width:g}v17h{-width:g}z"
                boxes[key] = boxes.get(key, "") + box
                if cost[kind] >= 1:
                    digits[x + width / 2 - 2.8] = str(number)
            parts.append(label("".join(digits.values()), digits, y + 12, "#fff", 9))
        for (color, opacity), path in boxes.items():
            stroke = 'stroke="#fff" stroke-width=".5"'
            shape = f'<path d="{path}" fill="{color}" opacity="{opacity}" {stroke}/>'
            parts.insert(0, shape)  # below the numbers
    bottom = 105 * len(pipeline.SCHEDULES) + 15
    names = {BLUE: "forward", ORANGE: "backward (zero bubble: for the input)"}
    names[GREEN] = "backward for the weights"
    legend = [f'<tspan fill="{color}">■</tspan> {name}' for color, name in names.items()]
    parts.append(label("&#160; ".join(legend), [LEFT], bottom, GREY, 12))
    note = "from left to right: time; pale: a rank's second stage; numbers: micro-batches"
    parts.append(label(note, [LEFT], bottom + 17, GREY, 12))
    width = LEFT + UNIT * 3 * p * m + 4  # naive takes longest: a micro-batch after the other
    height = bottom + 25
    style = f'width="{width:g}" viewBox="0 0 {width:g} {height}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {style}>'
    (DOCS / "pipeline.svg").write_text("\n".join([head, *parts, "</svg>\n"]))


LEFT = 50  # of the picture is for the names of ranks
UNIT = 6.5  # the width of a forward


def label(text, xs, y, color, size):
    """Text at xs[0], or a character at each x."""
    x = " ".join(f"{x:g}" for x in xs)
    return f'<text x="{x}" y="{y:g}" fill="{color}" font-size="{size}">{text}</text>'


def bars(axes, row, text, colors):
    """A line of a demo's timeline, sign by sign."""
    for found in re.finditer(r"(.)\1*", text):
        if found.group(1) in colors:
            axes.barh(
                row,
                len(found.group()),
                left=found.start(),
                color=colors[found.group(1)],
                height=0.7,
            )


def timeline(lines, name, colors, legend, title):
    figure, axes = plt.subplots(figsize=(9, 0.35 * len(lines) + 1.2))
    for row, text in enumerate(lines.values()):
        bars(axes, row, text, colors)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[sign]) for sign in legend]
    figure.legend(
        handles,
        legend.values(),
        frameon=False,
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.5, -0.12),
    )
    save(figure, name)


def units(run):
    """What fsdp.py's units do in a step, as fsdp_units.py prints it."""
    took, lines = re.search(r"^unit +a step of (\d+) ms.*\n((?:.+\n)+)", run, re.MULTILINE).groups()
    rows = {line[:11].strip(): line[13:] for line in lines.splitlines()}
    colors = {"·": PURPLE, "F": BLUE, "B": ORANGE, "-": GREEN}
    legend = {
        "·": "its parameters are gathered",
        "F": "forward",
        "B": "backward",
        "-": "its gradients are reduced",
    }
    title = f"fsdp.py: a step of {took} ms on two ranks, measured; a bar is at least 1% wide"
    timeline(rows, "fsdp", colors, legend, title)


def grid():
    """Who has what on parallel_5d.py's grid of 8 ranks, as its docstring says it."""
    figure, axes = plt.subplots(figsize=(9, 4.2))
    stages = ("stage 0: embedding, blocks 1, 2", "stage 1: blocks 3, 4, head")
    for stage, title in enumerate(stages):
        axes.text(4.8 * stage + 2, 4.4, title, ha="center", fontsize=11)
        for cp in range(2):
            for tp in range(2):
                rank = 4 * stage + 2 * cp + tp
                x, y = 4.8 * stage + 2.2 * tp, 2.2 * (1 - cp)
                axes.add_patch(plt.Rectangle((x, y), 1.8, 1.8, ec=GREY, fc="none"))
                lines = [f"rank {rank}", f"chunks {'0, 3' if cp == 0 else '1, 2'}"]
                lines += [f"slice {tp} of 2", f"experts {'0-3' if tp == 0 else '4-7'}"]
                axes.text(x + 0.9, y + 0.9, "\n".join(lines), ha="center", va="center", fontsize=9)
            y = 2.2 * (1 - cp) + 0.9
            arrow = {"arrowstyle": "<->", "lw": 2}
            start, end = (4.8 * stage + 1.8, y), (4.8 * stage + 2.2, y)
            axes.annotate("", end, start, arrowprops=arrow | {"color": BLUE})
            if stage == 0:
                arrows = arrow | {"color": ORANGE, "arrowstyle": "->"}
                axes.annotate("", (4.8, y), (4.0, y), arrowprops=arrows)
        for tp in range(2):
            x = 4.8 * stage + 2.2 * tp + 0.9
            axes.annotate("", (x, 2.2), (x, 1.8), arrowprops=arrow | {"color": GREEN})
    labels = {
        BLUE: "tp and ep: activations, tokens",
        GREEN: "cp: keys and values; FSDP: parameters, gradients",
        ORANGE: "pp: activations",
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in labels]
    options = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.02), "fontsize": 9}
    figure.legend(handles, labels.values(), frameon=False, ncols=3, **options)
    axes.set_xlim(-0.2, 9)
    axes.set_ylim(-0.5, 4.8)
    axes.axis("off")
    save(figure, "grid")


def in_fp32(run):
    return re.sub(r"(\d+\.\d)(?= MB| /|\))", lambda number: str(float(number.group()) / 2), run)


def main():
    runs = demo("ddp") | demo("zero") | demo("fsdp")
    units(demo("docs/fsdp_units")["fsdp"])
    took = re.search(r"a backward of (\d+) ms", runs["ddp"]).group(1)
    buckets = re.findall(r"^  (\d+\.\d MB)    (.*)$", runs["ddp"], re.MULTILINE)
    rows = {f"bucket {i}, {size}": line for i, (size, line) in enumerate(buckets)}
    legend = {"=": "backward fills the bucket", "~": "its all-reduce is under way"}
    timeline(
        rows,
        "ddp",
        {"=": ORANGE, "~": PURPLE},
        legend,
        f"ddp.py: a backward of {took} ms on two ranks, measured",
    )
    tensor, stages = demo("tensor_parallel"), demo("pipeline")
    runs |= {name: in_fp32(run) for name, run in tensor.items()} | stages
    memory(runs)
    sent(runs)
    schedules()
    grid()


if __name__ == "__main__":
    main()
