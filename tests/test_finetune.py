"""Claims about finetune.py, support/classification.py and support/squad.py: inputs, runs, sweeps, predictions."""
import functools
import itertools
import json
import math
import re
import shutil
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import scipy.stats
import sklearn.linear_model
import sklearn.metrics
import sklearn.model_selection
import torch

import finetune
import rank
import tests.test_tasks
from conftest import tiny
from maelm import CLS, SEP
from support import examples, probe, results, tasks
from support.classification import Classification, Encoded
from support.examples import Data, Example, Labels, Question, read_task
from support.heads import ClassifierHead
from support.program import UserError, json_lines, read_json
from support.squad import Spans
from support.text import records_of
from support.tokenizer import Tokenizer
from tests.common import fails, little_documents, sentence
from tests.test_tasks import write_glue

CONTEXT = f"{sentence(0)} İstanbul'da  ÇOK \"naïve\" café—数学🙂 ΣΑΣα [MASK]\tend.\u00a0x {sentence(18)}"
WORDS = [Question(str(word.start()), "where is it, and why so long?", CONTEXT, ((word.start(), word[0]),))
         for word in re.finditer(r"\w+", CONTEXT)]


def tune(init, task, folder, *flags, out="out"):
    """Run finetune.py for half an epoch with each of two seeds; returns the contents of folder/out/result.json."""
    command = ["--init", str(init), "--out", str(folder / out), "--task", task]
    if task != "docs":
        command += ["--data", str(write_glue(folder / "glue"))]
    if "--frozen" not in flags:
        command += ["--epochs", "0.5", "--precision", "fp32"]
    finetune.main([*command, "--seeds", "2", *flags])
    return read_json(folder / out / "result.json")


@pytest.mark.parametrize("uncased", [True, False])
def test_windows_cover_the_context_and_hold_the_answers(uncased):
    tokenizer = Tokenizer.train(little_documents(50), 320, uncased)
    kind = Spans(tokenizer, tiny(), finetune.TuneConfig(max_query=6, doc_stride=4, max_answer=12), None)
    encoded = kind.encode([*WORDS, Question("none", "what?", CONTEXT, ())])
    context = tokenizer.encode(CONTEXT).tolist()
    steps = []  # from each window of the first question to the next
    for row, (_, last), (number, _) in zip(encoded.ids, encoded.targets.tolist(), encoded.windows):
        start = row.tolist().index(SEP) + 1
        assert last < len(row) - 1 < 24 and row[0] == CLS and row[start - 1] == row[-1] == SEP
        window = row[start:-1].tolist()
        steps += [at for at in range(len(context)) if number == 0 and context[at:at + len(window)] == window][:1]
    assert steps == [*range(0, steps[-1] + 1, 4)] and max(map(len, encoded.ids)) == 24
    assert steps[-1] + 15 >= len(context) > steps[-2] + 15  # a window has room for 15 tokens
    # A model that is certain of the targets finds every answer, and predicts [CLS] if there is none.
    tokens, padding, targets = encoded.batch(range(len(encoded.ids)), "cpu")
    logits = 10.0 * torch.nn.functional.one_hot(targets, tokens.shape[1]).mT
    logits[:, 1:4] = 20  # positions in the question are never answers
    logits[range(len(tokens)), (~padding).sum(1) - 1] = 20  # nor is the last [SEP]
    logits[padding] = 20
    assert kind.loss(logits, targets, tokens) < 0.01
    metrics, files = kind.score(kind.decode(logits, tokens).numpy(), encoded)
    assert metrics == {"exact": 100, "f1": 100}
    expected = {q.id: q.answers[0][1] for q in WORDS} | {"none": ""}
    assert json.loads(files["predictions.json"]) == expected
    # A question's score of no answer is that of the window where it is lowest, and its answer that of the best window.
    question = kind.encode(WORDS[-1:])
    starts = [row.tolist().index(SEP) + 1 for row in question.ids]
    outputs = [(9.0, 0, start, start) for start in starts]
    outputs[0] = (1.0, 0.5, starts[0], starts[0])
    outputs[1] = (8.0, 3.0, starts[1], starts[1])
    _, files = kind.score(np.array(outputs), question)
    assert json.loads(files["null_odds.json"]) == {WORDS[-1].id: 1 - 3}
    begin, end = question.windows[1][1][starts[1]]
    assert json.loads(files["predictions.json"])[WORDS[-1].id] == CONTEXT[begin:end]
    # The best span of at most max_answer = 12 tokens: from 3 to 14, although 3 to 15 has the highest score.
    logits = torch.zeros(1, 24, 2)
    logits[0, 3, 0], logits[0, 15, 1], logits[0, 14, 1] = 5, 5, 4
    found = kind.decode(logits, torch.tensor([[CLS, SEP, *[5] * 21, SEP]]))
    assert found.tolist() == [[0, 9, 3, 14]]


