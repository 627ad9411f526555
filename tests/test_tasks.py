"""Claims about tasks.py: metrics, and the files of the tasks."""
import csv
import itertools
import json
import math
import re
import string
from dataclasses import replace

import numpy as np
import pytest

import data
import tasks
from conftest import catches, run_with_wrong_version, sentence, write_squad, wrong_versions


# ---- Metrics --------------------------------------------------------------------------------------------------------
@catches("tasks.ranks", "(counts - 1) / 2", "(counts - 1)")
@catches("tasks.matthews", "t = t - t.mean(0)\n    p = p - p.mean(0)", "t = t - 0.5\n    p = p - 0.5")
def test_metrics_equal_scikit_learn_and_scipy():
    import scipy.stats, sklearn.metrics, warnings  # noqa: E401
    random = np.random.default_rng(0)
    for labels, n in itertools.product((1, 2, 3, 10), (2, 3, 7, 1000)):
        for true, guess in ((random.integers(labels, size=n), random.integers(labels, size=n)),
                            (random.integers(labels, size=n), np.zeros(n, int)), (np.ones(n, int), random.integers(labels, size=n)),
                            (np.ones(n, int), np.ones(n, int)), (random.normal(size=n).round(1), random.normal(size=n))):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = scipy.stats.spearmanr(guess, true).statistic
                assert tasks.spearman(guess, true) == pytest.approx(expected, abs=1e-12, nan_ok=True)
                if true.dtype == int:
                    assert tasks.accuracy(guess, true) == pytest.approx(sklearn.metrics.accuracy_score(true, guess), abs=1e-12)
                    assert tasks.matthews(guess, true) == pytest.approx(sklearn.metrics.matthews_corrcoef(true, guess), abs=1e-12)


@catches("tasks.matthews", "math.sqrt((t * t).sum() * (p * p).sum())", "(t * t).sum()")
@catches("tasks.matthews", "(t * p).sum() /", "abs((t * p).sum()) /")
def test_matthews_of_two_labels_is_the_textbook_formula():
    true, guess = np.array([1] * 8 + [0] * 4), np.array([1] * 6 + [0] * 2 + [0] * 3 + [1])  # TP 6, FN 2, TN 3, FP 1
    assert tasks.matthews(guess, true) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5))
    assert tasks.matthews(1 - guess, true) == pytest.approx((2 * 1 - 3 * 6) / math.sqrt(5 * 8 * 4 * 7))


@catches("tasks.matthews", "if np.ptp(true) == 0 or np.ptp(predicted) == 0:", "if False:")
def test_matthews_is_one_for_equal_labels_and_zero_for_a_constant():
    true = np.array([0, 1, 2, 1, 0, 2, 2])
    assert tasks.matthews(true, true) == pytest.approx(1)
    assert [tasks.matthews(np.ones(7, int), true), tasks.matthews(true, np.ones(7, int))] == [0, 0]


@catches("tasks.matthews", "np.eye(len(labels))[index.reshape(2, -1)]", "1.0 * index.reshape(2, -1)")
def test_matthews_does_not_depend_on_the_names_of_the_labels():
    true, guess = np.random.default_rng(0).integers(3, size=(2, 50))
    for names in itertools.permutations((0, 1, 7)):
        renamed = tasks.matthews(np.array(names)[guess], np.array(names)[true])
        assert renamed == pytest.approx(tasks.matthews(true, guess))


@catches("tasks.matthews", "    p = p - p.mean(0)\n", "")
def test_matthews_of_three_labels_is_gorodkins():
    true, guess = np.random.default_rng(1).integers(3, size=(2, 60))
    true[:30] = guess[:30]
    right, t, p = (true == guess).sum(), np.bincount(true), np.bincount(guess)
    scale = math.sqrt((60 ** 2 - t @ t) * (60 ** 2 - p @ p))
    assert tasks.matthews(guess, true) == pytest.approx((60 * right - t @ p) / scale)


def plain_words(text):
    """SQuAD's normal form by scanning characters: an independent reading of the published rules."""
    kept, words, word = [c for c in text.lower() if c not in set(string.punctuation)], [], ""
    for c in [*kept, " "]:
        if c.isalnum() or c == "_":
            word += c
        else:
            words += [word if word not in ("a", "an", "the") else " ", c]
            word = ""
    return "".join(words).split()


