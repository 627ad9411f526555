"""Claims about bench/: a line follows from the files of its programs, and verdicts and tables from the lines."""
import functools
import json
import re
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import scipy.stats
import torch

from bench import claims, idea, speed
from support.program import UserError, json_lines, read_json, read_lines, write_json, write_text
from support.results import CODE
from support.run import flops
from tests.common import fails, make_config, read_log


def line(name, seed, tuned, tokens=100, **more):
    """A line of a record, all of whose scores follow from one."""
    ranks = {"without_mask": [1, 40 + seed], "mask_only": [1, 20]}
    return {"name": name, "seed": seed, "tokens": tokens, "seconds": 90, "flops": 3e12, "val_loss": 2.5,
                   "ranks": ranks, "tuned": tuned, "mean8": tuned / 2, "cls8": 30.0, "mean": 1.0, "cls": 1.0,
                   "quick": 3 * tuned} | more


def printed(record, made, command, tmp_path, monkeypatch, capsys):
    """The output of bench.idea for a record and made models."""
    write_text(tmp_path / "record.jsonl", json_lines(record))
    for each in made:
        name = re.sub("[ -]+", "-", each["name"])
        write_json(tmp_path / f"out/{name}-{each['seed']}.json", each | {"code": CODE})
    with monkeypatch.context() as patch:
        patch.setattr(idea.subprocess, "run", None)  # nothing is trained
        patch.setattr(idea, "RECORD", tmp_path / "record.jsonl")
        idea.main([*command.split(), "--out", str(tmp_path / "out")])
    return capsys.readouterr().out


