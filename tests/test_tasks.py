"""Claims about tasks: their files, their grids and their metrics."""
import csv
import gzip
import hashlib
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.stats
import sklearn.metrics

from support.program import UserError
from support.tasks import classification as metrics, squad, tasks
from support.text import corpus
from support.text.corpus import in_validation
from tests.common import SUBJECTS, sentence

GLUE = {name: task for name, task in tasks.TASKS.items() if name in tasks.GLUE}


def rows_of(name):
    """Sixteen records of a GLUE task, as the Hub has them: with numbers as labels, float32 for STS-B."""
    task, records = GLUE[name], []
    for i in range(16):
        label = i % len(task.labels) if task.labels else float(np.float32((3.2, 0.0, 5.0)[i % 3]))
        texts = (f'"{sentence(i)}', sentence(i + 3))
        records.append(dict(zip(task.columns, texts)) | {"label": label, "idx": i})
    return records


def write_glue(folder):
    """Write the Hub's files of GLUE and SQuAD with a few rows each; returns the folder."""
    tables = {name: (rows_of(name), task.dev) for name, task in GLUE.items()}
    tables["squad_v2"] = squad_records(), ["validation"]
    for name, (records, dev) in tables.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split in ("train", *dev):
            table = pyarrow.Table.from_pylist(records[:7] if "mismatched" in split else records)
            pyarrow.parquet.write_table(table, folder / name / f"{split}-00000-of-00001.parquet")
    return folder


def squad_records():
    """Twelve answerable and twelve unanswerable questions, as the Hub has them."""
    answers = [{"text": [SUBJECTS[i % 4]] * (i % 2), "answer_start": [0] * (i % 2)} for i in range(24)]
    return [{"id": f"q{i}", "question": "who is it?", "context": sentence(i), "answers": answer}
            for i, answer in enumerate(answers)]


@pytest.mark.parametrize("n", [10, 1000])
def test_metrics_equal_scipy_and_scikit_learn(n):
    random = np.random.default_rng(n)
    guess, true = random.integers(4, size=(2, n))
    assert metrics.METRICS["accuracy"](guess, true) == pytest.approx(sklearn.metrics.accuracy_score(true, guess))
    for values in (guess, random.normal(size=n)):
        assert metrics.spearman(values, true) == pytest.approx(scipy.stats.spearmanr(values, true).statistic)
    assert metrics.f1(guess % 2, true % 2) == pytest.approx(sklearn.metrics.f1_score(true % 2, guess % 2))
    assert metrics.f1(0 * true, 0 * true) == 0
    assert metrics.spearman(0 * true, true) == metrics.spearman(guess, 0 * true) == 0


def test_squad_metrics_are_those_of_the_official_evaluation():
    def score(answer, *true):
        question = tasks.Question("1", "?", "", tuple((0, text) for text in true))
        found = squad.squad_metrics([question], {"1": answer})
        return found["exact"], found["f1"]

    for x, y, f1 in (("cat cat", "the cat", 2 / 3), ("b c", "C, d!", 1 / 2), ("", "an", 1), ("", "dog", 0),
                     ("The theatre's", " theatres", 1), ("an-other", "another", 1), ("5.0\u00a0é", "50  É", 1),
                     ("a’s", "’s", 1), ("cats", "cat's", 1), ("theatre", "atre", 0)):
        assert score(x, y) == score(y, x) == (100 * int(f1), pytest.approx(100 * f1))
    assert score("dog", "a cat", "dog") == score("") == (100, 100)
    assert score("cat") == score("", "the", "dog") == (0, 0)  # an article alone is no answer


GRIDS = {  # task, width of the encoder -> Tables 5 and 6
    ("cola", 768): ({2, 3, 5, 10}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1}),
    ("cola", 1024): ({2, 3, 5, 10}, {7e-6, 1e-5, 2e-5, 3e-5}, {16, 32}, {0.06, 0.1}),
    ("mnli", 768): ({2, 3, 5}, {1e-5, 2e-5, 3e-5, 4e-5}, {32}, {0.06}),
    ("mnli", 1024): ({2, 3, 5}, {5e-6, 7e-6, 1e-5, 2e-5}, {32}, {0.06}),
    ("squad2", 768): ({2, 3}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1})}


