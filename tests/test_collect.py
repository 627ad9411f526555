"""Claims about bench/collect.py: tables of finished folders."""
import sys

import pytest

import files
import rank
import tasks
from conftest import HERE, fails


@pytest.fixture(scope="module")
def collect():
    """bench/collect.py."""
    sys.path.insert(0, str(HERE / "bench"))
    import collect
    return collect


def write_result(folder, task="mnli", init="out/base", delta=0.0, values=(80.0, 82.0, None), after=(100, 120, None), **fields):
    """A folder as finetune.py leaves it, in so far as it is read."""
    ranks = {"before": {"uncentered": 40, "centered": 50}, "d": 768,
             "after": [rank and {"uncentered": rank, "centered": rank + 1} for rank in after]}
    sound = [value for value in values if value is not None]
    median = sum(sound) / len(sound) if sound else None
    result = {"task": task, "init": init, "metric": "accuracy", "median": median, "values": list(values), "effective_rank": ranks,
              "metrics": {"accuracy": median, "accuracy_mm": 7.0}, "model": {"mask_in_encoder": delta, "decoder_layers": 4}, **fields}
    files.write_json(folder / "result.json", result)
    return result


def run(collect, capsys, flag, *folders, out):
    """What a command prints, and what it writes."""
    collect.main([f"--{flag}", *map(str, folders), "--out", str(out)])
    return capsys.readouterr().out, files.read_json(out / f"{flag}.json")


def test_table_1_has_a_row_for_each_encoder(collect, tmp_path, capsys):
    for name, init in (("a", "out/base"), ("b", "out/base-mlm")):
        write_result(tmp_path / f"squad-{name}", "squad2", init, metrics={"exact": 78.0, "f1": 81.5})
        results = [write_result(tmp_path / "one", task, init) for task in tasks.GLUE]
        files.write_json(tmp_path / f"glue-{name}" / "result.json", {"task": "glue", "results": results})
    folders = [tmp_path / name for name in ("glue-a", "squad-a", "squad-b", "glue-b")]
    printed, table = run(collect, capsys, "table1", *folders, out=tmp_path)
    assert list(table["rows"]) == ["out/base", "out/base-mlm"]
    for row in table["rows"].values():
        assert row["mnli-m"] == row["average"] == 81 and row["mnli-mm"] == 7 and row["squad2 em"] == 78
    assert "out/base  mnli-m 81.0  mnli-mm 7.0  qqp 81.0" in printed
    assert "rte: median of 2 of 3 seeds; 1 diverged" in printed


def test_table_3_has_ranks_before_and_after_fine_tuning(collect, tmp_path, capsys):
    write_result(tmp_path / "mnli")
    write_result(tmp_path / "mlm", init="out/base-mlm", after=(None, None), values=(None, None))
    curves = {centering: {curve: {"0.9": 491} for curve in rank.CURVES} for centering in rank.CENTERINGS}
    files.write_json(tmp_path / "rank" / "rank.json", {"models": {"out/base": {"d": 768, "layers": [{}, curves]}}})
    printed, table = run(collect, capsys, "table3", *[tmp_path / name for name in ("mnli", "mlm", "rank")], out=tmp_path)
    assert printed.splitlines() == [
        "out/base  pre-training  d = 768  uncentered 491  centered 491 ",
        "out/base  mnli  d = 768  uncentered 40 -> 110  centered 50 -> 111 (median of 2 of 3 seeds; 1 diverged)",
        "out/base-mlm  mnli  d = 768  uncentered 40 -> -  centered 50 -> - (median of 0 of 2 seeds; 2 diverged)"]
    assert [row["text"] for row in table["rows"]] == ["pre-training", "mnli", "mnli"]


def test_figure_4_has_the_score_by_delta(collect, tmp_path, capsys):
    for delta in (1.0, 0.0, 0.25):
        write_result(tmp_path / f"d{delta}", init=f"out/base-{delta}", delta=delta, values=(90 - 10 * delta,))
    write_result(tmp_path / "mlm", delta=1.0, model={"mask_in_encoder": 1.0, "decoder_layers": 0})
    folders = sorted(path for path in tmp_path.iterdir())
    printed, found = run(collect, capsys, "figure4", *folders, out=tmp_path / "out")
    assert [(p["line"], p["delta"], p["median"]) for p in found["points"]] == [
        ("mnli", 0, 90), ("mnli", 0.25, 87.5), ("mnli", 1, 80), ("mnli, no decoder", 1, 81)]
    assert (tmp_path / "out" / "figure4.png").stat().st_size > 5000 and "mnli  delta 0.25  accuracy 87.50" in printed


def test_bad_folders_get_one_line(collect, tmp_path, capsys):
    write_result(tmp_path / "hub", model={"hub": "roberta-base"})
    write_result(tmp_path / "old")
    old = files.read_json(tmp_path / "old" / "result.json")
    del old["model"]
    files.write_json(tmp_path / "old" / "result.json", old)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text('{"task": ')
    curves = {centering: {curve: {"0.5": 491} for curve in rank.CURVES} for centering in rank.CENTERINGS}
    files.write_json(tmp_path / "rank" / "rank.json", {"models": {"out/base": {"d": 768, "layers": [curves]}}})
    for flag, name, message in (("figure4", "hub", "without a delta"), ("table1", "old", "earlier version"),
                                ("table3", "none", "result.json: no such file"), ("table1", "cut", "cut off"),
                                ("table3", "rank", "no tau = 0.9")):
        assert message in fails(lambda flag=flag, name=name: collect.main([f"--{flag}", str(tmp_path / name)]), capsys)
    assert "give --table1" in fails(lambda: collect.main([]), capsys)
