#!/usr/bin/env python3
"""Draws the table of dev/optim: the share of the copy rate of each combination, one bar per size.

    ./build/dev/optim --csv optim.csv
    python dev/plot_optim.py optim.csv -o optim.png
"""

import csv
import sys

from problem import Parser, Problem, answered, installs, regular

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as missing:
    print(f"plot_optim: error: {missing}; {installs('-r dev/requirements.txt')}", file=sys.stderr)
    sys.exit(2)

COLOURS = ["#0072B2", "#56B4E9", "#009E73"]  # Okabe and Ito's


def main():
    parser = Parser(description="draw the table of dev/optim")
    parser.add_argument("csv", help="what dev/optim --csv wrote")
    parser.add_argument("-o", "--output", default="optim.png", help="picture to write (.png, .svg or .pdf) [%(default)s]")
    arguments = parser.parse_args()
    try:
        with open(regular(arguments.csv), encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        share = {(row["combination"], row["size"]): float(row["percent_of_copy"]) for row in rows}
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise Problem(f"{arguments.csv}: {error}; give the file that dev/optim --csv wrote") from None
    if not rows:
        raise Problem(f"{arguments.csv} holds no rows; give the file that dev/optim --csv wrote")
    names = list(dict.fromkeys(row["combination"] for row in rows))
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.28 * len(names)))
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        places = [n + height * (i - (len(sizes) - 1) / 2) for n in range(len(names))]
        axes.barh(places, [share.get((name, size), 0.0) for name in names], height, color=COLOURS[i % 3], label=size)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(names) - 0.4, -0.6)
    for target in (80, 90):
        axes.axvline(target, color="#808080", linewidth=0.7, linestyle=":")
    axes.set_xlabel("bytes that must move over time, % of the copy rate of the same run")
    axes.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    try:
        figure.savefig(arguments.output, dpi=110)
    except (OSError, ValueError) as error:
        raise Problem(f"{arguments.output}: {error}; give a .png, .svg or .pdf in a folder that is there") from None


if __name__ == "__main__":
    sys.exit(answered("plot_optim", main))