def test_each_epoch_is_a_permutation():
    encoded = Encoded([np.zeros(n) for n in range(330)], None, [], "")
    for size in (10, 16, 400):
        drawn = list(itertools.islice(encoded.shuffled(1, size), 2 * -(-330 // size)))  # two epochs
        half = len(drawn) // 2
        for epoch in (drawn[:half], drawn[half:]):
            assert sorted(np.concatenate(epoch)) == [*range(330)]  # no input twice, in an epoch or in a batch
        orders = drawn[0], drawn[half], next(encoded.shuffled(2, size))  # also of another seed
        assert half == 1 or len({str(order) for order in orders}) == 3
    drawn = list(itertools.islice(encoded.shuffled(1, 10), 33))
    assert np.ptp(np.sign(np.diff([batch[0] for batch in drawn[:16]]))) == 2  # but rise and fall from batch to batch


def test_the_strength_of_a_probe_is_the_best_by_the_metric_on_held_out_folds():
    random = np.random.default_rng(0)
    y = np.sort(random.normal(size=150)).astype(np.float32)  # folds in this order would mislead
    x = random.normal(size=(150, 40))
    x[:, 0] += y / 2
    x = sklearn.preprocessing.scale(x)
    for metric, targets, model, folds in (
            ("spearman", y, sklearn.linear_model.Ridge, sklearn.model_selection.KFold),
            ("accuracy", (y > 1).astype(np.int64), sklearn.linear_model.LogisticRegression, None),
            ("matthews", (y > 1).astype(np.int64), sklearn.linear_model.LogisticRegression, None)):
        cut = (folds or sklearn.model_selection.StratifiedKFold)(5, shuffle=True, random_state=0)
        scorer = sklearn.metrics.make_scorer({
            "spearman": lambda true, found: scipy.stats.spearmanr(true, found).statistic,
            "accuracy": sklearn.metrics.accuracy_score, "matthews": sklearn.metrics.matthews_corrcoef}[metric])
        scores = [sklearn.model_selection.cross_val_score(model(alpha=l2) if folds else model(C=1 / l2), x, targets,
                                                          cv=cut, scoring=scorer).mean() for l2 in probe.STRENGTHS]
        found = probe.strength_of(probe.fit(x, targets, 0.0, metric))
        assert found == pytest.approx(probe.STRENGTHS[np.argmax(scores)])


def test_a_probe_gives_the_probabilities_of_its_model():
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)) * (0.001, 1, 1, 1)  # which standardization undoes
    labels = 1 + np.digitize(x[:, 0], [-0.0005, 0.0005])  # 1 to 3, of 4 classes

    def outputs_of(model, names):  # of the split dev alone
        kind = Mock(labels=Labels((), names), scores=lambda outputs, splits: outputs)
        outputs = probe.scores_of(model, kind, {}, {"train": x, "dev": x})
        return outputs.pop("dev") if len(outputs) == 1 else None

    outputs = outputs_of(probe.fit(x, labels, 1.0, "accuracy"), tuple("abcd")).softmax(1).numpy()
    assert (outputs[:, 0] == 0).all() and (outputs.argmax(1) == labels).mean() > 0.9
    numbers = probe.fit(x, x[:, 0].astype(np.float32), 1e-3, "spearman")
    np.testing.assert_allclose(outputs_of(numbers, ()), x[:, :1], atol=1e-5)
    with pytest.raises(UserError, match="the rarest of 2 has 1"):
        probe.fit(x, np.eye(60, dtype=np.int64)[0], 0.0, "accuracy")


def test_a_result_can_be_continued_but_not_with_other_texts(finished, tmp_path, capsys, monkeypatch):
    again = functools.partial(tune, finished, "mnli", tmp_path, "--learning-rate", "1e-3")
    result = again()
    assert result["metrics"]["accuracy"] != result["metrics"]["accuracy_mm"]  # the mismatched labels are shifted
    (tmp_path / "out/seed1/predictions.jsonl").unlink()
    assert again() == result and not (tmp_path / "out/seed1/predictions.jsonl").exists()  # nothing runs again
    with monkeypatch.context() as patch:
        patch.setattr(tests.test_tasks, "sentence", lambda i: f"another text {i}")
        assert re.search("examples='.*' there, '.*' here; choose another --out", fails(again, capsys))
    assert "learning_rate=0.001 there" in fails(lambda: again("--learning-rate", "2e-3"), capsys)
    monkeypatch.setattr(results, "CODE", "other")
    assert "code=" in fails(again, capsys)


def test_squad_answers_are_predicted_in_the_official_files(finished, tmp_path):
    result = tune(finished, "squad2", tmp_path, *"--seq-len 12 --max-query 3 --doc-stride 2 --batch-size 4".split())
    pretrained = finetune.Pretrained(str(finished))
    kind = Spans(pretrained.tokenizer, pretrained.config, finetune.TuneConfig(**result["tune"]), None)
    windows = kind.encode(read_task("squad2", Data(str(tmp_path / "glue")), {})["train"]).ids
    steps = math.ceil(0.5 * math.ceil(len(windows) / 4))  # an epoch is one of windows, not of 24 questions
    assert len(windows) > 48 and result["steps"] == [steps, steps]
    assert result["metric"] == "f1"
    answers, odds = [read_json(tmp_path / f"out/seed2/{name}.json") for name in ("predictions", "null_odds")]
    assert len(answers) == 24 and all((odd > 0) == (answers[name] == "") for name, odd in odds.items())


def test_scores_are_those_of_the_written_numbers():
    kind = Classification(Tokenizer.train(little_documents(50), 300, True), tiny(), finetune.TuneConfig(),
                          Labels(("spearman",), (), 0.0, 5.0))
    encoded = Encoded([], torch.zeros(3), [Example("a", None, label) for label in (0.0, 2.5, 5.0)], "")
    metrics, files = kind.score(0.5 + 1e-7 * np.arange(3.0)[:, None], encoded)
    assert metrics == {"spearman": 0} and files["predictions.jsonl"].count('"prediction": 2.5}') == 3
    assert kind.score(np.array([[0.1], [0.3], [0.2]]), encoded)[0]["spearman"] == pytest.approx(50)
    targets = torch.tensor([kind.labels.target(example.label) for example in encoded.examples])  # 0, 0.5 and 1
    assert kind.loss(torch.zeros(3, 1), targets, None).item() == pytest.approx(1.25 / 3)


def test_the_head_of_a_classifier_is_robertas():
    head, h, padding = ClassifierHead(8, 3, 0.3).eval(), torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, :2] = True  # on the left
    first, dense, _, second, out = head
    assert first.p == second.p == 0.3
    torch.testing.assert_close(head(h, padding), out(dense(torch.stack([h[0, 0], h[1, 2]])).tanh()))


