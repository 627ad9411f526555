"""Claims about tasks: their files, their grids and their metrics."""
import hashlib
import math
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.stats
import sklearn.metrics

from support import classification as metrics, docs, squad, tasks
from support.docs import in_validation
from support.examples import Data, Labels, Question, label_of, labels_of, read_task, read_tasks
from support.program import UserError, json_lines
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


def test_metrics_equal_scipy_and_scikit_learn():
    random = np.random.default_rng(0)
    guess, true = random.integers(4, size=(2, 1000))
    assert metrics.METRICS["accuracy"](guess, true) == pytest.approx(sklearn.metrics.accuracy_score(true, guess))
    for values in (guess, random.normal(size=1000)):
        assert metrics.spearman(values, true) == pytest.approx(scipy.stats.spearmanr(values, true).statistic)
        assert metrics.r2(values, true) == pytest.approx(sklearn.metrics.r2_score(true, values))
    assert metrics.f1(guess % 2, true % 2) == pytest.approx(sklearn.metrics.f1_score(true % 2, guess % 2))
    assert metrics.f1(0 * true, 0 * true) == 0
    assert metrics.spearman(0 * true, true) == metrics.spearman(guess, 0 * true) == 0


def test_squad_metrics_are_those_of_the_official_evaluation():
    def score(answer, *true):
        question = Question("1", "?", "", tuple((0, text) for text in true))
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
    entailment, numbers = "entailment not_entailment", "0 1"
    assert [" ".join(task.labels) for task in GLUE.values()] == [
        "entailment neutral contradiction", numbers, entailment, numbers, numbers, entailment, numbers, ""]
    pair = "sentence1 sentence2"
    assert [" ".join(task.columns) for task in GLUE.values()] == [  # as on the Hub
        "premise hypothesis", "question1 question2", "question sentence", "sentence", "sentence", pair, pair, pair]
    assert len(tasks.TuneConfig(epochs=7.0).grid("docs", 768, {"epochs": 7.0})) == 16
    fields = "epochs", "learning_rate", "batch_size", "warmup_share"
    assert {*tasks.SWEPT} == {*fields}
    for (name, dim), rows in GRIDS.items():
        points = tasks.TuneConfig().grid(name, dim, {})
        assert tuple({getattr(point, field) for point in points} for field in fields) == rows


@pytest.mark.parametrize("name, epochs, batch_size, rate", [
    ("cola", 10, 16, 3e-5), ("mnli", 3, 32, 3e-5), ("squad2", 3, 16, 3e-5), ("docs", 5, 16, 8e-4 / 36)])
def test_settings_that_are_not_searched(name, epochs, batch_size, rate):
    found = tasks.TuneConfig.of(name, {}, 128)
    assert (found.epochs, found.batch_size, found.learning_rate) == (epochs, batch_size, pytest.approx(36 * rate))
    assert (found.warmup_share, found.weight_decay, found.dropout, found.seq_len) == (0.06, 0.01, 0.1, 512)
    assert (found.max_query, found.doc_stride, found.max_answer) == (64, 128, 30)


@pytest.mark.parametrize("name", tasks.GLUE)
def test_the_hubs_files_are_read_as_they_are(name, tmp_path):
    splits = read_task(name, Data(str(write_glue(tmp_path))), {})
    assert list(splits) == (["train", "dev", "dev_mm"] if name == "mnli" else ["train", "dev"])
    labels, columns = GLUE[name].labels, GLUE[name].columns
    for split, rows in splits.items():
        assert len(rows) == (7 if split == "dev_mm" else 16)
        for found, record in zip(rows, rows_of(name)):
            label = labels[record["label"]] if labels else round(record["label"], 1)
            texts = [record[column] for column in columns]
            assert found[:3] == (*texts, *[None] * (2 - len(texts)), label)


def test_docs_repeat_no_text_of_dev_or_of_the_validation_split(monkeypatch):
    texts = [" ".join(f"{word}{i}" for word in range(15 if i % 2 else 5)) for i in range(6000)]
    copies = {f"Copied: {text.upper()}.": text for text in texts[1::2]}  # of the long ones
    sources = ("torch", "numpy", "tqdm", "python.email")
    documents = [(sources[i % 4], text) for i, text in enumerate([*texts, *copies])]
    monkeypatch.setattr(docs, "read_docs", lambda cache: {"kept": documents}[cache])
    documents.sort(key=lambda item: hashlib.blake2b(item[1].encode()).hexdigest())
    for task, names in (("docs", {"torch": "torch", "numpy": "numpy", "python.email": "python"}),
                        ("modules", {"python.email": "python.email"})):
        train, dev = read_task(task, Data(), {"val_share": 0.3, "cache": "kept"}).values()
        known = {(names.get(source), text) for source, text in documents}
        assert all((label, text) in known and not in_validation(text, 0.5) for text, _, label, *_ in train)
        for source, label in names.items():  # the texts with the lowest hashes in the second tenth after validation
            tenth = [text for found, text in documents if found == source and in_validation(text, 0.5)]
            expected = [text for text in tenth if not in_validation(text, 0.4)][:150]
            assert [row.text for row in dev if row.label == label] == expected
        originals = [{copies.get(example.text, example.text) for example in split} for split in (train, dev)]
        assert len(train) == 100 * len(names) and len(dev) == 150 * len(names) and originals[0].isdisjoint(originals[1])


