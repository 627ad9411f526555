"""Claims about tasks: their files, their grids and their metrics."""
import csv
import gzip
import itertools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.stats
import sklearn.metrics

from support import examples, metrics, tasks
from support.cli import UserError
from support.corpus import in_validation
from support.tasks import Example, Labels, labels_of
from tests.common import SUBJECTS, sentence

FORMATS = {  # header, row and labels of the original releases
    "CoLA": ("", 'gj04\t{label}\t*\t"{a}', "0 1"),
    "SST-2": ("sentence\tlabel", '"{a} \t{label}', "0 1"),
    "MRPC": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '{label}\t1\t2\t"{a}\t{b}', "0 1"),
    "RTE": ("index\tsentence1\tsentence2\tlabel", '{i}\t"{a}\t{b}\t{label}', "not_entailment entailment"),
    "QNLI": ("index\tquestion\tsentence\tlabel", '{i}\t"{a}\t{b}\t{label}', "entailment not_entailment"),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", '{i}\t1\t2\t"{a}\t{b}\t{label}', "0 1"),
    "STS-B": ("index\tsource1\tsentence1\tsentence2\tscore", '{i}\tnone\t"{a}\t{b}\t{label}', "0.0 2.5 5.0"),
    "MNLI": ("sentence1\tsentence2\tlabel1\tgold_label", '"{a}\t{b}\tx\t{label}', "neutral entailment contradiction"),
}


def rows_of(labels):
    """Twelve pairs of texts with their labels."""
    return [(sentence(i), sentence(i + 3), label) for i, label in zip(range(12), itertools.cycle(labels.split()))]


def write_glue(folder):
    """Write all files of GLUE with twelve rows each, and those of SQuAD; returns the folder."""
    for name, (header, row, labels) in FORMATS.items():
        rows = [row.format(i=i, a=a, b=b, label=label) for i, (a, b, label) in enumerate(rows_of(labels))]
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part in ("train", "dev", "dev_matched", "dev_mismatched"):
            lines = [header, *rows] if header else rows
            (folder / name / f"{part}.tsv").write_text("\n".join(lines), encoding="utf-8")
    write_squad(folder / "train-v2.0.json")
    write_squad(folder / "dev-v2.0.json")
    return folder


def write_squad(path):
    """Write a SQuAD file of twelve paragraphs, each with an answerable and an unanswerable question."""
    paragraphs = []
    for i in range(12):
        answer = {"text": SUBJECTS[i % 4], "answer_start": 0}
        questions = [{"id": f"q{i}", "question": "who is it?", "is_impossible": False, "answers": [answer]},
                     {"id": f"n{i}", "question": "what not?", "is_impossible": True, "answers": []}]
        paragraphs.append({"context": sentence(i), "qas": questions})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))


@pytest.mark.parametrize("n", [10, 1000])
def test_metrics_equal_scipy_and_scikit_learn(n):
    random = np.random.default_rng(n)
    guess, true = random.integers(4, size=(2, n))
    assert metrics.accuracy(guess, true) == pytest.approx(sklearn.metrics.accuracy_score(true, guess))
    for values in (guess, random.normal(size=n)):
        assert metrics.spearman(values, true) == pytest.approx(scipy.stats.spearmanr(values, true).statistic)
    assert metrics.f1(guess % 2, true % 2) == pytest.approx(sklearn.metrics.f1_score(true % 2, guess % 2))
    assert metrics.f1(0 * true, 0 * true) == 0
    assert np.isnan([metrics.spearman(0 * true, true), metrics.spearman(guess, 0 * true)]).all()


def test_squad_metrics_are_those_of_the_official_evaluation():
    def score(answer, *true):
        question = tasks.Question("1", "?", "", tuple((0, text) for text in true))
        found = metrics.squad_metrics([question], {"1": answer}, {"1": 0.0})
        return found["exact"], found["f1"]

    for x, y, f1 in (("cat cat", "the cat", 2 / 3), ("b c", "C, d!", 1 / 2), ("", "an", 1), ("", "dog", 0),
                     ("The theatre's", " theatres", 1), ("an-other", "another", 1), ("5.0\u00a0é", "50  É", 1),
                     ("a’s", "’s", 1), ("cats", "cat's", 1), ("theatre", "atre", 0)):
        assert score(x, y) == score(y, x) == (100 * int(f1), pytest.approx(100 * f1))
    assert score("dog", "a cat", "dog") == score("") == (100, 100)
    assert score("cat") == (0, 0)


