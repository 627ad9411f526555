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
from support.documents import in_validation
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
    """Twelve first and second texts with their labels."""
    return [(sentence(i), sentence(i + 3), label) for i, label in zip(range(12), itertools.cycle(labels.split()))]


def write_glue(folder):
    """Write twelve rows of all parts of GLUE and SQuAD; returns the folder."""
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
    """Write a SQuAD file: for each of twelve paragraphs a question with an answer and one without."""
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
    assert np.isnan([metrics.spearman(0 * true, true), metrics.spearman(guess, 0 * true)]).all()


def test_f1_of_two_labels_is_that_of_scikit_learn():
    for share in (0, 0.1, 0.9):
        true, guess = np.random.default_rng(0).random((2, 60)) < [[0.3], [share]]
        *expected, _ = sklearn.metrics.precision_recall_fscore_support(true, guess, average="binary", zero_division=0)
        found = metrics.f1_of_second_label(guess.astype(int), true.astype(int))
        assert [found["precision"], found["recall"], found["f1"]] == pytest.approx(expected)


def squad_score(answer, *true):
    """EM and F1 of an answer to a question with these true answers."""
    question = tasks.Question("1", "?", "", tuple((0, text) for text in true))
    found = metrics.squad_metrics([question], {"1": answer}, {"1": 0.0})
    return {name: found[name] for name in ("exact", "f1")}


def test_squad_metrics_are_those_of_the_official_evaluation():
    for x, y, f1 in (("cat cat", "the cat", 2 / 3), ("b c", "C, d!", 1 / 2), ("", "an", 1), ("", "dog", 0),
                     ("The theatre's", " theatres", 1), ("an-other", "another", 1), ("5.0\u00a0é", "50  É", 1),
                     ("a’s", "’s", 1), ("cats", "cat's", 1), ("theatre", "atre", 0)):
        assert squad_score(x, y) == squad_score(y, x) == {"exact": 100 * int(f1), "f1": pytest.approx(100 * f1)}
    assert squad_score("dog", "a cat", "dog") == squad_score("") == {"exact": 100, "f1": 100}
    assert squad_score("cat") == {"exact": 0, "f1": 0}


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
    assert [task.metric for task in found] == 4 * ["accuracy"] + "matthews accuracy accuracy spearman f1".split()
    assert [task.official[0] for task in found] == [392702, 363846, 104743, 67349, 8551, 2490, 3668, 5749, 130319]
    assert [task.official[1] for task in found] == [9815, 40430, 5463, 872, 1043, 277, 408, 1500, 11873]
    assert [len(tasks.grid(task.group, 768, {})) for task in found] == 4 * [12] + 4 * [64] + [32]
    assert len(tasks.grid("small", 768, {"epochs": 7.0})) == 16
    for (name, dim), rows in GRIDS.items():
        points = tasks.grid(tasks.TASKS[name].group, dim, {})
        assert tuple({point[field] for point in points} for field in tasks.SWEPT) == rows


@pytest.mark.parametrize("name", tasks.GLUE)
def test_original_files_are_read_as_they_are(name, tmp_path):
    splits, remarks = examples.read_task(name, str(write_glue(tmp_path)), 0.01)
    assert list(splits) == (["train", "dev", "dev_mm"] if name == "mnli" else ["train", "dev"])
    assert all("not comparable with published numbers" in remark for remark in remarks)
    _, _, labels = FORMATS[tasks.TASKS[name].folder]
    for rows in splits.values():
        for found, (a, b, label) in zip(rows, rows_of(labels), strict=True):
            assert (found.text.strip(), *found[1:3]) == (f'"{a}', None if name in ("cola", "sst2") else b, label)


def test_odd_rows_of_qqp_are_read(tmp_path):
    rows = ['1\t1\t2\tNone\tsay "yes\t1', "2\t1\t2\tcut off", "3\t1\t2\tHow?\t\t0"]
    (tmp_path / "train.tsv").write_text("\n".join([FORMATS["QQP"][0], *rows]))
    found = [row[:4] for row in examples.read_file("qqp", tmp_path / "train.tsv")]
    assert found == [("None", 'say "yes', "1", "1"), ("How?", "", "0", "3")]


def test_remarks_tell_what_is_not_official(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "mnli", tasks.TASKS["mnli"]._replace(official=(12, 12, 12)))
    folder = write_glue(tmp_path)
    assert examples.read_task("mnli", str(folder), 0.01)[1] == []
    (folder / "MNLI" / "dev_mismatched.tsv").unlink()
    assert examples.read_task("mnli", str(folder), 0.01)[1] == ["dev_mm is missing: not evaluated"]


def test_squad_files_are_read(tmp_path):
    write_squad(tmp_path / "dev.json")
    answered, unanswerable = examples.read_squad(tmp_path / "dev.json")[4:6]
    assert answered == ("q2", "who is it?", sentence(2), ((0, "my friend"),)) and unanswerable.answers == ()


@pytest.mark.parametrize("field, value, message", [
    ("answers", [{"text": "the cat", "answer_start": 3}], "q0: answer 'the cat' is not at character 3"),
    ("answers", [{"text": "the cat", "answer_start": "0"}], "q0: .* `answer_start` is '0', not a whole number"),
    ("answers", [{"text": " ", "answer_start": 3}], "q0: an answer is empty"), ("answers", None, "q0: .*not a list"),
    ("answers", [], "q0: no answers, but is_impossible is not true"), ("id", "n0", "n0: a second question has this id"),
    ("id", 7, "`id` is 7, not a text"), ("is_impossible", True, "q0: has answers, but is_impossible is true"),
    ("is_impossible", "false", "q0: .* `is_impossible` is 'false', not true or false")])