def test_random_weights_are_drawn_by_the_seed(finished):
    trained = finetune.Pretrained(str(finished))
    fresh = finetune.Pretrained(f"random:{finished}")
    first, second, again = [fresh.new_encoder(seed).token_embedding.weight for seed in (1, 2, 1)]
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(*[fresh.new_encoder(seed).position_embedding.weight for seed in (1, 2)])  # sinusoids
    assert not torch.equal(first, trained.new_encoder(1).token_embedding.weight)
    assert trained.weights_hash() != fresh.weights_hash()


def test_a_diverged_run_counts_as_the_lowest(finished, tmp_path, capsys):
    result = tune(finished, "rte", tmp_path, "--learning-rate=1e38", "--epochs=0.1")  # one step, whose loss is finite
    assert result["values"] == [None, None] and result["median"] is result["metrics"]["accuracy"] is None
    assert result["effective_rank"]["after"] == [None, None]
    assert "accuracy diverged  (medians; seeds: diverged, diverged)" in capsys.readouterr().out


@pytest.mark.parametrize("labels, metrics", [(["01", "1", "1", "01"], {"accuracy", "f1"}),
                                             ([0.5, 2.0, 1.0, 0.0], {"spearman", "r2"})])
@pytest.mark.parametrize("flag", ["--epochs=3", "--frozen"])
def test_a_test_file_is_predicted_in_its_order_and_chooses_nothing(labels, metrics, flag, finished, tmp_path):
    texts = ["the cat sees some bread", "c", f"{sentence(5)} {sentence(6)}", "a dog"]
    rows = [{"text": text, "text2": "b", "label": label} for text, label in zip(texts, labels)]
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json_lines(rows))
    run = functools.partial(tune, finished, "custom", tmp_path, f"--data={tmp_path}", flag, "--seeds=1")
    alone = run(out="alone")
    rows = [rows[3] | {"label": None}, rows[2], rows[1] | {"label": labels[0]}, {"text": texts[0], "text2": "b"}]
    rows = [row | {"id": number} for number, row in enumerate(rows)]
    (tmp_path / "test.jsonl").write_text(json_lines(rows))
    found = run()
    assert [found[name] for name in ("values", "steps")] == [alone[name] for name in ("values", "steps")]
    assert alone["metrics"].keys() == metrics
    assert found["metrics"].keys() == {name + end for name in metrics for end in ("", "_test")}
    dev, test = [pandas.read_json(tmp_path / f"out/seed1/predictions{end}.jsonl", lines=True, dtype=False)
                 for end in ("", "_test")]
    assert [*dev.label, *test.label[1:3]] == [*labels, labels[2], labels[0]] and test.label[[0, 3]].isna().all()
    assert [*test.id] == [0, 1, 2, 3]  # other columns are repeated
    for column in {*dev.columns} - {"label"}:
        assert [*test[column][::-1]] == [pytest.approx(cell) for cell in dev[column]]
    right = (test.prediction == test.label)[1:3].mean()
    assert found["metrics"].get("accuracy_test", 100 * right) == 100 * right


