"""Claims about tasks: their files, their grids and their metrics."""
import itertools
import json

import numpy as np
import pandas
import pytest
import scipy.stats
import sklearn.metrics

from support import heads, metrics, tasks
from support.cli import UserError
from support.documents import in_validation
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


def examples(labels):
    """Twelve first and second texts with their labels."""
    return [(sentence(i), sentence(i + 3), label) for i, label in zip(range(12), itertools.cycle(labels.split()))]


def write_glue(folder):
    """Write twelve rows of all parts of GLUE and SQuAD; returns the folder."""
    for name, (header, row, labels) in FORMATS.items():
        rows = [row.format(i=i, a=a, b=b, label=label) for i, (a, b, label) in enumerate(examples(labels))]
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part in ("train", "dev", "dev_matched", "dev_mismatched"):
            lines = [header, *rows] if header else rows
            (folder / name / f"{part}.tsv").write_text("\n".join(lines), encoding="utf-8")
    write_squad(folder / "train-v2.0.json")
    write_squad(folder / "dev-v2.0.json")
    return folder


def write_squad(path, start=0):
    """Write a SQuAD file: for each of twelve paragraphs a question with an answer and one without."""
    paragraphs = []
    for i in range(12):
        answer = {"text": SUBJECTS[i % 4], "answer_start": start}
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


def squad_score(answer, *true):
    """EM and F1 of an answer to a question with these true answers."""
    question = tasks.Question("1", "?", "", tuple((0, text) for text in true))
    return heads.squad_metrics([question], {"1": answer})


def test_squad_metrics_are_those_of_the_official_evaluation():
    for x, y, f1 in (("cat cat", "the cat", 2 / 3), ("b c", "C, d!", 1 / 2), ("", "an", 1), ("", "dog", 0),
                     ("The theatre's", " theatres", 1), ("an-other", "another", 1), ("5.0\u00a0é", "50  É", 1),
                     ("a’s", "’s", 1), ("cats", "cat's", 1), ("theatre", "atre", 0)):
        assert squad_score(x, y) == squad_score(y, x) == {"exact": 100 * int(f1), "f1": pytest.approx(100 * f1)}
    assert squad_score("dog", "a cat", "dog") == squad_score("") == {"exact": 100, "f1": 100}
    assert squad_score("cat") == {"exact": 0, "f1": 0}


GRIDS = {  # task, width of the encoder -> Tables 5 and 6
    ("cola", 768): ({2, 3, 5, 10}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1}),
    ("cola", 1024): ({2, 3, 5, 10}, {7e-6, 1e-5, 2e-5, 3e-5}, {16, 32}, {0.06, 0.1}),
    ("mnli", 768): ({2, 3, 5}, {1e-5, 2e-5, 3e-5, 4e-5}, {32}, {0.06}),
    ("mnli", 1024): ({2, 3, 5}, {5e-6, 7e-6, 1e-5, 2e-5}, {32}, {0.06}),
    ("squad2", 768): ({2, 3}, {2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {0.06, 0.1}),
    ("squad2", 1024): ({2, 3}, {7e-6, 1e-5, 2e-5, 3e-5}, {16, 32}, {0.06, 0.1})}


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
    splits, remarks = tasks.read_task(name, str(write_glue(tmp_path)), 0.01)
    assert list(splits) == (["train", "dev", "dev_mm"] if name == "mnli" else ["train", "dev"])
    assert all("not comparable with published numbers" in remark for remark in remarks)
    _, _, labels = FORMATS[tasks.TASKS[name].folder]
    for rows in splits.values():
        for found, (a, b, label) in zip(rows, examples(labels), strict=True):
            assert found[:3] == (f'"{a}', None if name in ("cola", "sst2") else b, label)


def test_odd_rows_of_qqp_are_read(tmp_path):
    rows = ['1\t1\t2\tNone\tsay "yes\t1', "2\t1\t2\tcut off", "3\t1\t2\tHow?\t\t0"]
    (tmp_path / "train.tsv").write_text("\n".join([FORMATS["QQP"][0], *rows]))
    found = tasks.read_file("qqp", tmp_path / "train.tsv")
    assert found == [("None", 'say "yes', "1", 1), ("How?", "", "0", 3)]


def test_remarks_tell_what_is_not_official(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "rte", tasks.TASKS["rte"]._replace(official=(12, 12)))
    folder = str(write_glue(tmp_path))
    assert tasks.read_task("rte", folder, 0.01)[1] == []
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    assert tasks.read_task("mnli", folder, 0.01)[1][-1] == "dev_mm is missing: not evaluated"


def test_squad_files_are_read_and_checked(tmp_path):
    write_squad(tmp_path / "dev.json")
    questions = tasks.read_squad(tmp_path / "dev.json")
    assert questions[4] == ("q2", "who is it?", sentence(2), ((0, "my friend"),))
    assert questions[5].answers == ()
    write_squad(tmp_path / "moved.json", start=3)
    with pytest.raises(UserError, match="question q0: answer 'the cat' is not at character 3"):
        tasks.read_squad(tmp_path / "moved.json")


def test_docs_leave_the_validation_part_alone(monkeypatch):
    documents = [(("torch", "numpy", "tqdm")[i % 3], f"{sentence(i)} {i}") for i in range(3000)]
    monkeypatch.setattr(tasks, "read_docs", lambda: documents)
    splits, _ = tasks.read_task("docs", None, 0.3)
    assert len(splits["train"]) == 200 and not set(splits["train"]) & set(splits["dev"])
    for text, _, library, _ in splits["train"] + splits["dev"]:
        assert library != "tqdm" and (library, text) in documents and not in_validation(text, 0.3)


def test_all_formats_of_custom_files_agree(tmp_path):
    columns = "text", "text2", "label"
    frame = pandas.DataFrame([('say "x",\nthen y', "b", "yes"), ("None", "c", "no")], columns=columns)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        found = tasks.read_file("custom", path)
        assert found == [(*row, number) for number, row in enumerate(frame.values)]


@pytest.mark.parametrize("name, file, content, message", [
    ("rte", "a.txt", "one text", "needs sentence1, sentence2; has"), ("custom", "a.csv", "text\n", "empty"),
    ("cola", "a.tsv", "index\tsentence\n0\ta\n1\ta\tb\n", "cannot be read"),
    ("custom", "train.csv", "text,kind\na,b\n", "train.csv, record 1: needs text, label; has"),
    ("custom", "train.csv", "text,label\nb, c,x\n", "more fields than columns"),
    ("custom", "train.csv", "text,label\na,x\nb,\n", "record 2: needs text"),
    ("custom", "train.csv", "text,label,label\na,x,y\n", "two columns `label`"),
    ("rte", "train.tsv", "sentence1\tsentence2\tlabel\n", "train.tsv: empty"),
    ("custom", "train.x", "", r"no train.\* there")])
def test_bad_files_are_refused(name, file, content, message, tmp_path):
    for path in (file, file.replace("train", "dev")):
        (tmp_path / path).write_text(content)
    with pytest.raises(UserError, match=message):
        if file.startswith("a"):
            tasks.read_inputs(name, str(tmp_path / file))
        tasks.read_task(name, str(tmp_path), 0.01)
