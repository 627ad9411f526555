"""Which part costs rank? Toys with more masks, fewer dimensions, or some [MASK] in the encoder. Exploratory.

    bash runs/toys.sh out/toys               # train and measure; the same command continues
    python -m bench.toys --collect out/toys  # what has ended so far, into bench/results/toys.json; and the report
    python -m bench.toys --report            # the table in docs/results.md and docs/toys.png, from the record
"""
from pathlib import Path

from bench.evidence import PAGE, RECORD, format_numbers, table, write_between
from bench.speed import commit, cpu_name
from support.cli import Parser, UserError, clear_errors
from support.files import figure, read_json, write_json
from support.log import read_log

JOBS = RECORD / "toys.json"
LABELS = {  # name in runs/toys.sh -> in the table
    "mae-lm-0.15": "mae-lm", "delta-0.25": "delta 0.25", "delta-0.5": "delta 0.5", "delta-0.75": "delta 0.75",
    "enc-mask-0.15": "enc-mask", "mlm-0.15": "mlm",
    "mae-lm-0.4": "mae-lm, 40 % masks", "enc-mask-0.4": "enc-mask, 40 %", "mlm-0.4": "mlm, 40 %",
    "thin-mae-lm": "mae-lm, 6 layers of 32", "thin-mlm": "mlm, 6 layers of 32"}


def collect(out: Path):
    """Write what the toys that have ended found to the record. UserError if none has."""
    toys = {}
    for path in sorted(out.glob("*/rank.json")):
        name, seed = path.parent.name.rsplit("-", 1)
        model, = read_json(path)["models"].values()
        ranks = {curve: top["0.9"] for curve, top in model["layers"][-1]["uncentered"].items()}
        losses = [line["val_loss"] for line in read_log(path.parent) if "val_loss" in line]
        toys.setdefault(name, {})[seed] = ranks | {"val_loss": losses[-1]}
    if not toys:
        raise UserError(f"{out}: nothing has ended there; start runs/toys.sh")
    write_json(JOBS, {"commit": commit(), "machine": f"{cpu_name()}, one thread each", "toys": toys})


def column(toys: dict[str, dict], name: str, field: str) -> list[float]:
    """A number of each seed of a toy."""
    return [toys[name][seed][field] for seed in sorted(toys[name])]


def report():
    """Write the table of docs/results.md and the picture."""
    record = read_json(JOBS, "toys")
    toys, rows = record["toys"], []
    names = [name for name in LABELS if name in toys]
    for name in names:
        losses = format_numbers(column(toys, name, "val_loss"), 3)
        rows.append([LABELS[name], losses, format_numbers(column(toys, name, "without_mask"))])
    write_between("toys", table(["", "validation loss", "top rank of text"], rows))
    with figure(PAGE.with_name("toys.png")) as (drawn, axes):
        drawn.set_size_inches(7.5, 3.2)
        for x, name in enumerate(names):
            d = 32 if name.startswith("thin") else 128
            shares = [rank / d for rank in column(toys, name, "without_mask")]
            axes.plot([x] * len(shares), shares, "C1o" if "mlm" in name else "C0o", alpha=0.6)
        axes.set_xticks(range(len(names)), [LABELS[name] for name in names], rotation=40, ha="right", fontsize="small")
        axes.set(ylabel="top rank of text / dimensions", ylim=(0.4, 0.65))
    print(f"{sum(map(len, toys.values()))} runs of commit {record['commit']}: {PAGE}, toys.png")


def main(argv: list[str] | None = None):
    parser = Parser("bench.toys", __doc__)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--collect", type=Path, metavar="OUT", help="read what has ended there, and report")
    either.add_argument("--report", action="store_true", help="from the record")
    options = parser.parse_args(argv)
    with clear_errors("bench.toys"):
        if options.collect:
            collect(options.collect)
        report()


if __name__ == "__main__":
    main()
