"""Claims about bench/evidence.py: which jobs are run, what is recorded, and how a verdict is reached."""
import argparse
import sys

import numpy as np
import pytest
import scipy.stats

import files
import finetune
import rank
import run
import train
from conftest import HERE, catches, run_with_wrong_version, wrong_versions

sys.path.insert(0, str(HERE / "bench"))
import evidence  # noqa: E402


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A record and a page of the test's own, and no long pauses."""
    monkeypatch.setattr(evidence, "PAUSE", 0.05)
    monkeypatch.setattr(evidence, "RECORD", tmp_path / "evidence.json")
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "evidence.md")
    return evidence


def options_in(out, **changes):
    return argparse.Namespace(**dict(data="text", glue="glue", hours=1.0, at_once=1, steps=None,
                                     learning_rate=evidence.RATE, docs_epochs=evidence.EPOCHS["docs"], preset="laptop",
                                     seeds=3, only=None, out=out, record=evidence.RECORD) | changes)


# ---- The jobs -------------------------------------------------------------------------------------------------------
def test_every_job_is_a_command_that_its_program_takes(tmp_path):
    read = {"train.py": train.parse, "rank.py": rank.read_options, "finetune.py": finetune.read_command}
    jobs = evidence.jobs(options_in(tmp_path, steps=1000))
    kinds = {tuple(word for word in job.command if word.startswith("--")) + (job.command[0],): job for job in jobs}
    assert 5 < len(kinds) < 15
    for job in kinds.values():
        program, *flags = job.command
        assert read[program](flags)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) and len({job.folder for job in jobs}) == len(jobs)
    for job in jobs:  # what a job needs comes before it
        assert all(names.index(need) < names.index(job.name) for need in job.needs)


def test_both_models_are_trained_alike_but_for_their_ablation(tmp_path):
    """Equal steps, rows and seeds: the fields of the two runs of a seed differ in the method alone, and the same
    checkpoints of both are measured, which a run leaves."""
    commands = {job.name: job.command[1:] for job in evidence.jobs(options_in(tmp_path)) if job.command[0] == "train.py"}
    for seed in range(evidence.SEEDS):
        (mae, recipe, _), (mlm, other, _) = [train.parse(commands[f"train {model} {seed}"]) for model in evidence.MODELS]
        assert recipe == other and recipe.seed == seed
        assert mae == train.make_config("laptop") and mlm == train.make_config("laptop", "mlm")
        tokens = recipe.max_steps * recipe.batch_size * mae.seq_len
        assert tokens >= 100e6
        ranks = {job.name: job.command for job in evidence.jobs(options_in(tmp_path))}
        for model in evidence.MODELS:
            folder = tmp_path / f"train-{model}-{seed}"
            paths = [word for word in ranks[f"rank {model} {seed}"] if word.endswith(".pt")]
            steps = [recipe.checkpoint_interval * i for i in range(1, evidence.KEPT)] + [recipe.max_steps]
            assert paths == [str(run.checkpoint_path(folder, step)) for step in steps]
            tuned = [word for word in ranks[f"figure3 {seed}"] if word.startswith(f"{folder}/")]
            assert len(tuned) == 3 and tuned[-1] == paths[-1] and set(tuned) < set(paths)
    deltas = [train.parse(commands[f"short train {name}"])[0].mask_in_encoder for name in evidence.DELTAS]
    assert deltas == [0, 0.25, 0.5, 0.75, 1]