def plain_f1(a, b):
    a, b, common = plain_words(a), plain_words(b), 0
    if not a or not b:
        return float(a == b)
    rest = list(b)
    for word in a:
        if word in rest:
            rest.remove(word)
            common += 1
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def adversarial_strings(count=1000):
    pieces = ["a", "an", "the", "The", "A", "AN", "theatre", "an-other", "a.", "the's", "’", "“", "_", "é", "İ", "ẞ", "数", " ", "  ", "\t", "\n",
              "\u00a0", "\u2003", ".", "...", "!", "$", "5", "5.0", "U.S.", "cat", "Cat", "cat's", "-", "—", "", "\u200b", "ﬁ", "½", "a’s"]
    random = np.random.default_rng(1)
    return ["".join(random.choice(pieces, random.integers(0, 7))) for _ in range(count)]


@catches("tasks.normalize", r"\b(a|an|the)\b", r"(a|an|the)\b")
@catches("tasks.token_f1", "Counter(p) & Counter(t)", "Counter(set(p)) & Counter(set(t))")
@catches("tasks.token_f1", "return float(p == t)", "return 0.0")
def test_squad_scores_equal_an_independent_reading_of_the_rules():
    texts = adversarial_strings()
    for a, b in zip(texts, texts[1:] + texts[:1]):
        for x, y in ((a, b), (a, a + " the "), (a + b, b + a)):
            assert tasks.exact_match(x, y) == float(plain_words(x) == plain_words(y)), (x, y)
            assert tasks.token_f1(x, y) == pytest.approx(plain_f1(x, y), abs=1e-12), (x, y)


def random_squad(n, seed):
    random = np.random.default_rng(seed)
    texts = ["the cat", "cat", "a dog", "dog cat", "", "a", "cat cat dog"]
    questions = [tasks.Question(str(i), "?", "", tuple((0, t) for t in random.choice(texts, random.integers(0, 3)))) for i in range(n)]
    return questions, list(random.choice(texts, n)), random.integers(-3, 4, n) + random.choice([0, 0.5], n)


@catches("tasks.squad_metrics", "np.where(null > threshold,", "np.where(null < threshold,")
@catches("tasks.squad_metrics", "np.where(empty, 0.0, -1.0)", "np.zeros(len(empty))")
@catches("tasks.squad_metrics", "null[order[best - 1]]", "null[order[best % len(order)]]")
def test_squad_metrics_equal_every_threshold_tried():
    for n, seed in itertools.product((1, 2, 30), range(20)):
        questions, answers, null = random_squad(n, seed)
        answers = [a if plain_words(a) else "dog" for a in answers] if seed % 2 else answers
        null = null + np.linspace(0, 0.01, n)  # no ties: each threshold is one that can be had
        found = tasks.squad_metrics(questions, answers, null, 0.25)
        for name, score in (("exact", lambda a, b: float(plain_words(a) == plain_words(b))), ("f1", plain_f1)):
            def at(threshold):
                values = []
                for q, a, o in zip(questions, answers, null):
                    true = [t for _, t in q.answers if plain_words(t)] or [""]
                    given = a if o <= threshold else ""
                    values.append(max(score(given, t) for t in true) if o <= threshold else float(not q.answers))
                return 100 * np.mean(values)
            assert found[name] == pytest.approx(at(0.25))
            if all(map(plain_words, answers)):  # the official search knows no right answers to unanswerable questions
                best = found[f"best_{name}"]
                assert best == pytest.approx(max(at(t) for t in (-np.inf, *null)))
                assert best == pytest.approx(at(-np.inf)) or best == pytest.approx(at(found[f"best_{name}_threshold"]))


# ---- Data of tasks --------------------------------------------------------------------------------------------------
def test_the_original_files_are_read_as_they_are(glue):
    labels = {"cola": "01", "sst2": "01", "mrpc": "01", "qqp": "01", "rte": tasks.ENTAILMENT, "qnli": tasks.ENTAILMENT,
              "mnli": ("neutral", "entailment", "contradiction"), "stsb": [f"{i}.000" for i in range(6)]}
    for name in tasks.GLUE:
        parts, remarks = tasks.read_task(name, str(glue), 0.01, 0, 0)
        assert list(parts) == ["train", "dev", "dev_mm"][:2 + (name == "mnli")] and "the official one" in remarks[0]
        for rows in parts.values():
            assert [e.label for e in rows] == [labels[name][i % len(labels[name])] for i in range(12)]
            assert [e.text for e in rows] == [f'"{sentence(i)}' if name == "cola" else sentence(i) for i in range(12)]
            assert [e.text2 for e in rows] == [None if name in ("cola", "sst2") else sentence(i + 3) for i in range(12)]
    parts, _ = tasks.read_task("squad2", str(glue), 0.01, 0, 0)
    assert len(parts["train"]) == 24 and parts["train"][1].answers == () and parts["dev"][4].answers == ((0, "my friend"),)