def test_malformed_questions_are_named(field, value, message, tmp_path):
    write_squad(tmp_path / "dev.json")
    content = json.loads((tmp_path / "dev.json").read_text())
    content["data"][0]["paragraphs"][0]["qas"][0][field] = value
    (tmp_path / "dev.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        examples.read_squad(tmp_path / "dev.json")


def test_docs_leave_the_validation_part_alone(monkeypatch):
    documents = [(("torch", "numpy", "tqdm")[i % 3], f"{sentence(i)} {i}") for i in range(3000)]
    monkeypatch.setattr(examples, "read_docs", lambda: documents)
    splits, _ = examples.read_task("docs", None, 0.3)
    assert len(splits["train"]) == 200 and not set(splits["train"]) & set(splits["dev"])
    for text, _, library, *_ in splits["train"] + splits["dev"]:
        assert library != "tqdm" and (library, text) in documents and not in_validation(text, 0.3)


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


def test_lines_and_json_numbers_keep_their_letters(tmp_path):
    (tmp_path / "new.TXT").write_text("\ufeffa\n\n b")
    assert [row.text for row in examples.read_inputs("custom", str(tmp_path / "new.TXT"))] == ["a", "", " b"]
    labels = ["1.0", f"{10 ** 21}", "true"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a", "label": {label}}}\n' for label in labels))
    assert [row.label for row in examples.read_file("custom", tmp_path / "a.jsonl")] == labels


def test_labels_with_fractions_are_numbers():
    def found(*labels):
        return labels_of("custom", [Example("a", None, label, place="line 7") for label in labels])
    assert found("1", "-2.5") == Labels("spearman", (), 2.5)
    assert found("2", "1.0", "n/a") == Labels("accuracy", ("1.0", "2", "n/a"), f1=True)
    with pytest.raises(UserError, match="line 7: label 'n/a' is not a number"):
        found("2", "1.5", "n/a")
    for label in ("n/a", "1e999"):
        with pytest.raises(UserError, match="line 8: label .* is not one of the training labels: numbers"):
            found("1", "2.5").target(Example("a", None, label, place="line 8"))


@pytest.mark.parametrize("train, dev, message", [
    ("text,text2,label\na,b,x\nc,d,y", "text,label\na,x", "dev lacks a second text"),
    ("text,Text2,label\na,b,x", "", "has a column `Text2`; call it `text2`")])
def test_pairs_and_single_texts_are_not_mixed(train, dev, message, tmp_path):
    (tmp_path / "train.csv").write_text(train)
    (tmp_path / "valid.csv").write_text(dev)
    with pytest.raises(UserError, match=message):
        examples.read_task("custom", str(tmp_path), 0.01)


@pytest.mark.parametrize("name, file, content, message", [
    ("rte", "a.txt", "one text", "needs a column `sentence1`; has `text`"),
    ("custom", "a.csv", "text\n", "has no rows"), ("custom", "a.xls", "", "must end in .csv, .tsv"),
    ("cola", "a.tsv", "index\tsentence\n0\ta\n1\ta\tb\n", "line 3: 3 cells, but 2 columns .*; remove tabs"),
    ("cola", "a.csv", "text,text2\na,b", "cola is a task of single texts"),
    ("custom", "train.csv", "text,kind\na,b\n", "line 2: needs a column `label`; has `text`, `kind`"),
    ("custom", "train.csv", "nice,x\nbad,y\n", "needs a column `text`; has `nice`, `x`. A table starts"),
    ("custom", "train.csv", 'text,label\n"a\nb",x\nb, c,x\n', "line 4: 3 cells"),
    ("custom", "train.tsv", "text\tlabel\na\tb\tx\n", "line 2: 3 cells, .*; put quotes"),
    ("custom", "train.tsv", "text\tlabel\na\tx\nb\t\n", "line 3: the text or the label in column `label` is empty"),
    ("custom", "train.csv", 'text,label\na,x\n"b,x\n', "line 3: unexpected end of data"),
    ("custom", "train.csv", "text,label,label\na,x,y\n", "two columns `label`"),
    ("custom", "train.csv", "text,label\ncafé,x\n".encode("latin-1"), "line 2: not UTF-8; convert"),
    ("custom", "train.csv", "text,label\na,x\n".encode("utf-16"), "line 1: not UTF-8; convert"),
    ("custom", "train.csv", "text,label\na,x\n".encode("utf-16-le"), "line 1: not UTF-8; convert"),
    ("custom", "train.jsonl", '{"text": "a", "label": "x"}\n{"text": ["a"], "label": "x"}', "line 2: `text` is .'a'"),
    ("custom", "train.jsonl", '{"text": "a", "label": "x"}\n{"text": "a", "text2": "b", "label": "x"}', "some rows"),
    ("custom", "train.csv.gz", "text", "cannot be read .Not a gzipped file"),
    ("rte", "train.tsv", "sentence1\tsentence2\tlabel\n", "train.tsv: has no rows with a label in column `label`"),
    ("rte", "train.tsv", "sentence1\tsentence2\tgold\na\tb\tx", "needs a column `label`"),
    ("custom", "train.x", "", "no train.csv or .tsv or .jsonl or .json or .parquet there")])
def test_bad_files_are_refused(name, file, content, message, tmp_path):
    for path in (file, file.replace("train", "dev")):
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        if file.startswith("a"):
            examples.read_inputs(name, str(tmp_path / file))
        examples.read_task(name, str(tmp_path), 0.01)