def test_names_of_labels_are_removed_from_texts(monkeypatch):
    texts = [f"Numpy and numpys, python, email {i}: decimals of Decimal." for i in range(200)]
    documents = [("python.email", text) for text in texts]
    monkeypatch.setattr(docs, "read_docs", lambda cache: documents)
    for task, end in (("docs", " and numpys, , email {}: decimals of Decimal."),
                      ("modules", "Numpy and numpys, python,  {}: decimals of .")):
        [row, *_] = read_task(task, Data(), {})["train"]
        assert row.text in [end.format(i) for i in range(200)]


def test_bigram_shift_exchanges_two_inner_words_of_half_of_the_sentences(monkeypatch):
    words = "one two three four five six seven eight".split()
    sentence = "The {} " + " ".join(words) + ", it says."
    texts = [f"{sentence.format(i)} Too short {i}.\n\nHeading {i}\n------- with an underline that is no sentence.\n\n"
             f"see {sentence.format(i)}\n\nCall {i} of f(x) = 1 is no prose at all here." for i in range(900)]
    monkeypatch.setattr(docs, "read_docs", lambda cache: [("torch", text) for text in texts])
    train, dev = read_task("bshift", Data(), {}).values()
    held_out = docs.scored_docs(0.01, "")
    assert len(dev) == len(held_out) > 50 and len(train) + len(dev) < 900
    places = set()
    for split, rows in (("train", train), ("dev", dev)):
        assert 0.4 < sum(row.label == "exchanged" for row in rows) / len(rows) < 0.6
        for row in rows:
            found = row.text.split()
            number = next(word for word in found if word.isdigit())
            plain = sentence.format(number).split()
            assert (texts[int(number)] in held_out) == (split == "dev")
            different = [i for i, pair in enumerate(zip(plain, found)) if pair[0] != pair[1]]
            assert (row.label == "original") == (different == [])
            if different:
                i, j = different
                places.add(i)
                assert j == i + 1 and [found[i], found[j]] == [plain[j], plain[i]]
    assert places == {*range(1, 10)}  # of twelve words, all but the first and the last


