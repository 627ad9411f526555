"""Claims about tasks.py: metrics, and the files of the tasks."""
import itertools
import math
import string
from dataclasses import replace

import numpy as np
import pytest

import data
import tasks
from conftest import catches, run_with_wrong_version, sentence, wrong_versions


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


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
