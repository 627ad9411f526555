"""Claims about README.md and the other pages, the models in the repository, and the examples in CONTRIBUTING.md."""
import importlib
import re
from unittest.mock import patch

import pandas
import pytest
import sklearn.metrics

import finetune
import rank
import train
from support import classification, probe, tasks
from support.checkpoints import load_model
from support.program import read_json, read_lines
from tests.common import ROOT, last_checkpoint, read_log, same, sentence, short_run

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[bcd]*/*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAE, MLM = (str(ROOT / "models" / name) for name in ("mae-lm", "mlm"))
FLAG = r"--[a-z][\w-]+"


def commands(page):
    """(program, arguments) of each command in a page's shell blocks that starts one of our programs."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from re.findall(r"(?:python|torchrun .*?)(?: -m)? (\S+\.\w+)((?: [^#&\n]+)?)", block)


def test_every_flag_on_the_pages_exists(capsys):
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    pages += [f"```sh\n{script.read_text().replace('on_node', 'torchrun')}```" for script in ROOT.glob("runs/*.sh")]
    for page in pages:
        for program, flags in commands(page):
            module = program.removesuffix(".py").replace("/", ".")
            pytest.raises(SystemExit, importlib.import_module(module).main, ["-h"])
            unknown = set(re.findall(FLAG, flags)) - set(re.findall(FLAG, capsys.readouterr().out))
            assert not unknown, f"{program} {flags}"


def test_python_of_the_readme_prints_what_its_comments_say(capsys):
    block, = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# -> (.*)", block)


def test_the_models_show_figure_1(tmp_path):
    (tmp_path / "pages.txt").write_text("\n\n".join(page.read_text(encoding="utf-8") for page in PAGES))
    rank.main([MAE, MLM, *f"--data pages.txt --val-share 1 --tokens 20000 --out {tmp_path}/rank".split()])
    found = read_json(tmp_path / "rank/rank.json")["models"]
    assert [found[name]["trained_on_mask"] for name in (MAE, MLM)] == [False, True]
    low, high = (found[name]["uncentered"]["mask_only"] for name in (MAE, MLM))
    assert sorted(high) == high and high[0] < 10 and high[-1] > 2 * low[-1]
    assert found[MLM]["uncentered"]["with_mask"][-1] > found[MLM]["uncentered"]["without_mask"][-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link


# ---- Examples in CONTRIBUTING.md: each works as it stands there, and in the whole program ---------------------------
CODE = re.findall(r"```python\n# (\S+)\.py(?:, class (\w+))?\n(.*?)```",
                  (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


@pytest.fixture
def apply(monkeypatch):
    """A function that makes the changes of the examples that contain a word."""
    def make(word):
        for path, owner, code in CODE:
            if word in code:
                module = importlib.import_module(path.replace("/", "."))
                names = {}
                exec(code, vars(module), names)
                for name, value in names.items():
                    monkeypatch.setattr(getattr(module, owner) if owner else module, name, value, raising=False)

    with patch.dict(probe.POOLINGS), patch.dict(tasks.TASKS), patch.dict(classification.METRICS):
        yield make


def test_terms_of_the_loss_are_logged_by_name_and_validation_has_none(apply, text, finished, tmp_path):
    apply("logsumexp")
    log = read_log(short_run(text, tmp_path / "run", "--micro-batch-size", 3))
    lines = [line for line in log if "loss" in line]
    for line in lines:
        assert line["loss"] == pytest.approx(line["loss_mlm"] + line["loss_z"]) and 0 < line["loss_z"] < 0.1
    before = [line for line in read_log(finished) if "loss" in line]
    assert lines[0]["loss_mlm"] == pytest.approx(before[0]["loss"], rel=1e-3)
    assert log[1]["val_loss"] == pytest.approx(read_log(finished)[1]["val_loss"], rel=1e-6)


def test_an_average_of_the_weights_is_saved_restored_and_used(apply, text, finished, tmp_path, monkeypatch):
    apply("class Average")
    usual = train.make_optimizers

    def with_average(model, recipe, *others):
        average = train.Average(model.parameters(), dict(lr=0.0, decay=0.9, last=recipe.max_steps))
        return [*usual(model, recipe, *others), average]

    monkeypatch.setattr(train, "make_optimizers", with_average)
    whole = short_run(text, tmp_path / "whole")
    short_run(text, tmp_path / "run", "--stop-at", 2)
    assert same(short_run(text, tmp_path / "run"), whole)
    state = last_checkpoint(whole)
    averages = [each["average"] for each in state["optimizers"][-1]["state"].values()]
    model, _ = load_model(whole)
    assert all(weight.equal(average) for weight, average in zip(model.parameters(), averages, strict=True))
    assert not state["model"]["head.bias"].equal(last_checkpoint(finished)["model"]["head.bias"])


@pytest.mark.parametrize("flags, factor", [((), 1), (("--learning-rate", 3e-3), 0.5)])
def test_each_group_of_parameters_has_its_own_peak_also_after_a_flag(flags, factor, apply, text, tmp_path):
    apply("embeddings")
    short_run(text, tmp_path / "run", "--stop-at", 2)
    groups = last_checkpoint(short_run(text, tmp_path / "run", *flags))["optimizers"][0]["param_groups"]
    assert [group["peak"] for group in groups] == [3e-3 * factor, 6e-3 * factor]
    assert [group["lr"] for group in groups] == [3e-3 * factor / 4, 6e-3 * factor / 4]  # in the last of six steps
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]


def test_a_schedule_is_that_of_each_step(apply, text, tmp_path):
    apply("** 2")
    rates = [line["lr"] for line in read_log(short_run(text, tmp_path / "run")) if "lr" in line]
    assert rates == [6e-3 * factor for factor in (0.5, 1, 1, 1 - 1 / 16, 1 - 4 / 16, 1 - 9 / 16)]


def test_a_task_has_its_own_metric_and_a_probe_its_own_vector(apply, finished, tmp_path):
    for word in ("POOLINGS", "METRICS", "TASKS"):
        apply(word)
    for split, start, stop in (("train", 0, 60), ("validation", 100, 140)):
        rows = [{"text": sentence(i)[:20], "label": i % 4 % 3} for i in range(start, stop)]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{split}.parquet")
    out = tmp_path / "out"
    finetune.main(f"--init {finished} --task emotion --data {tmp_path} --frozen max --out {out}".split())
    lines = read_lines(out / "seed1/predictions.jsonl")
    true, predicted = [[line[name] for line in lines] for name in ("label", "prediction")]
    macro = 100 * sklearn.metrics.f1_score(true, predicted, average="macro")
    assert read_json(out / "result.json")["metrics"] == {"macro_f1": pytest.approx(macro)} and macro > 50
