"""Tables and figures of the paper from finished folders: result.json of finetune.py, rank.json of rank.py.

    python bench/collect.py --table1 out/glue-base out/squad2-base            # a row for each encoder
    python bench/collect.py --table3 out/rank out/mnli-base out/mnli-base-mlm # rank after pre-training, and fine-tuned
    python bench/collect.py --figure4 out/mnli-base out/mnli-base-0.25        # score against delta, mask_in_encoder

Nothing is measured here. Each writes table1.json, table3.json or figure4.json, and figure4.png, to --out. Figure 3 is
drawn by finetune.py --figure3, which says after which share of another run's time a run is as good.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from files import Parser, UserError, clear_errors, read_json, write_json  # noqa: E402
from finetune import rank_after, seeds_of, shown, table1  # noqa: E402
from rank import CENTERINGS  # noqa: E402
from run import figure  # noqa: E402


def read_results(folders: list[Path]) -> list[dict]:
    """What finetune.py found in each folder; that of --task glue has eight results. UserError if one has none."""
    results = []
    for folder in folders:
        result = read_json(folder / "result.json", {"task": str})
        for found in result.get("results", [result]):
            if "model" not in found:
                raise UserError(f"{folder}: result.json is of an earlier version; give its finetune.py command again")
            results.append(found)
    return results


def all_table1(folders: list[Path]) -> dict:
    """Print a row of Table 1 for each encoder; returns {encoder: {column: percent}}."""
    encoders = {}
    for result in read_results(folders):
        encoders.setdefault(result["init"], []).append(result)
    rows = {}
    for init, results in encoders.items():
        rows[init] = table1(results)
        print(init, *[f"{name} {shown(value, digits=1)}" for name, value in rows[init].items()], sep="  ")
        for result in results:
            if None in result["values"]:
                print(f"  {result['task']}: median of {seeds_of(result['values'])}")
    return {"rows": rows}


def table3(folders: list[Path]) -> dict:
    """Print rank_0.9(H^L) of text without [MASK], by encoder: after pre-training, on the corpus (rank.json), and before
    and after fine-tuning, on the dev part of a task. Returns the lines."""
    rows = []
    for folder in folders:
        if not (folder / "rank.json").is_file():
            continue
        for name, model in read_json(folder / "rank.json", {"models": dict})["models"].items():
            top = model["layers"][-1]
            if "0.9" not in top["uncentered"]["without_mask"]:
                raise UserError(f"{folder}: rank.json has no tau = 0.9; give its rank.py command again with --tau 0.9")
            before = {centering: top[centering]["without_mask"]["0.9"] for centering in CENTERINGS}
            rows.append({"encoder": name, "text": "pre-training", "d": model["d"], "before": before, "after": None})
    for result in read_results([folder for folder in folders if not (folder / "rank.json").is_file()]):
        ranks, after = result["effective_rank"], {}
        for name in CENTERINGS:
            after[name] = rank_after(ranks, name)
        rows.append({"encoder": result["init"], "text": result["task"], "d": ranks["d"], "before": ranks["before"],
                     "after": after, "of": seeds_of(ranks["after"])})
    rows.sort(key=lambda row: row["encoder"])  # by its name in the commands; the order of its texts stays
    for row in rows:
        line = f"{row['encoder']}  {row['text']}  d = {row['d']}"
        for centering in CENTERINGS:
            line += f"  {centering} {row['before'][centering]}"
            if row["after"] is not None:
                line += f" -> {shown(row['after'][centering], digits=0)}"
        print(line, f"(median of {row['of']})" if row["after"] else "")
    return {"tau": 0.9, "rows": rows}


def figure4(folders: list[Path], out: Path) -> dict:
    """Draw the score of each task against delta, the share of [MASK] that the encoder was shown; returns the points."""
    points = []
    for result in read_results(folders):
        if "mask_in_encoder" not in result["model"]:
            raise UserError(f"{result['init']}: no encoder of train.py, so without a delta; leave it out")
        # Footnote 2 of the paper: an MLM has delta = 1 and no decoder, which is not the last point of the figure.
        line = result["task"] + ("" if result["model"]["decoder_layers"] else ", no decoder")
        points.append({"line": line, "delta": result["model"]["mask_in_encoder"], "encoder": result["init"],
                       "metric": result["metric"], "median": result["median"], "values": result["values"]})
    points.sort(key=lambda point: (point["line"], point["delta"]))
    with figure(out / "figure4.png") as (_, axes):
        for line in dict.fromkeys(point["line"] for point in points):
            sound = [point for point in points if point["line"] == line and point["median"] is not None]
            axes.plot([p["delta"] for p in sound], [p["median"] for p in sound], marker="o", label=line)
        axes.set(xlabel="delta: share of [MASK] in the encoder's input", ylabel="score (%), medians")
        axes.legend()
    for point in points:
        print(f"{point['line']}  delta {point['delta']:g}  {point['metric']} {shown(point['median'])}  "
              f"(median of {seeds_of(point['values'])})  {point['encoder']}")
    return {"points": points}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="collect.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    for name in ("table1", "table3", "figure4"):
        parser.add_argument(f"--{name}", nargs="+", type=Path, metavar="FOLDER", help="finished folders")
    parser.add_argument("--out", type=Path, default=Path("out/collected"), help="for the results [%(default)s]")
    options = parser.parse_args(argv)
    if not (options.table1 or options.table3 or options.figure4):
        parser.error("give --table1, --table3 or --figure4 and folders")
    with clear_errors("collect.py"):
        if options.table1:
            write_json(options.out / "table1.json", all_table1(options.table1))
        if options.table3:
            write_json(options.out / "table3.json", table3(options.table3))
        if options.figure4:
            write_json(options.out / "figure4.json", figure4(options.figure4, options.out))


if __name__ == "__main__":
    main()