def test_neither_a_pause_nor_a_neighbour_changes_the_pace_of_a_run(tmp_path):
    lines, seconds = [{"step": 0, "unigram_entropy": 6.0, "val_loss": 7.0, "seconds": 0.0}], 0.0
    for step in range(100, 1001, 100):
        seconds += 50.0 if step in (300, 400, 700) else 10.0
        lines.append({"step": step, "loss": 5.0, "seconds": seconds})
    lines.append({"step": 1000, "val_loss": 4.0, "seconds": seconds + 7})
    for line in lines:
        files.append_line(tmp_path / "log.jsonl", line)
    found = evidence.read_training(tmp_path)
    assert found == {"losses": [[0, 7.0], [1000, 4.0]], "unigram_entropy": 6.0, "seconds": round(seconds + 7),
                     "seconds_per_step": pytest.approx(0.1)}
    short = tmp_path / "short"
    short.mkdir()
    for line in lines[0], {"step": 50, "loss": 5.0, "seconds": 10.0}:
        files.append_line(short / "log.jsonl", line)
    assert evidence.read_training(short)["seconds_per_step"] == pytest.approx(0.2)


# ---- Running them ---------------------------------------------------------------------------------------------------
def stub(folder, name, program, *needs):
    (folder / f"{name}.py").write_text(program)
    return evidence.Job(name, [str(folder / f"{name}.py")], folder / name, lambda folder: {"name": name}, needs)


@catches("evidence.run_jobs", "if one.process.returncode == 0:", "if True:")
@catches("evidence.next_job", " and all(need in done for need in job.needs)", "")
def test_what_ended_well_is_recorded_and_not_run_again(own, tmp_path, capsys):
    log = tmp_path / "order"

    def says(name, end=""):
        return f"open({str(log)!r}, 'a').write('{name} '); raise SystemExit({end!r} or 0)"
    todo = [stub(tmp_path, "second", says("second"), "first"), stub(tmp_path, "first", says("first")),
            stub(tmp_path, "bad", says("bad", "no such file: x")), stub(tmp_path, "never", says("never"), "bad"),
            stub(tmp_path, "last", says("last"))]
    assert evidence.run_jobs(list(todo), options_in(tmp_path)) == ["bad"]
    assert log.read_text().split() == ["first", "second", "bad", "last"]
    assert "bad failed: no such file: x" in capsys.readouterr().out
    found = evidence.recorded(evidence.RECORD)
    assert list(found) == ["first", "second", "last"] and found["last"]["found"] == {"name": "last"}
    assert evidence.run_jobs(list(todo), options_in(tmp_path)) == ["bad"]
    assert log.read_text().split() == ["first", "second", "bad", "last", "bad"]


@catches("evidence.run_jobs", "one.process.send_signal(signal.SIGTERM)", "pass")
@catches("evidence.record", 'sum(note["minutes"] for note in notes)', 'notes[-1]["minutes"]')
def test_when_the_time_is_up_jobs_are_told_to_stop_and_all_their_time_counts(own, tmp_path, capsys, monkeypatch):
    told = tmp_path / "told"
    program = ("import signal, sys, time\n"
               f"signal.signal(signal.SIGTERM, lambda *_: (open({str(told)!r}, 'w').close(), sys.exit(143)))\n"
               f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
               "time.sleep(9)")
    job = stub(tmp_path, "long", program)
    evidence.run_jobs([job], options_in(tmp_path, hours=5 / 3600))
    assert told.exists() and "the same command continues" in capsys.readouterr().out
    assert evidence.recorded(evidence.RECORD) == {}
    (tmp_path / "long.py").write_text("")
    monkeypatch.setattr(evidence, "commit", lambda: "another")
    before = evidence.read_lines(tmp_path / "long.jsonl")
    evidence.run_jobs([job], options_in(tmp_path))
    found = evidence.recorded(evidence.RECORD)["long"]
    assert found["minutes"] >= round(before[0]["minutes"], 1) >= 0.1
    assert found["commit"] == f"{before[0]['commit']}, another"