def test_the_best_threshold_is_the_best_of_all():
    random, names = np.random.default_rng(0), "012345678"
    for _ in range(20):
        true, given = random.choice(["", "red cat", "dog"], (2, 9))
        questions = [tasks.Question(name, "?", "", ((0, text),) if text else ()) for name, text in zip(names, true)]
        answers, odds = dict(zip(names, given)), dict(zip(names, random.normal(size=9)))
        found = metrics.squad_metrics(questions, answers, odds)
        scores = {0.0: 100 * found.get("NoAns_total", 0) / 9}  # without any answer
        for threshold in odds.values():
            kept = {name: answers[name] if odds[name] <= threshold else "" for name in names}
            scores[threshold] = metrics.squad_metrics(questions, kept, odds)["f1"]
        assert found["best_f1"] == pytest.approx(max(scores.values()))
        assert scores[found["best_f1_thresh"]] == pytest.approx(found["best_f1"])


GRIDS = {  # task, width of the encoder -> Tables 5 and 6
    ("cola", 768): ({2, 3, 5, 10}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1}),
    ("cola", 1024): ({2, 3, 5, 10}, {7e-6, 1e-5, 2e-5, 3e-5}, {16, 32}, {0.06, 0.1}),
    ("mnli", 768): ({2, 3, 5}, {1e-5, 2e-5, 3e-5, 4e-5}, {32}, {0.06}),
    ("mnli", 1024): ({2, 3, 5}, {5e-6, 7e-6, 1e-5, 2e-5}, {32}, {0.06}),
    ("squad2", 768): ({2, 3}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1})}


def test_tasks_and_grids_are_those_of_the_paper():
    found = [tasks.TASKS[name] for name in (*tasks.GLUE, "squad2")]
    assert " ".join(tasks.GLUE) == "mnli qqp qnli sst2 cola rte mrpc stsb"
    assert [task.metrics[0] for task in found] == 4 * ["accuracy"] + "matthews accuracy accuracy spearman f1".split()
    assert len(tasks.grid("small", 768, {"epochs": 7.0})) == 16
    for (name, dim), rows in GRIDS.items():
        points = tasks.grid(tasks.TASKS[name].group, dim, {})
        assert tuple({point[field] for point in points} for field in tasks.SWEPT) == rows


@pytest.mark.parametrize("name", tasks.GLUE)
def test_original_files_are_read_as_they_are(name, tmp_path):
    splits = examples.read_task(name, str(write_glue(tmp_path)), 0.01)
    assert list(splits) == (["train", "dev", "dev_mm"] if name == "mnli" else ["train", "dev"])
    _, _, labels = FORMATS[tasks.TASKS[name].folder]
    for rows in splits.values():
        for found, (a, b, label) in zip(rows, rows_of(labels), strict=True):
            assert (found.text.strip(), *found[1:3]) == (f'"{a}', None if name in ("cola", "sst2") else b, label)


def test_odd_rows_of_qqp_are_read(tmp_path):
    rows = ['1\t1\t2\tNone\tsay "yes\t1', "2\t1\t2\tcut off", "3\t1\t2\tHow?\t\t0"]
    (tmp_path / "train.tsv").write_text("\n".join([FORMATS["QQP"][0], *rows]))
    found = [row[:4] for row in examples.read_file("qqp", tmp_path / "train.tsv")]
    assert found == [("None", 'say "yes', "1", "1"), ("How?", "", "0", "3")]


@pytest.mark.parametrize("field, value, message", [
    ("answers", [{"text": "the cat", "answer_start": 3}], "q0: answer 'the cat' is empty, or not at character 3"),
    ("answers", [{"text": "the cat", "answer_start": "0"}], "q0: .* `answer_start` is '0', not of type int"),
    ("answers", [], "q0: has 0 answers, but is_impossible is False"), ("id", "n0", "a second question has the id n0"),
    ("is_impossible", "false", "q0: has 1 answers, but is_impossible is 'false'"), ("question", None, "`question` is")])
