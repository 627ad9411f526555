"""Claims about bench/: intervals, verdicts on a made-up record, runs/evidence.sh, speed.py."""
import json
import math
import os
import subprocess
from itertools import product

import numpy as np
import pytest
import scipy.stats

import train
from bench import evidence, speed
from support.files import read_json, write_json


def test_intervals_are_those_of_scipy_and_p_is_corrected_for_the_number_of_claims():
    values = np.random.default_rng(0).normal(1.0, 2.0, 5)
    ends = scipy.stats.t.interval(0.95, 4, loc=values.mean(), scale=scipy.stats.sem(values))
    found = evidence.interval_of(np.array([math.nan, *values]))
    assert found[1:3] == pytest.approx(ends) and found.p == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue)
    assert evidence.interval_of(np.array([7.0])) == (7.0, -math.inf, math.inf, 1.0)
    assert evidence.interval_of(np.full(3, 1.0), ranks=2).low < 0  # three equal ranks still leave uncertainty
    assert evidence.holm([0.04, 0.01, 0.03, 0.9]) == pytest.approx([0.09, 0.04, 0.09, 0.9])


def test_verdicts_state_effect_and_power():
    def claim(low, high, p):
        interval = evidence.Interval((low + high) / 2, low, high, p)
        found = evidence.Claim("Table 3", "", "29 of 768", 4.8, None, interval, p)
        return found.verdict(), found.power()
    cases = {(1, 9, 0.01): ("confirmed", "inside"), (-9, -1, 0.01): ("reversed", "outside"),
             (5, 9, 0.06): ("inconclusive", "outside"), (-9, 1, 0.1): ("inconclusive", "outside")}
    for case, (verdict, place) in cases.items():
        assert claim(*case) == (verdict, f"29 of 768: 4.8, {place}")


def record_of(sign):
    """A record of seeds 3 to 5 in which MAE-LM is ahead (sign 1) or behind (sign -1)."""
    found = {}
    for seed, (model, ahead) in product((3, 4, 5), (("mae-lm", sign), ("mlm", 0))):
        ranks = {"with_mask": 70, "without_mask": 60 + 9 * ahead, "mask_only": 30}
        layers = [{"uncentered": ranks | {"mask_only": low}} for low in (30 - 9 * sign, 30)]
        found[f"train {model} {seed}"] = {}
        found[f"rank {model} {seed}"] = dict.fromkeys("123456", {"layers": layers})
        after = [None, {"uncentered": 40 + 9 * ahead}]  # None: that seed diverged
        found[f"docs {model} {seed}"] = {"median": 50 + (1 + seed / 100) * ahead, "effective_rank": {"after": after}}
    return {name: {"found": one} for name, one in found.items()}


@pytest.mark.parametrize("sign, word", [(1, "confirmed"), (-1, "reversed")])
def test_claims_follow_the_sign_of_differences(sign, word):
    found = {claim.where: claim.verdict() for claim in evidence.claims(evidence.Record(record_of(sign)))}
    expected = dict.fromkeys(("Figure 1b", "Table 3", "Table 3, docs", "Table 1"), word)
    assert found == expected | {"Figure 1a": "confirmed"}


def test_the_projects_record_gives_its_page(tmp_path, monkeypatch):
    page = tmp_path / "results.md"
    pages = [evidence.PAGE, page]
    page.write_text("before <!-- verdicts -->\nstale\n<!-- end of verdicts --> after")
    monkeypatch.setattr(evidence, "PAGE", page)
    evidence.main(["--report"])
    ours, made = [path.read_text(encoding="utf-8").partition("<!-- verdicts -->")[2] for path in pages]
    assert made.endswith("<!-- end of verdicts --> after") and ours.startswith(made.removesuffix(" after"))
    assert (tmp_path / "rank.png").is_file()


def test_finished_ranks_are_drawn_before_all_jobs_have_ended(tmp_path):
    curves = {"with_mask": [3, 5], "without_mask": [4, 6], "mask_only": [1, 2]}
    model = {"uncentered": curves, "centered": curves, "d": 8, "n": {}}
    write_json(tmp_path / "rank-mlm-3/rank.json", {"tau": 0.9, "models": {"RUN": model}})
    (tmp_path / "rank-mlm-3.log").write_text("+ python rank.py RUN\n= 60 s\n")
    collected = dict.fromkeys(("train mlm 3", "train mlm 4"), {"found": {"losses": [[6, 3.0]]}})
    write_json(tmp_path / "evidence.json", {"jobs": collected})
    evidence.main(["--collect", str(tmp_path)])
    record = evidence.Record(read_json(tmp_path / "evidence.json")["jobs"])
    assert record.ranks("mlm", "without_mask")[0] == [4, 6] and math.isnan(record.rank("mlm", "mask_only")[1])
    assert (tmp_path / "rank.png").is_file()


if hasattr(os, "fork"):  # not on Windows
    def test_both_models_are_trained_alike_and_only_finished_jobs_are_collected(tmp_path):
        python, calls = tmp_path / "python", tmp_path / "calls"
        python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *train-mlm-3) exit 3; esac\n')
        python.chmod(0o755)
        settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PRESET": "toy", "SEEDS": "3", "JOBS": "1"}
        script = subprocess.run(["bash", "runs/evidence.sh", "docs", "", tmp_path], cwd=speed.HERE.parent, env=settings)
        jobs = {line.rpartition("/")[2]: line.split()[1:-2] for line in calls.read_text().splitlines()[:-1]}
        assert script.returncode and " ".join(jobs) == "train-mae-lm-3 rank-mae-lm-3 docs-mae-lm-3 train-mlm-3"
        for model, step in (("mae-lm", 6), ("mlm", 3)):
            assert jobs[f"train-{model}-3"] == f"--preset toy --data docs --ablation {model} --seed 3".split()
            write_json(tmp_path / f"train-{model}-3" / "config.json", {"init": "", "max_steps": 6})
            (tmp_path / f"train-{model}-3" / "log.jsonl").write_text(json.dumps({"step": step, "val_loss": 3.0}))
        evidence.collect(tmp_path)
        (name, job), = read_json(tmp_path / "evidence.json")["jobs"].items()
        assert (name, job["found"]) == ("train mae-lm 3", {"losses": [[6, 3.0]]})
        assert job["command"].split()[2:-2] == jobs["train-mae-lm-3"]


def test_speed_measures_maelm_and_roberta_in_turns(tmp_path, monkeypatch):
    fields = dict(seq_len=16, encoder_dim=64, encoder_heads=2, vocab_size=300)
    monkeypatch.setattr(speed, "make_config", lambda *names: train.make_config(*names, **fields))
    command = f"--sizes toy --models mae-lm roberta --rows 2 --turns 2 --out {tmp_path / 'speed.json'}"
    speed.main(command.split())
    (run,) = read_json(tmp_path / "speed.json")["runs"]
    ours, theirs = run["models"]["mae-lm"], run["models"]["roberta"]
    ratios = [a / b for a, b in zip(ours["tokens_per_second"], theirs["tokens_per_second"], strict=True)]
    assert ours["ratio"] == pytest.approx([min(ratios), sum(ratios) / 2, max(ratios)]) and theirs["ratio"] == [1, 1, 1]