def fake_runs(monkeypatch, value):
    """Make each run return value(runs, tune, seed); returns the list of seeds used."""
    seeds = []

    def run_once(runs, tune, seed):
        seeds.append(seed)
        found = value(runs, tune, seed)
        return {"ranks": None}, probe.Scores({runs.metric: found}, {})

    monkeypatch.setattr(finetune.FineTuning, "run_once", run_once)
    return seeds


def test_an_interrupted_sweep_continues(finished, tmp_path, monkeypatch, capsys):
    rates = [rate * (768 / 32) ** 2 for rate in (2e-5, 3e-5, 4e-5, 5e-5)]  # for an encoder of 32 dimensions
    found = dict(zip(rates, (-9.0, None, 3.0, -1.0)))
    seeds = fake_runs(monkeypatch, lambda runs, tune, seed: seed - 1.0 if seed else found[tune.learning_rate])
    flags = "--sweep --warmup-share 0.06 --batch-size 4".split()  # leaves a grid of four rates
    whole = tune(finished, "cola", tmp_path, *flags)
    assert seeds == [0, 0, 0, 0, 1, 2] and whole["tune"]["learning_rate"] == rates[2]
    assert (whole["values"], whole["seeds"], whole["median"]) == ([0.0, 1.0], [1, 2], 0.5)
    assert "seed2/, of the best seed on dev: 1.00" in capsys.readouterr().out
    (tmp_path / "out" / "result.json").unlink()
    lines = (tmp_path / "out/runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out/runs.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # as a crash leaves it
    again = tune(finished, "cola", tmp_path, *flags)
    assert len(seeds) == 6 + 3
    for result in (again, whole):
        for run in result["sweep"]:
            del run["seconds"]
    assert again == whole


def test_an_average_names_its_tasks(finished, tmp_path, monkeypatch, capsys):
    seeds = fake_runs(monkeypatch, lambda runs, tune, seed: tasks.GLUE.index(runs.task) + 90.0 * (seed == 3))
    command = f"--init {finished} --out {tmp_path}/out --data {write_glue(tmp_path / 'deep/glue')} --task"
    finetune.main([*command.split(), "glue"])
    assert read_json(tmp_path / "out/result.json")["average"] == 3.5  # of medians over seeds
    assert seeds == 8 * [1, 2, 3, 4, 5]
    shutil.rmtree(tmp_path / "deep/glue/stsb")
    finetune.main(command.replace("deep/glue", "deep").replace("/out", "/seven").split() + ["glue"])
    assert read_json(tmp_path / "seven/result.json")["average"] == 3
    assert "average of 7 tasks: 3.00, without stsb" in capsys.readouterr().out


# ---- Layers ---------------------------------------------------------------------------------------------------------
def test_the_last_of_all_layers_is_that_of_finetune(finished, text, figures, tmp_path, monkeypatch):
    (tmp_path / "sst2").mkdir()
    for split, start, stop in (("train", 0, 60), ("validation", 100, 140)):
        rows = [{"sentence": sentence(i)[:9 + i % 9], "label": i % 4 % 2} for i in range(start, stop)]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"sst2/{split}.parquet")
    init = str(finished)
    command = f"--task sst2 --data {tmp_path} --init {init} --frozen cls".split()
    finetune.main([*command, "--out", str(tmp_path / "last")])
    monkeypatch.setattr(examples, "hub_records", lambda name, split: records_of(tmp_path / f"sst2/{split}.parquet"))
    rank.main([init, "--data", str(text), "--val-share", "1", "--probe", "sst2", "--out", str(tmp_path / "rank")])
    models = read_json(tmp_path / "rank/rank.json")["models"]
    scores = models[init]["probe"]["cls"]
    assert len(scores) == 3 and scores[2] == read_json(tmp_path / "last/result.json")["median"]
    assert scores[0] == 50 < scores[1]  # H^0 at [CLS] is the same for all texts
    assert [*models] == [init, f"random:{init}"]
    for pooling, panel in zip(models[init]["probe"], figures[0].axes[2:]):
        drawn = {line.get_label(): [*line.get_ydata()] for line in panel.get_lines()}
        assert drawn == {name: entry["probe"][pooling] for name, entry in models.items()}