def test_tasks_and_grids_are_those_of_the_paper():
    found = [tasks.TASKS[name] for name in (*tasks.GLUE, "squad2")]
    assert [task.metrics[0] for task in found] == 4 * ["accuracy"] + "matthews accuracy accuracy spearman f1".split()
    pair = "sentence1 sentence2"
    assert [" ".join(task.columns) for task in GLUE.values()] == [  # as on the Hub
        "premise hypothesis", "question1 question2", "question sentence", "sentence", "sentence", pair, pair, pair]
    assert len(tasks.grid("docs", tasks.TuneConfig(epochs=7.0), 768, {"epochs": 7.0})) == 16
    fields = "epochs", "learning_rate", "batch_size", "warmup_share"
    assert {*tasks.SWEPT} == {*fields}
    for (name, dim), rows in GRIDS.items():
        points = tasks.grid(name, tasks.TuneConfig(), dim, {})
        assert tuple({getattr(point, field) for point in points} for field in fields) == rows


@pytest.mark.parametrize("name", tasks.GLUE)
def test_the_hubs_files_are_read_as_they_are(name, tmp_path):
    splits = tasks.read_task(name, str(write_glue(tmp_path)), {})
    assert list(splits) == (["train", "dev", "dev_mm"] if name == "mnli" else ["train", "dev"])
    labels, columns = GLUE[name].labels, GLUE[name].columns
    for split, rows in splits.items():
        assert len(rows) == (7 if split == "dev_mm" else 16)
        for found, record in zip(rows, rows_of(name)):
            label = labels[record["label"]] if labels else str(round(record["label"], 1))
            texts = [record[column] for column in columns]
            assert found[:3] == (*texts, *[None] * (2 - len(texts)), label)
    assert tasks.read_task(name, str(tmp_path / name), {}) == splits


def test_docs_repeat_no_text_of_dev_or_of_the_validation_split(monkeypatch):
    texts = [" ".join(f"{word}{i}" for word in range(15 if i % 2 else 5)) for i in range(4000)]
    copies = {f"Copied: {text.upper()}.": text for text in texts[1::2]}  # of the long ones
    documents = [(("torch", "numpy", "tqdm")[i % 3], text) for i, text in enumerate([*texts, *copies])]
    monkeypatch.setattr(corpus, "read_docs", lambda cache: {"kept": documents}[cache])
    train, dev = tasks.read_task("docs", None, {"val_share": 0.3, "cache": "kept"}).values()
    for text, _, library, *_ in train + dev:
        assert library != "tqdm" and (library, text) in documents and not in_validation(text, 0.3)
    documents.sort(key=lambda item: hashlib.blake2b(item[1].encode()).hexdigest())
    for name in ("torch", "numpy"):  # of each library, the texts with the lowest hashes in the next tenth
        tenth = [text for library, text in documents if library == name and in_validation(text, 0.4)]
        expected = [text for text in tenth if not in_validation(text, 0.3)][:150]
        assert [row.text for row in dev if row.label == name] == expected
    originals = [{copies.get(example.text, example.text) for example in split} for split in (train, dev)]
    assert len(train) == 200 and len(dev) == 300 and originals[0].isdisjoint(originals[1])


def test_all_formats_keep_cells_as_they_are(tmp_path):
    labels = ["01", "1", "1.0", "NA", "None", "1180591620717411303425"]
    rows = [{"text": text, "text2": "b", "label": label}
            for text in ('say "x",\n\tthen y', "None", " c ") for label in labels]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = [json.dumps(row | {"more": i} if i else row) for i, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8-sig")
    with open(tmp_path / "a.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["text", "text2", "label"], *[row.values() for row in rows]])
    (tmp_path / "[a].CSV.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for path in tmp_path.iterdir():
        assert [row[:3] for row in tasks.custom_examples(path)] == [tuple(row.values()) for row in rows], path
    (tmp_path / "a.tsv").write_text('text\tlabel\n"a\tx\nb\ty\n"c" d"\tnull\n')  # without quotes, as GLUE's own files
    found = [row[:3:2] for row in tasks.custom_examples(tmp_path / "a.tsv")]
    assert found == [('"a', "x"), ("b", "y"), ('"c" d"', "null")]
    (tmp_path / "Train.csv").write_text("sentence1,Sentence2 ,Label\na,b,1.0\n")
    (tmp_path / "valid.jsonl").write_text('{"text": "a", "text2": "b", "label": 1.0}\n')  # as written, not 1
    for row in tasks.read_task("custom", str(tmp_path), {}).values():
        assert row[0][:3] == ("a", "b", "1.0")


def test_without_a_dev_file_a_tenth_of_train_is_dev_whatever_its_order(tmp_path, capsys):
    lines = [f"{i} and more,{i if i < 40 else i % 4}" for i in range(95)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]))
    splits = tasks.read_task("custom", str(tmp_path), {})
    train, dev = splits.values()
    assert len(dev) == 10 and {row.label for row in train} == {*map(str, range(40))} and len(train) == 85
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines[::-1]]))
    assert tasks.hash_of(tasks.read_task("custom", str(tmp_path), {})) == tasks.hash_of(splits)
    assert "has no file dev; 10 examples of train" in capsys.readouterr().out