def test_a_verdict_follows_from_the_differences_between_equal_seeds(tmp_path, monkeypatch, capsys):
    base, other = [60.0, 61.0, 63.0], [64.0, 66.5, 66.0]
    made = [line("mae-lm", 11 + i, score) for i, score in enumerate(base)]
    made += [line("mlm", 13 - i, score) for i, score in enumerate(other[::-1])]
    record = [line("mlm", 14, 0.0), line("mlm", 11, 0.0), line("mlm --max-steps 9", 11, 10.0, tokens=9)]
    show = functools.partial(printed, record, made, tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    output = show("mlm")
    test = scipy.stats.ttest_1samp([b - a for a, b in zip(base, other)], 0)
    low, high = test.confidence_interval()
    assert f"| tuned | +4.0, +5.5, +3.0 | +4.2 | {low:.1f} to {high:.1f} | better |\n" in output and low > 0
    assert "| cls8 | +0.0, +0.0, +0.0 | +0.0 | 0.0 to 0.0 | undecided; 100 or more seeds" in output
    assert "0 models to make" in output and "`mlm` minus `mae-lm`:" in output
    for seeds, word in (("11 13", "undecided"), ("11 12 13", "worse")):
        output = show(f"mae-lm --against mlm --seeds {seeds}")
        assert word in output.split("| tuned | -")[1].splitlines()[0]
    output = show("mlm --scores tuned cls --quick")
    assert "| quick | +12.0, +16.5, +9.0 |" in output and "| cls |" in output and "| tuned |" not in output
    show("mlm --record")
    assert len(read_lines(tmp_path / "record.jsonl")) == 8
    assert made[5] in read_lines(tmp_path / "record.jsonl")  # in place of the recorded one


def test_one_seed_is_judged_by_the_deviation_between_recorded_seeds(tmp_path, monkeypatch, capsys):
    made = [line("mae-lm", 11, 60.0), line("mlm", 11, 63.0)]
    record = [line("mae-lm", 12, 61.0), line("mae-lm", 13, 62.5), line("enc-mask", 12, 60.0)]
    record += [line("enc-mask", 13, 61.0), line("dec-2", 11, 0.0, tokens=9), line("dec-2", 12, 99.0, tokens=9)]
    # Other models lack the score.
    record += [{key: value for key, value in line("cross", seed, 0.0).items() if key != "tuned"} for seed in (11, 12)]
    output = printed(record, made, "mlm --seeds 11", tmp_path, monkeypatch, capsys)
    deviation = ((2 * scipy.stats.tvar([60, 61, 62.5]) + 0.5) / 3) ** 0.5  # enc-mask's variance is 0.5
    half = scipy.stats.t.ppf(0.975, 3) * deviation * 2 ** 0.5
    assert f"| tuned | +3.0 | +3.0 | {3 - half:.1f} to {3 + half:.1f} | undecided; " in output
    enough = int(output.split("undecided; ")[1].split()[0])
    widths = [scipy.stats.t.ppf(0.975, n - 1) * deviation * (2 / n) ** 0.5 for n in (enough - 1, enough)]
    assert widths[1] < 3 <= widths[0]
    output = printed([], made, "mlm --seeds 11", tmp_path, monkeypatch, capsys)
    assert "| tuned | +3.0 | +3.0 | -inf to inf | undecided with one seed" in output


def test_the_baseline_gets_the_steps_and_the_masks_of_the_idea(tmp_path, monkeypatch, capsys):
    names = [f"{row} --mask-rate 0.5 --max-steps 30" for row in ("mae-lm", "dec-2")]
    made = [line(name, 11, 50.0) for name in names]
    output = printed([], made, f"{names[1]} --seeds 11", tmp_path, monkeypatch, capsys)
    assert f"`{names[1]}` minus `{names[0]}`:" in output
    assert "use --seeds" in fails(lambda: idea.main("mlm --seed 3".split()), capsys)


def test_a_line_follows_from_the_files_of_the_programs(finished, tmp_path):
    folder = tmp_path / "run"
    folder.symlink_to(finished)
    ranks = {"without_mask": [1, 2], "mask_only": [3, 4]}
    write_json(tmp_path / "run-rank/rank.json", {"models": {"any": {"uncentered": ranks, "centered": {}}}})
    for number, score in enumerate(("tuned", "cls8", "order2")):
        write_json(tmp_path / f"run-{score}/result.json", {"median": 50.0 + number, "values": [40.0 + number]})
    model = idea.Model("mae-lm", 0, folder)
    found = model.line(["tuned", "cls8", "order2"])
    log = read_log(finished)
    assert (found["name"], found["seed"], found["code"]) == ("mae-lm", 0, CODE)
    assert found["text"] == read_json(finished / "config.json")["corpus"] and found["dtype"].startswith("torch.")
    assert [found[score] for score in ("tuned", "cls8", "order2", "quick")] == [50, 51, 52, 40]
    assert found["ranks"] == ranks and "mean" not in found
    assert (found["tokens"], found["val_loss"]) == (6 * 8 * 24, log[-1]["val_loss"])
    assert found["flops"] == log[0]["start"]["flops_per_token"] * found["tokens"]
    assert json.loads(json.dumps(found)) == found and read_json(folder / "config.json")["max_steps"] == 6


def test_models_are_made_some_at_a_time_until_one_fails(tmp_path, monkeypatch, capsys):
    made = []

    def run(command, stdout, stderr, env):
        made.append((command[1].name, env["OMP_NUM_THREADS"]))
        return Mock(returncode=int("fails" in command))

    monkeypatch.setattr(idea.subprocess, "run", run)
    monkeypatch.setattr(idea.Model, "line", lambda model, scores: {"seed": model.seed} | dict.fromkeys(scores, 1))
    models = [idea.Model("mlm", seed, tmp_path / str(seed)) for seed in range(3)]
    idea.make(models, ["tuned", "cls8"], 2)
    assert [read_json(model.beside(".json"))["seed"] for model in models] == [*range(3)]
    assert not models[0].lacks(["cls8"]) and models[0].lacks(["mean"]) and idea.Model("x", 0, tmp_path / "no").lacks([])
    programs = ["train.py", "rank.py", "finetune.py", "finetune.py"]
    assert sorted(made) == sorted(3 * [(program, "1") for program in programs]) and "3 of 3" in capsys.readouterr().out
    with pytest.raises(UserError, match="train.py --ablation fails --seed 9 .*: failed; see"):
        idea.make([idea.Model("fails", 9, tmp_path / "9")], [], 1)


def test_a_claim_holds_if_all_its_differences_do_after_holms_correction():
    assert claims.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert claims.holm([0.7, 0.6]) == pytest.approx([1, 1])
    one, other = np.array([5.0, 6, 7, 9]), np.array([1.0, 2, 6])
    error = (one.var(ddof=1) / 4 + other.var(ddof=1) / 3) ** 0.5
    freedom = error ** 4 / ((one.var(ddof=1) / 4) ** 2 / 3 + (other.var(ddof=1) / 3) ** 2 / 2)
    half = scipy.stats.t.ppf(0.975, freedom) * error
    p, interval = claims.welch(one, other)
    assert p == pytest.approx(2 * scipy.stats.t.sf(3.75 / error, freedom))
    assert interval == f"{3.75 - half:.1f} to {3.75 + half:.1f}"
    known = scipy.stats.ttest_1samp(one, 2)
    low, high = known.confidence_interval()
    assert claims.welch(one, np.array([2.0])) == (pytest.approx(known.pvalue), f"{low - 2:.1f} to {high - 2:.1f}")
    rows = [("a", 3.0, 0.001), ("b", 2.0, 0.001), ("b", 1.0, 0.02), ("c", -1.0, 0.004), ("d", 1.0, 0.03),
            ("e", 1.0, 0.0), ("e", -1.0, 0.0)]
    found = claims.decided([dict(zip(("claim", "difference", "p"), row)) for row in rows])
    assert [*found["p, Holm"]] == ["0.004", "0.040", "0.040", "0.012", "0.040", "0.000", "0.000"]
    assert [*found["verdict"]] == ["holds", "holds", "holds", "is reversed", "holds", "undecided", "undecided"]
    assert [*found["difference"]][3] == "-1.0"


def test_claims_compare_the_scores_of_the_record(tmp_path, figures, monkeypatch):
    """Of each model by its pooling, for seeds from 31 on, and of baselines."""
    monkeypatch.setattr(claims, "SEEDS", (31, 32))
    lines, poolings = [], ["cls", "mean", "mean", "cls", "cls", "mean", "mean"]
    for number, (row, pooling) in enumerate(claims.MODELS.values()):
        assert pooling == poolings[number]
        for seed in (11, 31, 32):
            scores = {f"{pooling}{shots}": 10.0 * number + seed + i for i, shots in enumerate((4, 8, 16, 32, ""))}
            scores |= {"order0.5": 91.5 - number - seed, f"modules-{pooling}8": 39.0 + seed}
            scores["tuned"] = 111.5 - number - seed
            other = {"cls": "mean", "mean": "cls"}[pooling]
            lines.append(line(row, seed, 0) | {f"{other}{shots}": 0.0 for shots in (4, 8, 16, 32, "")} | scores)
    baselines = [{"model": model, "task": "docs", "shots": shots, "median": median + i}
                 for i, shots in enumerate((4, 8, 16, 32, 0)) for model, median in (("LSA", 30), ("naive Bayes", 40))]
    baselines += [{"model": "naive Bayes", "task": task, "shots": shots, "median": median}
                  for task, shots, median in (("bshift", 0, 58.0), ("modules", 8, 47.0))]
    record = claims.Record(pandas.DataFrame(lines), baselines)
    found = claims.claims(record)
    assert [*found["claim"]] == [*"abcddddef"]
    # d: order, twice, then 8 labels, twice
    assert [*found["difference"]] == ["-10.0", "-8.5", "-1.0", "-2.0", "1.0", "-20.0", "10.0", "1.0", "0.0"]
    rows = claims.table(record).set_index("model")
    assert [*rows.loc["MLM"]] == [41.5, 42.5, 43.5, 44.5, 45.5, 70.5, 59, 79, 71.5, 3, 2]
    assert [*rows.loc["naive Bayes"]] == [40, 41, 42, 43, 44, 47, 58, "", "", "", ""]
    assert [*rows.loc["LSA"]][:7] == [30, 31, 32, 33, 34, "", ""]
    claims.draw(record, tmp_path / "few.png")
    left, right = figures[0].axes
    curves = {text.get_text(): [*each.get_ydata()] for text, each in zip(left.texts, left.get_lines())}
    assert curves["naive Bayes"] == [40, 41, 42, 43, 44] and curves["MLM"] == [41.5, 42.5, 43.5, 44.5, 45.5]
    points = {each.get_ydata()[0]: [*each.get_xdata()] for each in right.get_lines()
              if each.get_marker() == "o" and len(each.get_xdata())}
    assert points == {"MAE-LM": [60.5, 59.5], "MLM": [59.5, 58.5], "MAE-LM + [MASK]": [58.5, 57.5],
                      "naive Bayes": [58], "untrained": [54.5, 53.5]}


def test_the_tables_of_results_md_are_those_of_the_records(tmp_path, capsys):
    claims.main(["--figure", str(tmp_path / "any.png")])
    page = (idea.ROOT / "docs/results.md").read_text(encoding="utf-8")
    tables = capsys.readouterr().out.split("\n\n")[1::2]
    assert len(tables) >= 2 and all(table in page for table in tables)


def test_a_speed_counts_all_tokens_and_the_flops_of_its_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "Timer", timer := Mock())
    timer.return_value.timeit.return_value.median = 1e-6
    speed.main(["--rows=8", "--turns=3", "--models", "mae-lm", "mlm --mask-rate 0.5", f"--out={tmp_path}/speed.json"])
    found = read_json(tmp_path / "speed.json")["tokens_per_second"]
    assert found == {"mae-lm": 3 * [pytest.approx(512e6)], "mlm --mask-rate 0.5": 3 * [pytest.approx(512e6)]}
    configs = make_config("toy", "mae-lm"), make_config("toy", "mlm", mask_rate=0.5)
    for line, config in zip(capsys.readouterr().out.splitlines(), configs, strict=True):
        assert f"512,000,000 tokens/s  {512e6 * flops(config) / 64 / 1e12:8.2f} TFLOP/s" in line
    assert {call.kwargs["num_threads"] for call in timer.call_args_list} == {torch.get_num_threads()}