@catches("evidence.main", 'with claim_folder(options.record.parent, "evidence"):', "if True:")
def test_one_record_has_one_command_and_a_command_with_a_failed_job_ends_with_1(own, tmp_path, monkeypatch, capsys):
    """A record is the user's own, in --out, wherever --data is given."""
    monkeypatch.setattr(evidence, "jobs", lambda options: [stub(tmp_path, "bad", "raise SystemExit(3)")])
    command = ["--data", "text", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        evidence.main(command)
    assert ended.value.code == 1
    with files.claim_folder(tmp_path / "out", "evidence"), pytest.raises(SystemExit) as ended:
        evidence.main(command)
    assert ended.value.code == 2 and "is at work there; wait for it, or choose another --out" in capsys.readouterr().err


def test_the_record_of_the_project_is_of_the_jobs_as_they_are_today():
    """Its verdicts come from the commands that this program would run: `docs/evidence.md` says which text and machine."""
    options = options_in(evidence.Path("out/evidence"), data="wikipedia-and-books")
    lines = {job.name: job.line for job in evidence.jobs(options)}
    done = evidence.recorded(evidence.RECORD)
    assert done and all(lines[name] == job["command"] for name, job in done.items())


def test_the_pages_say_what_the_record_of_the_project_says():
    done = evidence.recorded(evidence.RECORD)
    assert evidence.tables(done) in evidence.PAGE.read_text()
    words = [evidence.word(done, where) for where in ("Figure 1a", "Figure 1b", "Table 3", "Table 1", "Figure 3", "Figure 4")]
    assert words == ["shown", "shown", "not shown", "undecided", "undecided", "undecided"]
    readme = " ".join((HERE / "README.md").read_text().split())
    assert "Figure 1 is shown, Table 3 is not, and Table 1 and Figures 3 and 4 are undecided" in readme


# ---- Verdicts -------------------------------------------------------------------------------------------------------
def test_the_quantiles_are_those_of_students_t():
    for freedom, quantile in enumerate(evidence.T, start=1):
        assert quantile == pytest.approx(scipy.stats.t.ppf(0.975, freedom), abs=1e-3)


@catches("evidence.interval_of", "T[min(freedom(n), len(T)) - 1]", "1.96")
@catches("evidence.interval_of", " / n ** 0.5", "")
def test_an_interval_over_seeds_is_students():
    values = [3.0, 5.0, 4.5]
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert evidence.over_seeds(values)[:3] == pytest.approx((np.mean(values), low, high), abs=1e-2)
    assert evidence.over_seeds([7.0])[:3] == (7.0, -np.inf, np.inf)
    assert evidence.over_seeds([None, 3.0, 5.0, 4.5]) == evidence.over_seeds(values)


@catches("evidence.over_seeds", "max(statistics.stdev(measured), ranks ** 0.5 * ROUNDING)", "statistics.stdev(measured)")
def test_three_equal_ranks_are_not_certain():
    """A difference of two rounded numbers is known to 0.41: 1, 1, 1 may be chance, 4, 4, 4 is not."""
    assert evidence.over_seeds([1.0, 1.0, 1.0], ranks=2).low < 0
    assert evidence.over_seeds([4.0, 4.0, 4.0], ranks=2).low > 0
    assert evidence.over_seeds([0.20, 0.25, 0.30]).low > 0  # scores are not rounded


@catches("evidence.interval_of", "range(n, MOST + 1)", "range(n + 1, MOST + 1)")
@catches("evidence.interval_of", "half(more) < abs(mean)", "half(n) < abs(mean)")
def test_the_seeds_that_would_decide_are_as_few_as_do():
    """With two seeds of 1 and 3, how many like them have an interval that is above 0? Five, by Student's t."""
    def least(mean, spread):
        for n in range(2, 101):
            if scipy.stats.t.ppf(0.975, n - 1) * spread / n ** 0.5 < mean:
                return n
    interval = evidence.over_seeds([1.0, 3.0])
    assert interval.decided == least(2, 2 ** 0.5) == 5 and "at least 5 seeds" in evidence.verdict(interval)
    assert evidence.over_seeds([-1.0, -3.0]).decided == 5
    assert evidence.over_seeds([2.0, 2.0, 2.4]).decided == 3
    hopeless = evidence.over_seeds([-1.0, 1.01])
    assert hopeless.decided is None and "more than 100 seeds" in evidence.verdict(hopeless)


@catches("evidence.verdict", "interval.low > 0", "interval.high > 0", interval=(1.0, -1.0, 3.0), word="undecided")
@catches("evidence.verdict", "interval.high < 0", "interval.low < 0", interval=(1.0, -1.0, 3.0), word="undecided")
@pytest.mark.parametrize("interval, word", [
    (None, "not measured"), ((2.0, 1.0, 3.0), "**shown**"), ((-2.0, -3.0, -1.0), "**not shown**"),
    ((0.0, 0.0, 0.0), "undecided"), ((1.0, -1.0, 3.0), "undecided"), ((-1.0, -3.0, 1.0), "undecided"), ((5.0, -np.inf, np.inf), "undecided")])
def test_a_verdict_needs_the_whole_interval_on_one_side(interval, word):
    assert word in evidence.verdict(interval and evidence.Interval(*interval))


def ranks(top, with_mask=None, masks=(1, 5)):
    """What is recorded of a job of rank.py, two layers, the lower one of twice the rank, at two checkpoints."""
    layers = []
    for layer in range(2):
        curves = {"without_mask": top if layer else 2 * top, "with_mask": with_mask or top, "mask_only": masks[layer]}
        layers.append({"uncentered": curves, "centered": {curve: 2 * rank for curve, rank in curves.items()},
                       "anatomy": {"identity": 0.5, "attention": 1.0 if layer else None, "ffn": 2.0 if layer else None}})
    return {"6000": {"layers": layers}, "12000": {"layers": layers}}


def tuned(median, after):
    return {"median": median, "effective_rank": {"before": {"uncentered": 70}, "after": [{"uncentered": after, "centered": 2 * after}, None]}}


def point(hours, median):
    """A checkpoint on a curve of Figure 3, of a run of one second a step."""
    return {"step": hours * 3600, "hours": hours, "median": median, "rank": 40}


def record_of(gains, rank_gains, falls=(9, 8, 7, 6, 5)):
    """A record in which MAE-LM is ahead by these numbers, by seed."""
    found = {}

    def add(name, results):
        found[name] = {"found": results, "minutes": 30.0, "machine": "a laptop", "commit": f"of {name}"}
    for seed, (gain, rank_gain) in enumerate(zip(gains, rank_gains)):
        for model in evidence.MODELS:
            ahead = model == "mae-lm"
            add(f"train {model} {seed}", {"losses": [[0, 7.0], [12000, 2.0]], "seconds": 3600, "seconds_per_step": 1})
            add(f"rank {model} {seed}", ranks(80 + rank_gain if ahead else 80, with_mask=84))
            add(f"docs {model} {seed}", tuned(60 + gain if ahead else 60, 50 + rank_gain if ahead else 50))
        add(f"figure3 {seed}", {"mae-lm": [point(1.0, 60.0 + gain)], "mlm": [point(2.0, 60.0)]})
    for name, score in zip(evidence.DELTAS, falls):
        add(f"short train {name}", {"losses": [[0, 7.0], [2400, 3.0]]})
        add(f"short docs {name}", tuned(score, 50))
    return found


@catches("evidence.claims", "rank_at(mae, -1, by) - rank_at(mlm, -1, by)", "rank_at(mlm, -1, by) - rank_at(mae, -1, by)")
@catches("evidence.claims", "rank_at(mae, -2, by) - rank_at(mlm, -2, by)", "rank_at(mae, -1, by) - rank_at(mlm, -1, by)")
@catches("evidence.of_ranks", 'over_seeds(values("centered"), ranks)', 'over_seeds(values("uncentered"), ranks)')
@catches("evidence.lead", 'return mae["median"] - mlm["median"]', 'return mlm["median"] - mae["median"]')
@catches("evidence.rank_lead", "rank_after(mae, centering) - rank_after(mlm, centering)", "rank_after(mlm, centering)")
@catches("evidence.fall", "interval_of(-slope", "interval_of(slope")
def test_claims_hold_where_mae_lm_is_ahead_and_do_not_where_it_is_behind():
    words = {"ahead": "**shown**", "behind": "**not shown**: it is the other way round"}
    ahead = evidence.claims(record_of(gains=[2, 2.1, 2.2], rank_gains=[6, 7, 8], falls=(9, 8, 7, 6, 5.1)))
    ours = [claim for claim in ahead if claim.paper == evidence.OURS]
    assert [evidence.verdict(claim.interval) for claim in ahead if claim not in ours] == [words["ahead"]] * 7
    assert [claim.seeds for claim in ours] == [[6, 7, 8], [0, 0, 0], [12, 14, 16]]  # of [MASK] both rise alike
    assert ahead[4].seeds == [6, 7, 8] and ahead[4].interval.mean == 7 and ahead[4].centered.mean == 14
    assert ahead[0].seeds == [84 - 80] * 3 and ahead[2].seeds == [4] * 3
    behind = evidence.claims(record_of(gains=[-2, -2.1, -2.2], rank_gains=[-6, -7, -8], falls=(5, 6, 7, 8, 9.1)))
    found = {claim.where: evidence.verdict(claim.interval) for claim in behind}
    assert [found[where] for where in ("Table 3", "Table 1", "Figure 3", "Figure 4")] == [words["behind"]] * 4
    assert all(claim.interval is None for claim in evidence.claims({}))
    rows = evidence.verdicts(record_of([2, 2.1, 2.2], [6, 7, 8])).splitlines()
    assert all(row.endswith("| - |") == (evidence.OURS in row) for row in rows)
    assert sum("mean over docs, points" in row for row in rows) == 1  # the tasks have names


@catches("evidence.ahead_in_time", 'np.interp(end["hours"],', 'np.interp(mae[-1]["hours"],')
@catches("evidence.ahead_in_time", 'float(ours) - end["median"]', 'end["median"] - float(ours)')
def test_figure_3_compares_at_equal_hours_not_at_equal_steps():
    """An MAE-LM of the MLM's scores at each step whose step takes longer is behind; one that is as fast is level."""
    mlm = [point(1.0, 55.0), point(2.0, 58.0), point(3.0, 60.0)]
    slower = [point(2.0, 55.0), point(4.0, 58.0), point(6.0, 60.0)]
    assert evidence.ahead_in_time({"mae-lm": mlm, "mlm": mlm}) == 0
    assert evidence.ahead_in_time({"mae-lm": slower, "mlm": mlm}) == 56.5 - 60
    assert evidence.ahead_in_time({"mae-lm": [point(1.0, 61.0), point(5.0, 65.0)], "mlm": mlm}) == 63 - 60
    assert evidence.ahead_in_time({"mae-lm": [point(1.0, 61.0), point(2.0, 62.0)], "mlm": mlm}) == 62 - 60  # its end


@catches("evidence.ahead_in_time", 'if point["median"] is not None', "")
@catches("evidence.ahead_in_time", ' or end["median"] is None', "")
@catches("evidence.hours_table", "curves[model], curves[\"mlm\"]", "curves[\"mlm\"], curves[model]")
def test_figure_3_has_no_number_without_mlms_last_score_and_says_never():
    broken, mlm = [point(1.0, None), point(2.0, 58.0)], [point(1.0, 60.0), point(2.0, 59.0)]
    assert evidence.ahead_in_time({"mae-lm": broken, "mlm": mlm}) == 58 - 59
    assert evidence.ahead_in_time({"mae-lm": mlm, "mlm": [point(1.0, 60.0), point(2.0, None)]}) is None
    assert evidence.ahead_in_time({"mae-lm": broken[:1], "mlm": mlm}) is None
    found = record_of([1, 2], [3, 4])
    found["figure3 0"]["found"] = {"mae-lm": broken, "mlm": mlm}
    found["figure3 1"]["found"] = {"mae-lm": mlm, "mlm": broken[::-1]}
    rows = evidence.hours_table(found).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["never |", "50% |", "never |", "never |"]
    assert rows[0].startswith("| MAE-LM | 0 | -, 58.0 |")


@catches("evidence.tasks_of", "[value is None for value in ahead] == [value is None for value in trained]", "True")
def test_means_over_tasks_are_of_the_tasks_that_all_seeds_have_and_a_missing_seed_leaves_a_gap():
    found = record_of([1, 2, 3], [4, 5, 6])
    for model in evidence.MODELS:
        found[f"cola {model} 1"] = found["docs mlm 1"] | {"found": tuned(20 if model == "mae-lm" else 0, 50)}
    assert evidence.tasks_of(found) == ["docs"] and evidence.gains(found) == [1, 2, 3]
    scores = evidence.tuning_table(found)
    assert "| cola | MAE-LM | -, 20.0 | -, 50 |" in scores and "| cola | MAE-LM minus MLM | 20.0 (one seed) |" in scores
    del found["rank mlm 0"]
    row = next(line for line in evidence.rank_table(found).splitlines() if line.startswith("| MLM"))
    assert row == "| MLM | uncentered | with_mask |  | 84, 84 | 84, 84 |"
    found["docs mlm 2"]["found"] = tuned(None, 50)  # all its fine-tuning seeds diverged
    assert evidence.tasks_of(found) == [] and evidence.tables(found)


@catches("evidence.run_jobs", "refuse_others(todo, options.record)", "pass")
def test_a_record_of_another_experiment_is_not_gone_on_with(own, tmp_path):
    todo = [stub(tmp_path, "one", "pass")]
    evidence.run_jobs(list(todo), options_in(tmp_path))
    evidence.run_jobs(list(todo), options_in(tmp_path))
    other = [todo[0]._replace(command=[*todo[0].command, "--steps", "5"])]
    with pytest.raises(files.UserError, match=r"'one' is recorded as\n.*\n.*\n.*--steps 5\n.*another --record"):
        evidence.run_jobs(other, options_in(tmp_path))


@catches("evidence.time_table", "steps = sorted(steps)", "steps = sorted(steps, reverse=True)")
@catches("evidence.model_of", '.rpartition("-")[0]', '.partition("-")[0]')
def test_figure_3_is_read_as_finetune_writes_it_and_its_ranks_stand_under_their_steps(tmp_path):
    hours, results = {}, []
    for model, score in (("mae-lm", 60.0), ("mlm", 58.0)):
        for step in (900, 4000):
            hours[f"out/train-{model}-0/step_{step:07d}.pt"] = step / 4000
            results.append({"task": "docs", "metric": "accuracy", "median": score + step / 1000, "values": [score],
                            "effective_rank": {"after": [{"uncentered": step // 100 + score, "centered": 1}]}})
    finetune.figure3(hours, results, tmp_path)
    found = evidence.read_figure3(tmp_path)
    assert found["mae-lm"][1] == {"step": 4000, "median": 64.0, "rank": 100.0}
    paces = {"mae-lm": 1.5, "mlm": 1.0}
    runs = {f"train {model} 0": {"found": {"seconds_per_step": pace}} for model, pace in paces.items()}
    results = runs | {"figure3 0": {"found": found}}
    assert [curves["mae-lm"][1]["hours"] for curves in evidence.figure3_of(results)] == [4000 * 1.5 / 3600]
    table = evidence.time_table(results).splitlines()
    assert table[0] == "|  | fine-tuning | 900 | 4,000 |" and table[3] == "| MAE-LM | after | 69 | 100 |"


def test_the_fall_has_the_interval_of_a_regression():
    found = record_of([], [], falls=(62.0, 61.5, 60.0, 61.0, 58.5))
    fit = scipy.stats.linregress([0, 0.25, 0.5, 0.75, 1], [62.0, 61.5, 60.0, 61.0, 58.5])
    half = scipy.stats.t.ppf(0.975, 3) * fit.stderr
    assert "| delta 0.25 | 3.000 | 61.5 | 70, 50 |" in evidence.short_table(found)
    assert evidence.fall(found)[:3] == pytest.approx((-fit.slope, -fit.slope - half, -fit.slope + half), abs=1e-2)


@catches("evidence.origin", 'job["found"].get("seconds", 60 * job["minutes"])', '60 * job["minutes"]')
def test_the_page_says_machine_time_and_commits_of_all_jobs_and_a_run_that_went_on_counts_whole():
    """record_of([1], [4]) has two runs of an hour, of which the last command took half, and 15 other half hours."""
    found = record_of([1], [4])
    said = evidence.origin(found)
    assert said in evidence.tables(found)
    assert "17 jobs" in said and "a laptop" in said and "10 hours" in said
    assert all(job["commit"] in said for job in found.values())


def test_the_report_changes_the_tables_of_the_page_alone(own):
    evidence.write_json(evidence.RECORD, {"jobs": record_of([1, 2, 3], [4, 5, 6])})
    evidence.PAGE.write_text("# Before\n<!-- tables -->\nstale\n<!-- end of tables -->\nafter\n")
    evidence.report(evidence.RECORD)
    text = evidence.PAGE.read_text()
    assert text.startswith("# Before\n<!-- tables -->\n![") and "](evidence.png)\n\n|  | the number" in text and text.endswith("<!-- end of tables -->\nafter\n")
    assert "stale" not in text and "4.0, 5.0, 6.0" in text and evidence.PAGE.with_suffix(".png").stat().st_size > 10_000
    evidence.report(evidence.RECORD)
    assert evidence.PAGE.read_text() == text


@catches("evidence.word", "claim.where == where and ", "")
@catches("evidence.word", ' and claim.statement.endswith(task)', "")
def test_the_panels_have_the_words_of_the_verdicts():
    found = record_of([1, -1, 1.5], [-6, -7, -8], falls=(9, 8, 7, 6, 5.1))
    for model in evidence.MODELS:
        found[f"rank {model} 0"]["found"] = found[f"rank {model} 1"]["found"] = ranks(80 if model == "mlm" else 99, 84)
    words = [evidence.word(found, where) for where in ("Figure 1b", "Table 3", "Table 1", "Figure 3", "Figure 4")]
    assert words == ["shown", "undecided", "undecided", "undecided", "shown"]
    assert evidence.word(found, "Table 3", "on docs") == "not shown"
    assert evidence.word(found, "Table 3", "on cola") == evidence.word({}, "Table 1") == "not measured"


def test_a_day_of_figures_has_a_page_of_its_own(own, tmp_path):
    """One seed of the toy, and the jobs of --only: what a lecture shows, beside its own record."""
    day = options_in(tmp_path, preset="toy", data="docs", seeds=1, only=["train", "rank", "docs"], glue=None)
    names = [job.name for job in evidence.jobs(day)]
    assert names == ["train mae-lm 0", "train mlm 0", "rank mae-lm 0", "rank mlm 0", "docs mae-lm 0", "docs mlm 0"]
    evidence.write_json(tmp_path / "day.json", {"jobs": record_of([1], [4])})
    evidence.report(tmp_path / "day.json")
    assert "one seed" in (tmp_path / "day.md").read_text() and (tmp_path / "day.png").is_file()
    assert not evidence.PAGE.exists()


@catches("evidence.jobs", 'f"{words} "', "words")
def test_jobs_are_chosen_by_their_first_words(tmp_path):
    names = [job.name for job in evidence.jobs(options_in(tmp_path, only=["train mlm", "rank mae-lm 1", "sst"]))]
    assert names == ["train mlm 0", "train mlm 1", "train mlm 2", "rank mae-lm 1"]


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