def test_official_counts_of_rows_are_not_remarked_on(glue, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "rte", replace(tasks.TASKS["rte"], rows=(12, 12)))
    tasks.read_task.cache_clear()
    assert tasks.read_task("rte", str(glue), 0.01, 0, 0)[1] == []
    parts, remarks = tasks.read_task("rte", str(glue), 0.01, 5, 3)
    assert [len(rows) for rows in parts.values()] == [5, 3] and remarks[0] == "train: 5 of 12 rows are used"


@catches("tasks.read_docs_parts", " or in_validation(text, val_share):", ":")
def test_docs_never_touches_the_pre_training_validation_part(monkeypatch):
    documents = [(("torch", "numpy", "tqdm")[i % 3], f"{sentence(i)} {i}") for i in range(6000)]
    monkeypatch.setattr(tasks, "read_docs", lambda progress: iter(documents))
    for share in (0.01, 0.3):
        parts = tasks.read_docs_parts(tasks.TASKS["docs"], share)
        assert [len(rows) for rows in parts.values()] == [200, 300]
        texts = {part: {e.text for e in rows} for part, rows in parts.items()}
        assert not texts["train"] & texts["dev"] and {e.label for e in parts["dev"]} == {"torch", "numpy"}
        assert not any(data.in_validation(t, share) for t in texts["train"] | texts["dev"])
        assert all((t, library) in {(t, lib) for lib, t in documents} for t, _, library in parts["dev"])


# ---- Data that a model would learn without a word, although they are a mistake -----------------------------------------
def write_records(path, records):
    """Write records in the format that the name of the file says."""
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(itertools.chain.from_iterable(records)))
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        import pyarrow, pyarrow.parquet  # noqa: E401
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


def records_with(number=None, **change):
    """Six good records, of which one (or all) is changed; ... takes a field away."""
    records = [{"text": sentence(i), "text2": sentence(i + 1), "label": str(i % 2)} for i in range(6)]
    for record in records if number is None else [records[number - 1]]:
        record |= change
    return [{name: value for name, value in record.items() if value is not ...} for record in records]


NUMBERS = [record | {"label": str(i / 4)} for i, record in enumerate(records_with())]
MISTAKES = {
    "one label": (records_with(label="yes"), "all 6 records have the label 'yes'"),
    "one number": (records_with(label="0.5"), "all 6 records have the label '0.5'"),
    "empty labels": (records_with(label=""), "record 1: `label` is empty"),
    "an empty label": (records_with(4, label=" "), "record 4: `label` is empty"),
    "an empty text": (records_with(4, text=""), "record 4: `text` is empty"),
    "nan": ([*NUMBERS, NUMBERS[0] | {"label": "nan"}], "record 7: label 'nan' among numbers"),
    "infinity": ([*NUMBERS, NUMBERS[0] | {"label": "-Infinity"}], "record 7: label '-Infinity' among numbers"),
    "beyond floats": ([*NUMBERS, NUMBERS[0] | {"label": "1e999"}], "record 7: label '1e999' among numbers"),
    "nan among classes": (records_with(3, label="nan"), "record 3: label 'nan' among numbers"),
}
JSON_MISTAKES = {
    "a list as text": (records_with(2, text=["a", "b"]), "record 2: `text` is of type list"),
    "a number as text": (records_with(2, text=5), "record 2: `text` is of type int"),
    "a list as second text": (records_with(2, text2=["a"]), "record 2: `text2` is of type list"),
    "an object as label": (records_with(2, label={"a": 1}), "record 2: `label` is of type dict"),
    "a null label": (records_with(5, label=None), "record 5: `label` is null"),
    "no label": (records_with(5, label=...), "record 5: `label` is missing; found: text, text2"),
    "a second text is missing": (records_with(5, text2=...), "record 5: `text2` is in some records alone, this record has none"),
    "the first second text is missing": (records_with(1, text2=None), "record 2: `text2` is in some records alone, record 1 has none"),
    "a float that is none": ([*NUMBERS, NUMBERS[0] | {"label": float("nan")}], "record 7: label 'nan' among numbers"),
}
CASES = [(name, suffix) for suffix in (".csv", ".jsonl", ".parquet") for name in MISTAKES]
CASES += [(name, ".jsonl") for name in JSON_MISTAKES]


def refused(read, path):
    """What the UserError of reading a file says; it names the file."""
    with pytest.raises(data.UserError) as error:
        read(path)
    assert str(path) in str(error.value) or path.parent.name in str(error.value), error.value
    return str(error.value)


def read_custom(path):
    return tasks.read_part("custom", str(path.parent), 0)