def test_custom_files_have_names_or_numbers_as_labels(tmp_path, capsys):
    def read(labels, **more):
        rows = [{"text": f"a {i}", "label": label} | more for i, label in enumerate(labels)]
        (tmp_path / "train.jsonl").write_text(json_lines(rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
        splits = read_task("custom", Data(str(tmp_path)), {})
        assert splits["train"] == splits["dev"]
        return splits["train"], labels_of("custom", splits["train"])

    def read_table(name, content):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text(content)
        splits = read_task("custom", Data(str(tmp_path)), {})
        return splits, labels_of("custom", splits["train"])

    examples, labels = read(["01", "1", "NA"], text2="b")
    assert examples[0] == ("a 0", "b", "01", {}) and labels == Labels(("accuracy",), ("01", "1", "NA"))
    assert [labels.target(example.label) for example in examples] == [0, 1, 2] and labels.target(None) == 0
    examples, labels = read([3, 0, 3])
    assert examples[0] == ("a 0", None, "3", {}) and labels == Labels(("accuracy", "f1"), ("0", "3"))
    examples, labels = read([1.0, -2.5])
    assert labels == Labels(("spearman", "r2"), (), -0.75, 1.75) and labels.target(examples[0].label) == 1
    for wrong, found in (("x", labels), (1.5, Labels((), ("a",)))):
        with pytest.raises(UserError, match="is not one of the training labels"):
            found.target(wrong)
    for row in ({"text": "a", "label": ""}, {"text": "a", "label": math.nan}, {"text": None, "label": "b"}):
        (tmp_path / "train.jsonl").write_text(json_lines([row]))
        with pytest.raises(UserError, match="train.jsonl, row 1: needs text in text, and a label in label"):
            read_task("custom", Data(str(tmp_path)), {})
    for labels, message in (([*map(str, range(21)), "n/a"], "give --regression"), (["0,5", "1,5"], "with a point"),
                            (["0.5", "n/a"], "'n/a': is no number"), (["a", "a"], "'a': .* two labels or more")):
        with pytest.raises(UserError, match=message):
            read(labels)
    rows = [{"body": f"a {i}", "stars": i, "id": i} for i in range(30)]
    (tmp_path / "train.jsonl").write_text(json_lines(rows))
    how = Data(str(tmp_path), text_column="body", label_column="stars", regression=True)
    (tmp_path / "dev.parquet").unlink()
    splits = read_task("custom", how, {})
    assert {(row.text, row.label, row.others["id"]) for row in sum(splits.values(), [])} == {
        (f"a {i}", str(i), i) for i in range(30)}
    assert labels_of("custom", splits["train"], True).metrics == ("spearman", "r2")
    with pytest.raises(UserError, match="some rows, or all, lack the column title"):
        read_task("custom", replace(how, text2_column="title"), {})
    (tmp_path / "test.jsonl").write_text(json_lines([{"body": "a", "stars": ["3"]}]))
    with pytest.raises(UserError, match="and a label in stars .none in test"):
        read_task("custom", how, {})
    (tmp_path / "test.jsonl").unlink()
    large = [label_of(tasks.TASKS["custom"], 1.7e9 + 60.5 * i) for i in range(3)]
    assert large == [1.7e9, 1.7e9 + 60.5, 1.7e9 + 121]  # not rounded
    (tmp_path / "train.jsonl").write_text(json_lines([rows[0] | {"prediction": 3}]))
    with pytest.raises(UserError, match="rename its column prediction"):
        read_task("custom", how, {})
    # Cells are texts: 01 is not 1. Without dev, a tenth of train is dev.
    rows = "".join(f'{i},"a, {i}",{"01" if i % 2 else "1"},None\n' for i in range(40))
    splits, labels = read_table("train.csv", f"id,text,label,more\n{rows}40,only one,rare,x\n")
    assert "rare" in labels.names  # so it is not in dev alone
    splits["train"] = [row for row in splits["train"] if row.label != "rare"]
    labels = labels_of("custom", splits["train"])
    assert [len(splits[name]) for name in ("train", "dev")] == [36, 4] and labels.names == ("01", "1")
    found = {example.others["id"]: example for example in sum(splits.values(), [])}
    assert len(found) == 40 and found["7"] == ("a, 7", None, "01", {"id": "7", "more": "None"})
    rows = "".join(f'"a {i}\tb\t{i % 3}{".5" if i == 2 else ""}\n' for i in range(40))
    splits, labels = read_table("train.tsv", f"text\ttext2\tlabel\n{rows}")
    assert splits["train"][0][0][0] == '"' and labels.metrics == ("spearman", "r2")
    read_table("train.csv", "text,text2,label\na,b,x\nc,d,y\n" * 20)
    capsys.readouterr()
    for name, content in (("train_old.csv", "no table"), ("test.csv", "text,text2\n"), ("test.tsv", ""), ("dev", "")):
        (tmp_path / name).write_text(content)
    for message in ("test.csv and test.tsv: keep one", "test.csv: has no rows", "some rows, or all, lack .* text2"):
        with pytest.raises(UserError, match=message):
            read_task("custom", Data(str(tmp_path)), {})
        (tmp_path / "test.tsv").unlink(missing_ok=True)
        if "no rows" in message:
            (tmp_path / "test.csv").write_text("text\na\n")
    assert "train.csv, test.csv; not read: dev, train_old.csv" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no training file of rte, mrpc"):  # but of one task of them
        read_tasks(["rte", "mrpc"], Data(str(write_glue(tmp_path / "glue") / "rte")), {}, ["rte", "mrpc"])


def test_questions_are_trained_only_where_their_answer_stands(tmp_path, capsys):
    def found(*starts, name=str):
        rows = [{"id": name(i), "question": "who?", "context": "the cat sat", "answers": {
            "text": [] if start is None else ["cat"], "answer_start": [] if start is None else [start]}}
            for i, start in enumerate(starts)]
        for split in ("train", "validation"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        splits = read_task("squad2", Data(str(tmp_path)), {})
        assert len(splits["dev"]) == len(starts)  # scores compare texts
        return [question.id for question in splits["train"]]

    with pytest.raises(UserError, match="row 2: its id 0 occurs twice"):
        found(4, 4, name=lambda i: "0")
    capsys.readouterr()
    assert found(4, 4, None) == ["0", "1", "2"] and "left out" not in capsys.readouterr().out
    assert found(4, 13, None, 3) == ["0", "2"] and "2 training questions are left out" in capsys.readouterr().out