def test_labels_with_fractions_are_numbers(monkeypatch):
    def found(*labels):
        return tasks.labels_of("custom", [tasks.Example("a", None, label) for label in labels])
    assert found("1", "-2.5", "n/a") == tasks.Labels(("spearman",), (), 2.5)
    assert found("2", "1.0", "n/a") == tasks.Labels(("accuracy",), ("1.0", "2", "n/a"))
    assert found("b", "a").metrics == ("accuracy", "f1")
    monkeypatch.setitem(tasks.TASKS, "mine", tasks.Task("small", columns=("text",)))  # a task with the defaults
    records = [("row 1", {"text": "a", "label": label}) for label in (0, 3, 2)]
    assert tasks.labels_of("mine", tasks.examples_of("mine", records)).names == ("0", "2", "3")
    record = {"sentence1": "a", "sentence2": "b"}
    assert tasks.examples_of("rte", [("row 1", record | {"label": "entailment"})])[0].label == "entailment"
    with pytest.raises(UserError, match="row 1: label -2: use a whole number from 0 to 1"):
        tasks.examples_of("rte", [("row 1", record | {"label": -2})])
    with pytest.raises(UserError, match="line 8: label .* is not one of the training labels .numbers"):
        found("1", "2.5").target(tasks.Example("a", None, "1e999", place="line 8"))


@pytest.mark.parametrize("file, content, message", [
    ("train.csv", "text,kind\na,b\n", "row 1: needs text in text and text2, and a label, but has .*'kind': 'b'"),
    ("train.jsonl", '{"text": "a", "label": NaN}', "train.jsonl, row 1: its label is missing"),
    ("train.csv", "text,label\na,x,y\nb,x,y\n", "train.csv: .*its rows have more cells than the header"),
    ("train.csv", "text,label\na,x\nb,x,y\n", "train.csv: .*Expected 2 fields in line 3, saw 3"),
    ("train.tsv", "text\tlabel\n\ty\nb\t\n", "train.tsv, row 2: its label is missing"),
    ("train.csv", "text,Text,label\na,b,x\n", "train.csv, row 1: two of its columns mean the same .text, Text, label"),
    ("train.jsonl", '[["text", "a"], ["label", "b"]]', "train.jsonl: cannot be read"),
    ("train.x", "", "must have one file train .* has none")])
def test_bad_files_are_refused(file, content, message, tmp_path):
    for path in (file, file.replace("train", "dev")):
        (tmp_path / path).write_text(content)
    with pytest.raises(UserError, match=message):
        tasks.labels_of("custom", tasks.read_task("custom", str(tmp_path), {})["train"])


def test_questions_are_trained_only_where_their_answer_stands(tmp_path, capsys):
    def found(*starts):
        rows = [{"id": str(i), "question": "who?", "context": "the cat sat", "answers": {
            "text": [] if start is None else ["cat"], "answer_start": [] if start is None else [start]}}
            for i, start in enumerate(starts)]
        for split in ("train", "validation"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        splits = tasks.read_task("squad2", str(tmp_path), {})
        assert len(splits["dev"]) == len(starts)  # scores compare texts
        return [question.id for question in splits["train"]]

    assert found(4, 4, None) == ["0", "1", "2"] and capsys.readouterr().out == ""
    assert found(4, 13, None, 3) == ["0", "2"] and "2 training questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="3 of 4 training answers are not in their context at answer_start"):
        found(3, 5, None, 0)