@pytest.mark.parametrize("name, suffix", CASES)
@catches("tasks.check_custom", "if len(numbers) == 1:", "if False:", name="one label", suffix=".csv")
@catches("tasks.check_custom", "if not getattr(example, name):", "if False:", name="an empty text", suffix=".jsonl")
@catches("tasks.check_custom", "math.isfinite(value)", "value == value", name="infinity", suffix=".csv")
@catches("tasks.check_custom", "if (example.text2 is None) != (examples[0].text2 is None):", "if False:",
         name="a second text is missing", suffix=".jsonl")
@catches("tasks.value_of", "if not isinstance(value, kinds):", "if False:", name="an object as label", suffix=".jsonl")
def test_a_mistake_in_ones_own_data_is_named_with_its_record(name, suffix, tmp_path):
    records, message = {**MISTAKES, **JSON_MISTAKES}[name]
    write_records(tmp_path / f"train{suffix}", records)
    assert message in refused(read_custom, tmp_path / f"train{suffix}")


@catches("tasks.examples_of", "if None in record:", "if False:")
def test_a_comma_that_moves_columns_is_named(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na cat,x\na cat, a dog,y\n")
    assert "record 2: has more values than columns" in refused(read_custom, tmp_path / "train.csv")


def test_what_is_no_mistake_is_read_as_it_is(tmp_path):
    words = [record | {"label": label} for record, label in zip(records_with(), ("nan", "inf", "cdo", "yue", "1", "2"))]
    for records in (records_with(), records_with(text2=None), records_with(text2=...), records_with(2, text2=""), NUMBERS,
                    words, [record | {"label": i % 2 == 0} for i, record in enumerate(records_with())]):
        write_records(tmp_path / "train.jsonl", records)
        found = read_custom(tmp_path / "train.jsonl")
        assert [e.label for e in found] == [str(record["label"]) for record in records]
        assert [e.text2 for e in found] == [record.get("text2") for record in records]


@catches("tasks.value_of", 'value.encode(errors="replace").decode() if isinstance(value, str) else value', "value")
def test_half_a_surrogate_pair_is_replaced_by_one_character(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(
        json.dumps({"text": "a \ud83d cat", "label": label}) + "\n" for label in "xy"))
    assert [e.text for e in read_custom(tmp_path / "train.jsonl")] == ["a ? cat"] * 2
    path = tmp_path / "train-v2.0.json"
    answer = [{"text": "\udc00 cat", "answer_start": 5}]
    qas = [{"id": "1", "question": "w\ud83dho?", "is_impossible": False, "answers": answer}]
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "It's \udc00 cat", "qas": qas}]}]}))
    question, = tasks.read_squad(path)
    tasks.check_answers([question], "here")
    assert question == ("1", "w?ho?", "It's ? cat", ((5, "? cat"),))


def change_of(part, name, value):
    """A change of write_squad's: in the second question, or in its answer, a field has another value; ... none."""
    def change(qas):
        record = qas[0] if part == "question" else qas[0]["answers"][0]
        record[name] = value
        if value is ...:
            del record[name]
        return qas
    return change


@pytest.mark.parametrize("part, name, value, message", [
    ("question", "question", None, "`question` is null"), ("question", "id", 7, "`id` is of type int"),
    ("question", "answers", None, "`answers` is null"), ("question", "answers", ..., "`answers` is missing"),
    ("question", "answers", ["a"], "not an object with named fields, but a"), ("question", "id", "same", "two questions have the id same"),
    ("answer", "text", None, "`text` is null"), ("answer", "answer_start", "3", "`answer_start` is of type str"),
    ("answer", "answer_start", ..., "`answer_start` is missing"), ("answer", "answer_start", -999, "is not in its context")])
def test_fields_of_squad_that_are_null_or_of_another_type_are_named(part, name, value, message, tmp_path):
    path = tmp_path / "train-v2.0.json"
    write_squad(path, change=change_of(part, name, value))
    assert message in refused(lambda path: tasks.read_task("squad2", str(path.parent), 0.01, 0, 0), path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "{}", '{"data": null}', '{"data": [1]}', '{"data": [{"paragraphs": [{"qas": []}]}]}'])
def test_a_file_that_is_not_squads_is_named(text, tmp_path):
    path = tmp_path / "dev-v2.0.json"
    path.write_text(text)
    refused(tasks.read_squad, path)


@catches("tasks.locate", "if len(found) > 1:", "if False:")
def test_two_files_for_one_part_are_not_chosen_from(tmp_path):
    for name in ("train.csv", "train.jsonl"):
        write_records(tmp_path / name, records_with())
    assert re.search("holds train.csv and train.jsonl", refused(read_custom, tmp_path / "train.csv"))


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