def test_malformed_questions_are_named(field, value, message, tmp_path):
    write_squad(tmp_path / "dev.json")
    content = json.loads((tmp_path / "dev.json").read_text())
    content["data"][0]["paragraphs"][0]["qas"][0][field] = value
    (tmp_path / "dev.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        examples.read_squad(tmp_path / "dev.json")


def test_docs_leave_the_validation_split_alone(monkeypatch):
    documents = [(("torch", "numpy", "tqdm")[i % 3], f"{sentence(i)} {i}") for i in range(3000)]
    monkeypatch.setattr(examples, "read_docs", lambda: documents)
    splits = examples.read_task("docs", None, 0.3)
    assert len(splits["train"]) == 200 and not set(splits["train"]) & set(splits["dev"])
    for text, _, library, *_ in splits["train"] + splits["dev"]:
        assert library != "tqdm" and (library, text) in documents and not in_validation(text, 0.3)


def test_a_blank_line_is_an_empty_text_where_there_is_one_column(tmp_path):
    (tmp_path / "a.csv").write_text('text\nb\n\n""\nc\n')
    (tmp_path / "b.csv").write_text("text,label\nb,x\n\nc,y\n")
    found = [examples.read_file("custom", tmp_path / name, labelled=False) for name in ("a.csv", "b.csv")]
    assert [[example.text for example in each] for each in found] == [["b", "", "", "c"], ["b", "c"]]


def test_all_formats_keep_cells_as_they_are(tmp_path):
    labels = ["01", "1", "1.0", "NA", "None", "1180591620717411303425"]
    rows = [{"text": text, "text2": "b", "label": label}
            for text in ('say "x",\n\tthen y', "None", " c ") for label in labels]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = [json.dumps(row | {"more": i} if i else row) for i, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for suffix, dialect in ((".csv", "excel"), (".tsv", "excel-tab")):
        with open(tmp_path / f"a{suffix}", "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, dialect).writerows([["text", "text2", "label"], *[row.values() for row in rows]])
        packed = gzip.compress((tmp_path / f"a{suffix}").read_bytes())
        (tmp_path / f"[a]{suffix.upper()}.gz").write_bytes(packed)
    for path in tmp_path.iterdir():
        found = examples.read_file("custom", path)
        assert [row[:3] for row in found] == [tuple(row.values()) for row in rows], path


def test_lines_and_json_numbers_are_read_verbatim(tmp_path):
    (tmp_path / "new.TXT").write_text("\ufeffa\n\n b")
    assert [row.text for row in examples.read_file("custom", tmp_path / "new.TXT", labelled=False)] == ["a", "", " b"]
    labels = ["1.0", f"{10 ** 21}", "true"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a", "label": {label}}}\n' for label in labels))
    assert [row.label for row in examples.read_file("custom", tmp_path / "a.jsonl")] == labels


def test_labels_with_fractions_are_numbers():
    def found(*labels):
        return labels_of("custom", [Example("a", None, label) for label in labels])
    assert found("1", "-2.5", "n/a") == Labels(("spearman",), (), 2.5, pairs=False)
    assert found("2", "1.0", "n/a") == Labels(("accuracy",), ("1.0", "2", "n/a"), pairs=False)
    assert found("b", "a").metrics == ("accuracy", "f1")
    for label in ("n/a", "1e999"):
        with pytest.raises(UserError, match="line 8: label .* is not one of the training labels .numbers"):
            found("1", "2.5").target(Example("a", None, label, place="line 8"))


@pytest.mark.parametrize("name, file, content, message", [
    ("rte", "a.txt", "one text", "line 1: lacks a second text"), ("custom", "a.xls", "", "must end in .txt, .csv"),
    ("cola", "a.tsv", "index\tsentence\n0\ta\n1\ta\tb\n", "line 3: must have as many cells .* remove the tab"),
    ("custom", "train.csv", "text,kind\na,b\n", "line 2: must have a text in column `label`, but has `text`, `kind`"),
    ("custom", "train.tsv", "text\tlabel\na\tx\nb\t\n", "line 3: the text or the label in column `label` is empty"),
    ("custom", "train.csv", "text,label\na,Yes\nb,yes\n", "labels differ only in case"),
    ("custom", "train.csv", 'text,label\na,x\n"b,x\n', "line 3: unexpected end of data"),
    ("custom", "train.csv", "text,label,label\na,x,y\n", "two of the columns text, label, label"),
    ("custom", "train.jsonl", '{"text": "a", "label": "x", "Label": "y"}', "line 1: two of the columns text, label"),
    ("custom", "train.jsonl", '{"text": "a", "label": "x\\ty"}', "line 1: the label or id has a tab"),
    ("custom", "train.csv", "text,label\ncafé,x\n".encode("latin-1"), "line 2: not UTF-8; convert"),
    ("custom", "train.jsonl", '{"text": ["a"], "label": "x"}', "line 1: must have a text in column `text`, .* .'a'"),
    ("custom", "train.csv.gz", "text", "cannot be read .Not a gzipped file"),
    ("custom", "train.csv", "text,label\na,x\n", "all training examples have the label 'x'"),
    ("custom", "train.x", "", "must have one file train .* has none")])
def test_bad_files_are_refused(name, file, content, message, tmp_path):
    for path in (file, file.replace("train", "dev")):
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        if file.startswith("a"):
            splits = {"dev": examples.read_file(name, tmp_path / file, labelled=False)}
            labels = Labels(("accuracy",), pairs=name == "rte")
        else:
            splits = examples.read_task(name, str(tmp_path), 0.01)
            labels = labels_of(name, splits["train"])
        for example in itertools.chain(*splits.values()):
            labels.target(example)


@pytest.mark.parametrize("names", ["text,Text2 ,Label", "sentence1,sentence2,label"])
def test_columns_and_files_may_have_other_names(names, tmp_path):
    (tmp_path / "Train.csv").write_text(f"{names}\na,b,x\n")
    (tmp_path / "valid.jsonl").write_text('{"text": "a", "text2": "b", "label": "x", "more": 1}')
    splits = examples.read_task("custom", str(tmp_path), 0.01)
    assert splits["train"][0][:3] == splits["dev"][0][:3] == ("a", "b", "x")
