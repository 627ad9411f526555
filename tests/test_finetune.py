"""Claims about finetune.py: answers and windows, batches, runs."""
import csv
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import files
import finetune
import maelm
import rank
import run as run_module
import tasks
from conftest import (HERE, OBJECTS, VERBS, catches, fails, generator, one_place, run_with_wrong_version, sentence,
                      write_glue, write_squad, wrong_versions)


# ---- Answers and windows --------------------------------------------------------------------------------------------
@pytest.fixture
def pretrained(finished):
    """The encoder of the finished run, as fine-tuning sees it."""
    return finetune.load_pretrained(str(finished[0]), dropout=0.1)


UNICODE = "İstanbul'da  ÇOK Straße, \"naïve\" café—数学🙂 ΣΑΣα [MASK]\tend.\u00a0x"


@catches("finetune.Pretrained.spans", "[c.lower() for c in text] if self.tokenizer.uncased else text", "text")
def test_tokens_know_their_characters_even_where_lower_case_is_longer(pretrained):
    tokenizer = pretrained.tokenizer
    for text in (UNICODE, UNICODE * 3, "İİİ a", "", "  ", "plain"):
        ids, starts, ends = pretrained.spans(text)
        assert ids.tolist() == tokenizer.encode(text).tolist() and maelm.MASK not in ids
        assert (starts <= ends).all() and (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()
        for i, start, end in zip(ids, starts, ends):
            piece = tokenizer.tiktoken.decode_single_token_bytes(int(i))
            assert piece.strip() in text[start:end].lower().encode() or not text[start:end]
        covered = {c for start, end in zip(starts, ends) for c in range(start, end)}
        assert covered >= {c for c in range(len(text)) if not text[c].isspace()}


@catches("finetune.without_space", "np.minimum(starts + space[starts], ends)", "starts")
@catches("tasks.answer_tokens", 'np.searchsorted(ends, a, side="right")', "np.searchsorted(ends, a)")
def test_every_answer_of_whole_tokens_is_recovered_exactly(pretrained):
    for context in (UNICODE, "The cat sees a tree today, number 12. " + UNICODE):
        _, starts, ends = pretrained.spans(context)
        for start, end in itertools.combinations(range(len(context) + 1), 2):
            answer = context[start:end]
            if not answer.strip():
                continue
            first, last, exact = tasks.answer_tokens(tasks.Question("1", "", context, ((start, answer),)), starts, ends)
            got = context[starts[first]:ends[last]]
            assert answer.strip() in got and exact == (got == answer.strip())
            if start in starts and end in ends and not answer[0].isspace() and not answer[-1].isspace():
                assert exact, answer
        for word in re.finditer(r"[^\W\d_]+", context):
            question = tasks.Question("1", "", context, ((word.start(), word[0]),))
            assert tasks.answer_tokens(question, starts, ends)[2], word[0]


@catches("tasks.cut_at_answer", "last, len(q.context))", "len(q.context))")
@catches("finetune.Spans.encode", "if training and q.answers", "if q.answers")
def test_in_training_every_answer_is_recovered_exactly_and_elsewhere_none_changes_the_tokens(pretrained):
    context = "The cat sees a tree today, number 12. " + UNICODE
    plain = pretrained.spans(context)[0].tolist()
    cut = 0
    for start, end in itertools.combinations(range(len(context) + 1), 2):
        answer = context[start:end].strip()
        if not answer:
            continue
        q = tasks.Question("1", "", context, ((start, context[start:end]),))
        ids, starts, ends = tasks.cut_at_answer(pretrained.spans, q)
        first, last, exact = tasks.answer_tokens(q, starts, ends)
        assert exact and context[starts[first]:ends[last]] == answer
        cut += len(ids) > len(plain)
    assert cut
    inside = [tasks.Question("1", "who?", "a cat.", ((3, "a"),))]  # "a" of "cat"
    kind, encoded = squad_task(pretrained, inside, training=True)
    row, (first, last, passage) = encoded.ids[0], encoded.targets[0].tolist()
    assert pretrained.spans("a")[0].tolist() == row[first:last + 1].tolist() and "1 answers begin or end" in encoded.remarks[-1]
    natural = squad_task(pretrained, inside)[1].ids[0]
    assert natural[passage:-1].tolist() == pretrained.encode("a cat.").tolist() != row[passage:-1].tolist()


def squad_task(pretrained, questions, training=False, **fields):
    tune = finetune.TuneConfig(**{"max_query": 6, "doc_stride": 5, "seq_len": 24, "n_best": 4, "max_answer": 5} | fields)
    kind = finetune.Spans("squad2", questions, pretrained, tune)
    return kind, kind.encode(questions, training)


@catches("finetune.Spans.encode", "max(0, len(context) - room) + stride, stride)",
         "max(1, len(context) - room), stride)")
@catches("finetune.Spans.encode", "last < offset + room", "last <= offset + room")
def test_windows_cover_the_context_and_their_targets_are_the_answer(pretrained):
    context = " ".join(sentence(i) for i in (0, 1, 18, 3))
    questions = [tasks.Question(m[0], f"where is {m[0]}, and why is the question so long?", context, ((m.start(), m[0]),))
                 for m in re.finditer(r"\w+", context)]
    questions.append(tasks.Question("none", "what?", context, ()))
    kind, encoded = squad_task(pretrained, questions)
    _, starts, ends = kind.contexts[context]
    for number, q in enumerate(questions):
        mine = [i for i, (n, _) in enumerate(encoded.windows) if n == number]
        covered, found = set(), 0
        for i in mine:
            row, (a, b, first), offset = encoded.ids[i], encoded.targets[i].tolist(), encoded.windows[i][1]
            assert len(row) <= 24 and row[0] == maelm.CLS and row[-1] == maelm.SEP and row[first - 1] == maelm.SEP
            assert row[first:-1].tolist() == kind.contexts[context][0][offset:offset + len(row) - 1 - first].tolist()
            covered |= set(range(offset, offset + len(row) - 1 - first))
            if a:
                found += 1
                assert first <= a <= b < len(row) - 1
                assert context[starts[a - first + offset]:ends[b - first + offset]] == q.answers[0][1]
        assert covered == set(range(len(starts))) and bool(found) == bool(q.answers)
    assert f"{len(questions) - 1} questions are cut off" in encoded.remarks


@catches("finetune.Spans.masked", "(position >= targets[:, 2:])", "(position >= 1)")
@catches("finetune.Spans.decode", "unfold(1, longest, 1)", "unfold(1, longest, 1).flip(2)")
def test_the_best_spans_are_those_of_a_search_over_all(pretrained):
    questions = [tasks.Question("1", "who?", sentence(0) + " " + sentence(5), ())]
    kind, encoded = squad_task(pretrained, questions)
    tokens, padding, targets = finetune.collate(encoded, np.arange(len(encoded.ids)), maelm.PAD, torch.device("cpu"))
    logits = torch.randn(*tokens.shape, 2, generator=generator(0)) * 3
    out = kind.decode(logits, targets, padding)
    for row, ids, (_, _, first), x in zip(out, encoded.ids, targets.tolist(), logits):
        allowed = range(first, len(ids) - 1)
        spans = sorted(((float(x[a, 0] + x[b, 1]), a, b) for a in allowed for b in allowed if a <= b < a + 5), reverse=True)[:4]
        assert row[0] == x[0].sum() and row[1:5].tolist() == pytest.approx([s[0] for s in spans])
        assert list(zip(row[5:9].tolist(), row[9:].tolist())) == [s[1:] for s in spans]


@catches("finetune.Spans.score", "int(first) - passage + offset", "int(first) - passage")
@catches("finetune.Spans.score", "odds.append(none - score)", "odds.append(score - none)")
def test_a_perfect_model_gets_100_percent(pretrained):
    context = " ".join(sentence(i) for i in range(4))
    questions = [tasks.Question(w, "who?", context, ((context.index(w), w),)) for w in ("cat", "dog", "friend")]
    questions.append(tasks.Question("none", "what?", context, ()))
    kind, encoded = squad_task(pretrained, questions)
    tokens, padding, targets = finetune.collate(encoded, np.arange(len(encoded.ids)), maelm.PAD, torch.device("cpu"))
    logits = 10.0 * F.one_hot(targets[:, :2], tokens.shape[1]).transpose(1, 2)
    metrics, files = kind.score(kind.decode(logits, targets, padding).numpy(), encoded)
    assert metrics["exact"] == metrics["f1"] == metrics["best_f1"] == 100
    assert files["predictions.json"] == {"cat": "cat", "dog": "dog", "friend": "friend", "none": ""}
    assert kind.loss(logits, targets, padding) < 0.1
    assert all(len(texts) <= 4 and texts == sorted(texts, key=lambda t: -t["score"]) for texts in files["nbest.json"].values())


# ---- Inputs and batches ---------------------------------------------------------------------------------------------
def encode_sentences(pretrained, examples, name="rte", **fields):
    kind = finetune.Sentences(name, examples, pretrained, finetune.TuneConfig(**fields))
    return kind, kind.encode(examples)


def some_pairs(count=40):
    return [tasks.Example(sentence(i) * (1 + i % 3), sentence(i + 1) if i % 5 else "", tasks.ENTAILMENT[i % 2]) for i in range(count)]


@catches("finetune.Sentences.encode", "max(room // 2, room - len(a))", "room // 2")
def test_inputs_are_cls_a_sep_b_sep_and_the_longer_text_is_cut(pretrained):
    a, b = "the cat", "a dog sees a tree today, number 3, at last, number 4, my friend"
    A, B = (pretrained.encode(x).tolist() for x in (a, b))
    _, one = encode_sentences(pretrained, [tasks.Example(a, None, "entailment")])
    _, two = encode_sentences(pretrained, [tasks.Example(a, b, "entailment"), tasks.Example(b, a, "entailment"), tasks.Example(b, b, "entailment")])
    assert one.ids[0].tolist() == [maelm.CLS, *A, maelm.SEP] and not one.remarks
    room = 24 - 3
    assert two.ids[0].tolist() == [maelm.CLS, *A, maelm.SEP, *B[:room - len(A)], maelm.SEP]
    assert two.ids[1].tolist() == [maelm.CLS, *B[:room - len(A)], maelm.SEP, *A, maelm.SEP]
    assert two.ids[2].tolist() == [maelm.CLS, *B[:room - room // 2], maelm.SEP, *B[:room // 2], maelm.SEP]
    assert two.remarks == ["3 of 3 inputs are cut off at 24 tokens"]


@catches("finetune.Tuned.forward", "positions, padding)", "positions, None)")
def test_padded_and_unpadded_batches_give_the_same_logits(pretrained):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0), kind.head()).eval()
    tokens, padding, _ = finetune.collate(encoded, np.arange(40), maelm.PAD, torch.device("cpu"))
    assert padding.any()
    together, _ = model(tokens, padding)
    for i in range(40):
        alone, _ = model(*finetune.collate(encoded, np.array([i]), maelm.PAD, torch.device("cpu"))[:2])
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=0)


def job_of(pretrained, kind, encoded, **fields):
    return finetune.Job("rte", pretrained, kind, {"train": encoded, "dev": encoded}, finetune.TuneConfig(**{"learning_rate": 1e-3} | fields),
                        one_place(), Path("unused"), [], {})


@catches("finetune.predict", "numpy()[np.argsort(order)]", "numpy()")
@catches("finetune.predict", "moments.add(h[~padding].float())", "moments.add(h.flatten(0, 1).float())")
def test_evaluation_is_in_the_order_of_the_examples(pretrained):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0), kind.head()).eval()
    kind.decode = lambda logits, targets, padding: targets[:, None]
    outputs, moments = finetune.predict(model, encoded, job_of(pretrained, kind, encoded), batch_size=7)
    assert outputs[:, 0].tolist() == encoded.targets.tolist() and moments.count == sum(map(len, encoded.ids))


@catches("finetune.batches", "rows_of_step(seed, step, batch_size", "rows_of_step(seed, first, batch_size")
@catches("finetune.batches", 'drawn[np.argsort(length[drawn], kind="stable")]', "drawn")
def test_every_epoch_is_a_permutation_in_batches_of_like_length():
    lengths = np.random.default_rng(0).integers(2, 60, 330)
    encoded = finetune.Encoded([np.zeros(n, np.int64) for n in lengths], None, [], [], [])
    drawn = list(finetune.batches(encoded, 1, 66, 10))
    assert len(drawn) == 66 and all(len(batch) == 10 for batch in drawn)
    assert sorted(np.concatenate(drawn)) == sorted([*range(330)] * 2)
    assert np.mean([np.ptp(lengths[batch]) for batch in drawn]) < 12
    assert [b.tolist() for b in finetune.batches(encoded, 1, 66, 10)] == [b.tolist() for b in drawn]
    assert [b.tolist() for b in finetune.batches(encoded, 2, 66, 10)] != [b.tolist() for b in drawn]
    means = [lengths[batch].mean() for batch in drawn[:16]]
    assert means != sorted(means)  # short ones do not come first


@catches("finetune.train", "        model.train()  # an evaluation switches dropout off\n", "")
def test_dropout_is_on_in_training_and_off_in_evaluation(pretrained, finished):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0).eval(), kind.head())
    job = job_of(pretrained, kind, encoded)
    seen = []
    model.head[0].register_forward_hook(lambda module, *_: seen.append(module.training and model.encoder.training))
    for _ in finetune.train(model, job, finetune.TuneConfig(epochs=2.0, learning_rate=1e-3), 1):
        model.eval()  # as an evaluation leaves it
    assert len(seen) == 3 and all(seen) and model.head[0].p == 0.1
    tokens, padding, _ = finetune.collate(encoded, np.arange(8), maelm.PAD, torch.device("cpu"))
    for rate in (0.0, 0.1):  # the pre-training rate is replaced by that of fine-tuning
        encoder = finetune.load_pretrained(str(finished[0]), rate).fresh(0).train()
        assert torch.equal(*(encoder(tokens, torch.arange(tokens.shape[1])[None], padding) for _ in range(2))) == (rate == 0)
    seen.clear()
    finetune.predict(model, encoded, job)
    assert seen and not any(seen)


def test_effective_ranks_are_those_of_the_hidden_states(pretrained):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0), kind.head())
    _, moments = finetune.predict(model, encoded, job_of(pretrained, kind, encoded), batch_size=8)
    with torch.no_grad():
        h = torch.cat([model.encoder(torch.from_numpy(ids)[None], torch.arange(len(ids))[None])[0] for ids in encoded.ids])
    assert finetune.effective_ranks(moments) == {"uncentered": rank.effective_rank(h), "centered": rank.effective_rank(h - h.mean(0))}


@catches("tasks.grid", "if dim >= 1024", "if dim > 1024")
def test_the_grids_are_tables_5_and_6():
    for group, size, epochs, rates, sizes, warmup in (
            ("small", 768, (2, 3, 5, 10), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.1)),
            ("small", 1024, (2, 3, 5, 10), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.1)),
            ("large", 768, (2, 3, 5), (1e-5, 2e-5, 3e-5, 4e-5), (32,), (0.06,)),
            ("large", 1024, (2, 3, 5), (5e-6, 7e-6, 1e-5, 2e-5), (32,), (0.06,)),
            ("squad", 768, (2, 3), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.1)),
            ("squad", 1024, (2, 3), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.1))):
        found = {tuple(setting.values()) for setting in tasks.grid(group, size, {})}
        assert found == set(itertools.product(epochs, rates, sizes, warmup))
    assert {s["epochs"] for s in tasks.grid("small", 128, {"epochs": 7.0})} == {7.0}
    groups = {name: tasks.TASKS[name].group for name in (*tasks.GLUE, "squad2")}
    assert [n for n, g in groups.items() if g == "small"] == ["cola", "rte", "mrpc", "stsb"]
    assert [n for n, g in groups.items() if g == "large"] == ["mnli", "qqp", "qnli", "sst2"]
    tune = finetune.TuneConfig()
    assert (tune.seq_len, tune.adam_epsilon, tune.adam_beta1, tune.adam_beta2, tune.dropout, tune.weight_decay) == (
        512, 1e-6, 0.9, 0.98, 0.1, 0.01)


# ---- Runs -----------------------------------------------------------------------------------------------------------
FAST = ["--epochs", "1", "--seeds", "2", "--batch-size", "4", "--precision", "fp32"]


def tune(finished, task, source, out, *flags):
    """Run finetune.py; returns result.json."""
    finetune.main(["--init", str(finished[0]), "--task", task, "--data", str(source), "--out", str(out), *FAST, *flags])
    return files.read_json(out / "result.json")


def test_glue_is_eight_tasks_and_their_average(finished, glue, tmp_path):
    result = tune(finished, "glue", glue, tmp_path / "glue", "--seeds", "1")
    assert list(result["medians"]) == list(tasks.GLUE)
    assert result["average"] is None or result["average"] == pytest.approx(np.mean(list(result["medians"].values())))
    metrics = {name: files.read_json(tmp_path / "glue" / f"{name}-run" / "result.json")["metrics"] for name in tasks.GLUE}
    assert set(metrics["mnli"]) == {"accuracy", "accuracy_mm"}
    assert list(result["row"]) == ["mnli-m", "mnli-mm", *tasks.GLUE[1:], "average"]
    assert result["row"]["mnli-mm"] == metrics["mnli"]["accuracy_mm"]
    assert {name: next(iter(m), "spearman") for name, m in metrics.items()} == {name: tasks.TASKS[name].metric for name in tasks.GLUE}


def test_squad_writes_what_the_official_evaluation_reads(finished, glue, tmp_path):
    result = tune(finished, "squad2", glue, tmp_path / "run", "--max-query", "8")
    assert result["metric"] == "f1" and {"exact", "f1", "best_exact", "best_f1", "best_f1_threshold"} <= set(result["metrics"])
    predictions, odds = (json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("predictions", "null_odds"))
    ids = {f"{kind}{i}" for kind in "qn" for i in range(12)}
    assert set(predictions) == set(odds) == ids
    assert all((odds[i] > 0) == (predictions[i] == "") for i in ids)


def test_the_fine_tuned_encoder_can_be_started_from_and_measured(finished, glue, tmp_path):
    result = tune(finished, "rte", glue, tmp_path / "run", "--learning-rate", "1e-3")
    before = finetune.load_pretrained(str(finished[0]), 0.0).fresh(0).state_dict()
    after = finetune.load_pretrained(str(tmp_path / "run"), 0.0).fresh(0).state_dict()
    assert before.keys() == after.keys() and not any("decoder" in name or "head" in name for name in after)
    assert not torch.equal(before["blocks.0.ffn.f.0.weight"], after["blocks.0.ffn.f.0.weight"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert maelm.Config(**config["model"]) == maelm.Config(**finished[1]["config"])
    shares = [finetune.load_pretrained(str(folder), 0.0).val_share for folder in (finished[0], tmp_path / "run")]
    assert shares == [0.1, 0.1]  # of the prepared corpus, not the default of train.py
    ranks = result["effective_rank"]
    assert set(ranks["before"]) == {"uncentered", "centered"} and len(ranks["after"]) == 2 and ranks["d"] == 32
    assert run_module.load_encoder(tmp_path / "run")[0].state_dict().keys() == after.keys()


def test_one_seed_gives_one_result_and_random_weights_are_others(finished, glue, tmp_path):
    first, again = (tune(finished, "stsb", glue, tmp_path / name, "--learning-rate", "1e-3") for name in "ab")
    assert first == again and first["values"][0] != first["values"][1]
    lines = [finetune.read_runs(tmp_path / name) for name in "ab"]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert torch.equal(*(torch.load(tmp_path / n / "encoder.pt")["encoder"]["token_embedding.weight"] for n in "ab"))
    fresh = [finetune.load_pretrained(name, 0.1).fresh for name in (str(finished[0]), f"random:{finished[0]}")]
    weights = [[f(seed).state_dict()["token_embedding.weight"] for seed in (1, 2)] for f in fresh]
    assert torch.equal(*weights[0]) and not torch.equal(*weights[1]) and not torch.equal(weights[0][0], weights[1][0])


# ---- The checkpoint that counts, and the folder ----------------------------------------------------------------------
@catches("finetune.train", "max(0.5, tune.epochs / EVALUATIONS)", "0.5")
@catches("finetune.train", "max(0.5, ", "max(1.0, ")
@catches("finetune.ends_interval", "return step * batch_size // interval", "return step * batch_size / interval - 1")
@catches("finetune.train", "step + 1 == steps or", "")
def test_the_dev_part_is_evaluated_each_half_epoch_at_most_20_times_and_after_the_last_step(pretrained):
    kind, _ = encode_sentences(pretrained, some_pairs())
    for examples, batch_size, epochs in itertools.product((1, 12, 33, 40), (1, 4, 7, 50), (0.1, 0.5, 1.0, 1.7, 3.0, 30.0)):
        encoded = kind.encode(some_pairs(examples))
        model = finetune.Tuned(torch.nn.Identity(), kind.head())
        model.forward = lambda tokens, padding, head=model.head: (head(torch.zeros(*tokens.shape, 32)), None)
        tune = finetune.TuneConfig(epochs=epochs, batch_size=batch_size, learning_rate=1e-3)
        ends = [step for step, _ in finetune.train(model, job_of(pretrained, kind, encoded), tune, 1)]
        steps = -(-round(epochs * examples * 10) // (10 * batch_size))
        halves = 3 if epochs == 30 else 1  # 20 times 3 half epochs
        due = [-(-half * examples // (2 * batch_size)) for half in range(halves, int(2 * epochs) + 1, halves)]
        due = [step for step in due if step < steps]  # each at the first step that has all of it
        assert ends == [*dict.fromkeys(due), steps], (examples, batch_size, epochs)


def scripted(monkeypatch, values):
    """Let evaluations on the dev part find these values in turn; returns the weights that each of them saw."""
    seen = []

    def validate(model, job, step):
        seen.append({name: tensor.clone() for name, tensor in model.encoder.state_dict().items()})
        value = values[len(seen) - 1]
        return finetune.Validation(step, value, {"accuracy": value}, {}, finetune.predict(model, job.parts["dev"], job)[1])

    monkeypatch.setattr(finetune, "validate", validate)
    return seen


@pytest.mark.parametrize("keep, value, chosen", [("best", 70, 1), ("last", 60, 3)])
@catches("finetune.run_once", "last.value > best.value", "last.value >= best.value", keep="best", value=70, chosen=1)
@catches("finetune.run_once", 'tensor.to("cpu", copy=True)', "tensor", keep="best", value=70, chosen=1)
@catches("finetune.run_once", "best if job.tune.keep == \"best\" else last", "last", keep="best", value=70, chosen=1)
@catches("finetune.run_once", "model.load_state_dict(weights)", "pass", keep="best", value=70, chosen=1)
@catches("finetune.run_once", "best if job.tune.keep == \"best\" else last", "best", keep="last", value=60, chosen=3)
def test_the_first_of_the_best_checkpoints_counts_or_the_last(keep, value, chosen, pretrained, tmp_path, monkeypatch):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    job = job_of(pretrained, kind, encoded, keep=keep)._replace(out=tmp_path)
    seen = scripted(monkeypatch, [50.0, 70.0, 70.0, 60.0])
    run = SETTING | {"epochs": 2.0, "seed": 1}
    line = finetune.run_once(job, run)
    assert (line["value"], line["best"], line["last"]) == (value, 70, 60) and len(seen) == 4
    assert (line["step"], line["steps"]) == ((10, 20) if keep == "best" else (20, 20))
    weights = run_module.read_tensors(finetune.kept_folder(tmp_path, run) / "encoder.pt")["encoder"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in seen[chosen].items())
    assert not torch.equal(seen[1]["norm.weight"], seen[3]["norm.weight"])


def test_a_result_has_the_best_and_the_last_of_every_seed(finished, glue, tmp_path, capsys):
    found = {keep: tune(finished, "stsb", glue, tmp_path / keep, "--learning-rate", "1e-2", "--epochs", "4", "--keep", keep)
             for keep in ("best", "last")}
    printed = capsys.readouterr().out
    for keep, result in found.items():
        assert result["keep"] == keep and result["values"] == result[keep]["values"] and result["median"] == result[keep]["median"]
        assert all(best >= last for best, last in zip(result["best"]["values"], result["last"]["values"]))
        assert f"kept: the {keep} checkpoint of each run" in printed
    assert found["best"]["best"] == found["last"]["best"] and found["best"]["last"] == found["last"]["last"]
    assert found["best"]["values"] != found["last"]["values"]


@catches("finetune.seeds_of", "len(values) - diverged} of", "len(values)} of")
@catches("finetune.median", "[value for value in values if value is not None]", "[value or 0 for value in values]")
def test_a_median_says_of_how_many_seeds_it_is():
    ranks = {"uncentered": 3, "centered": 4}
    values = [50.0, None, 70.0, 60.0, 65.0]
    both = {"median": finetune.median(values), "values": values}
    result = {"task": "rte", "metric": "accuracy", "keep": "best", "best": both, "last": both, "values": values,
              "metrics": {"accuracy": finetune.median(values)}, "effective_rank": {"before": ranks, "after": [ranks, None], "d": 8}}
    first = finetune.report(result).splitlines()[0]
    assert first == "rte  accuracy 62.50  (median of 4 of 5 seeds; 1 diverged; accuracy 50.00 ... 70.00)"
    assert finetune.seeds_of([1.0, 2.0]) == "2 seeds" and finetune.median([None, None]) is None


@catches("finetune.ranks_before", "if not key.items() <= found.items():", "if True:")
@catches("finetune.ranks_before", "write_json(path, found)", "pass")
def test_ranks_before_fine_tuning_are_measured_once(finished, glue, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(finetune, "predict", lambda *a, true=finetune.predict: measured.append(1) or true(*a))
    first = tune(finished, "rte", glue, tmp_path / "run")
    assert len(measured) == 1 + 2 * 2  # and twice for each of two seeds
    again = tune(finished, "rte", glue, tmp_path / "run", "--seeds", "3")
    assert len(measured) == 1 + 3 * 2 and again["effective_rank"]["before"] == first["effective_rank"]["before"]


def encoder_of(folder):
    """A tensor of the fine-tuned encoder in a folder."""
    return run_module.read_tensors(folder / "encoder.pt")["encoder"]["blocks.0.ffn.f.0.weight"]


@catches("finetune.publish", "link_or_copy(kept_folder(job.out, run) / name, temporary)",
         "link_or_copy(max(job.out.glob(f'.kept/*/{name}'), key=lambda path: path.stat().st_mtime_ns), temporary)")
def test_an_encoder_belongs_to_the_result_beside_it(finished, glue, tmp_path):
    out, rate = tmp_path / "run", ["--learning-rate", "1e-3", "--seeds", "1"]
    found = {}
    for epochs in ("1", "3", "1"):
        result = tune(finished, "rte", glue, out, *rate, "--epochs", epochs)
        assert result["setting"]["epochs"] == float(epochs)
        assert torch.equal(encoder_of(out), found.setdefault(epochs, encoder_of(out)))
    assert not torch.equal(found["1"], found["3"]) and len(finetune.read_runs(out)) == 2


@catches("finetune.is_done", 'and (run["seed"] != 1 or are_kept(out, run))', "")
@catches("finetune.are_kept", "file_hash(folder / name) == value", "(folder / name).is_file()")
def test_an_encoder_that_is_lost_or_damaged_comes_back(finished, glue, tmp_path):
    out, rate = tmp_path / "run", ["--learning-rate", "1e-3"]
    first = tune(finished, "rte", glue, out, *rate)
    weights = encoder_of(out)
    kept, = out.glob(".kept/*/encoder.pt")

    def flip():
        content = bytearray(kept.read_bytes())
        content[len(content) // 2] ^= 4
        kept.write_bytes(content)

    for harm in ((out / "encoder.pt").unlink, flip, lambda: (kept.unlink(), (out / "encoder.pt").unlink())):
        harm()
        assert tune(finished, "rte", glue, out, *rate) == first
        assert torch.equal(encoder_of(out), weights) and len(finetune.read_runs(out)) == 2


@catches("finetune.publish", '        (job.out / "result.json").unlink(missing_ok=True)\n', "")
def test_a_result_never_stands_beside_the_encoder_of_another_setting(finished, glue, tmp_path, monkeypatch):
    out, rate = tmp_path / "run", ["--learning-rate", "1e-3", "--seeds", "1"]
    tune(finished, "rte", glue, out, *rate, "--epochs", "3")
    monkeypatch.setattr(finetune, "link_or_copy", lambda *a, true=finetune.link_or_copy: true(*a) or sys.exit("killed"))
    with pytest.raises(SystemExit):
        tune(finished, "rte", glue, out, *rate, "--epochs", "1")
    assert not (out / "result.json").exists()


@catches("finetune.ranks_before", "if not moments.gram.isfinite().all():", "if False:")
def test_an_encoder_with_nan_is_refused_before_the_first_run(finished, glue, tmp_path, capsys):
    tune(finished, "rte", glue, tmp_path / "run", "--seeds", "1")
    state = run_module.read_tensors(tmp_path / "run" / "encoder.pt")
    state["encoder"]["norm.weight"][3] = float("nan")
    torch.save(state, tmp_path / "run" / "encoder.pt")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        tune([tmp_path / "run"], "rte", glue, tmp_path / "next")
    assert "run: hidden states with NaN or infinity" in capsys.readouterr().err
    assert not (tmp_path / "next" / "sweep.jsonl").exists()


@pytest.mark.parametrize("maker", ["train.py", "data.py prepare"])
@catches("finetune.main", "refuse_other_kind(options.out", "str(options.out", maker="data.py prepare")
def test_the_folder_of_another_program_is_refused_at_once(maker, corpus, finished, glue, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished[0] if maker == "train.py" else corpus[1], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(finetune, "read_task", None)  # nothing is read before
    capsys.readouterr()
    for task in ("rte", "glue"):
        assert f"was made by {maker}" in fails(lambda task=task: tune(finished, task, glue, out), capsys)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_folder_of_an_earlier_version_goes_on(finished, glue, tmp_path, capsys):
    """Without checksums, a list of kept files, or a choice of the checkpoint: it had the last."""
    out = tmp_path / "run"
    now = tune(finished, "rte", glue, out, "--keep", "last")
    config = {k: v for k, v in files.read_json(out / "config.json").items() if k != "tokenizer"}
    del config["tune"]["keep"]
    (out / "config.json").write_text(json.dumps(config))
    lines = [{k: v for k, v in line.items() if k not in ("best", "last", "step", "steps")} for line in finetune.read_runs(out)]
    (out / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(out / ".kept")
    capsys.readouterr()
    assert "'keep': 'last'" in fails(lambda: tune(finished, "rte", glue, out), capsys)
    then = tune(finished, "rte", glue, out, "--keep", "last")
    assert then["values"] == now["values"] and then["last"] == now["last"] and then["best"]["values"] == [None, None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_one_line_and_its_code(number, finished, glue, tmp_path):
    command = [sys.executable, "finetune.py", "--init", str(finished[0]), "--task", "rte", "--data", str(glue), "--out",
               str(tmp_path / "run"), *FAST, "--epochs", "500"]
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "training inputs" in process.stdout.readline()
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 128 + number and error == "finetune.py: interrupted; the same command continues\n"


@catches("finetune.share_of_time", "for point in run:", "for point in reversed(run):")
@catches("finetune.share_of_time", "end = of[-1]", "end = run[-1]")
@catches("finetune.share_of_time", 'if end["median"] is None:', "if False:")
@catches("finetune.share_of_time", '/ end["hours"]', '/ run[-1]["hours"]')
def test_figure_3_says_after_which_share_of_its_time_another_run_is_reached(tmp_path, capsys):
    def points(*pairs):
        return [{"hours": hours, "median": median} for hours, median in pairs]

    found = finetune.time_shares({"mae": points((1, 60), (4, 83), (8, 85), (11, 86)), "mlm": points((2, 50), (10, 83))})
    assert [(share["run"], share["of"], share["score"], share["share"]) for share in found] == [
        ("mae", "mlm", 83, 0.4), ("mlm", "mae", 86, None)]
    assert finetune.share_of_time(points((1, 60)), points((1, 50), (2, None))) is None
    ranks = {"after": [{"uncentered": 5, "centered": 6}, None, {"uncentered": 8, "centered": 9}]}
    results = [{"task": "mnli", "metric": "accuracy", "median": m, "values": [m, m], "effective_rank": ranks}
               for m in (50.0, 83.0, 83.0, 86.0)]
    hours = {"out/mlm/step_1.pt": 2.0, "out/mlm/step_2.pt": 10.0, "out/mae/step_1.pt": 4.0, "out/mae/step_2.pt": 8.0}
    finetune.figure3(hours, results, tmp_path)
    written = files.read_json(tmp_path / "figure3.json")
    assert len(written["time_shares"]) == 2 and written["points"][0]["rank"] == {"uncentered": 6.5, "centered": 7.5}
    printed = capsys.readouterr().out
    assert "mae reaches the final score of out/mlm (83.00) after 40% of its time" in printed
    assert "mlm reaches the final score of out/mae (86.00): never" in printed


@catches("finetune.table1", '"squad2 em": metrics.get("exact")', '"squad2 em": metrics.get("f1")')
@catches("finetune.table1", 'if task in GLUE:', 'if True:')
def test_table_1_has_mnli_twice_and_squad_by_both_metrics():
    def result(task, median, **metrics):
        return {"task": task, "median": median, "metrics": metrics, "values": [median]}

    results = [result(task, 80.0 + i, accuracy=80.0 + i, accuracy_mm=3.0) for i, task in enumerate(tasks.GLUE)]
    row = finetune.table1([*results, result("squad2", 84.1, exact=81.1, f1=84.1)])
    assert list(row) == ["mnli-m", "mnli-mm", *tasks.GLUE[1:], "squad2 em", "squad2 f1", "average"]
    assert (row["mnli-mm"], row["squad2 em"], row["squad2 f1"], row["average"]) == (3, 81.1, 84.1, 83.5)
    assert "average" not in finetune.table1(results[1:])


# ---- Many runs ------------------------------------------------------------------------------------------------------
SWEEP = ["--sweep", "--epochs", "0.5", "--warmup-share", "0.06", "--batch-size", "4"]


def strip(result):
    """result.json without times."""
    return result | {"sweep": [{k: v for k, v in line.items() if k != "seconds"} for line in result["sweep"]]}


def test_a_sweep_that_was_cut_off_continues_and_ends_as_one_that_was_not(finished, glue, tmp_path, capsys):
    whole = tune(finished, "rte", glue, tmp_path / "a", *SWEEP)
    assert len(whole["sweep"]) == 4 and {line["seed"] for line in whole["sweep"]} == {0} and whole["seeds"] == [1, 2]
    assert whole["setting"]["learning_rate"] == max(whole["sweep"], key=finetune.worth)["learning_rate"]
    assert whole["median"] == np.median(whole["values"])
    lines = (tmp_path / "a" / "sweep.jsonl").read_text().splitlines()
    assert len(lines) == 6
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    (tmp_path / "b" / "sweep.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    capsys.readouterr()
    cut = tune(finished, "rte", glue, tmp_path / "b", *SWEEP)
    assert strip(cut) == strip(whole) and capsys.readouterr().out.count(" s\n") == 4 + 4  # 4 runs, and the table of 4
    tune(finished, "rte", glue, tmp_path / "b", *SWEEP)
    assert len(finetune.read_runs(tmp_path / "b")) == 6


def test_processes_share_a_sweep(finished, glue, tmp_path):
    command = [sys.executable, "finetune.py", "--init", str(finished[0]), "--task", "rte", "--data", str(glue), "--out",
               str(tmp_path / "run"), *FAST, *SWEEP]
    both = [subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    runs = finetune.read_runs(tmp_path / "run")
    assert len(runs) == len({(r["learning_rate"], r["seed"]) for r in runs}) == 6
    whole = tune(finished, "rte", glue, tmp_path / "alone", *SWEEP)
    assert strip(files.read_json(tmp_path / "run" / "result.json")) == strip(whole)


HELD = """
import json, pathlib, sys, time
import files, finetune
out, run = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
with finetune.lock_of(out, run):
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(1)  # so that whoever waits for the lock waits
    files.append_line(out / "sweep.jsonl", run | {"value": 1.0, "seconds": 0.0})
"""


def process_at(out, run):
    """A process that is at a run, and ends it a second after it is sent a line."""
    process = subprocess.Popen([sys.executable, "-c", HELD, str(out), json.dumps(run)], cwd=HERE, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    return process


def is_free(out, run):
    """Whether this process can have the lock of a run at once."""
    try:
        with finetune.lock_of(out, run).acquire(blocking=False):
            return True
    except filelock.Timeout:
        return False


SETTING = {"epochs": 1.0, "learning_rate": 1e-3, "batch_size": 4, "warmup_share": 0.06}
RUNS = [SETTING | {"seed": seed} for seed in (2, 3, 4)]  # of seed 1 files are kept, too


@catches("finetune.lock_of", "digest(repr(key).encode())", "digest(b'')")
@catches("finetune.lock_of", "digest(repr(key).encode())", "digest(repr(id(out)).encode())")
def test_a_run_belongs_to_one_process_until_that_one_ends_or_is_killed(tmp_path):
    for end in (lambda process: process.communicate("\n"), lambda process: process.kill()):
        process = process_at(tmp_path, RUNS[0])
        assert [is_free(tmp_path, run) for run in RUNS] == [False, True, True]
        end(process)
        process.communicate()
        assert all(is_free(tmp_path, run) for run in RUNS)
    assert [line["seed"] for line in finetune.read_runs(tmp_path)] == [2]  # one that was killed leaves no line


@catches("finetune.complete", "if not is_done(job.out, run):  #", "if True:  #")
@catches("finetune.complete", "(False, True)", "(False,)")
def test_what_another_process_is_at_is_waited_for_after_all_else(tmp_path, monkeypatch):
    done = []

    def run_once(job, run):
        done.append(run["seed"])
        if done == [3, 4]:
            process.stdin.write("\n")
            process.stdin.flush()
        return run | {"value": 0.0, "seconds": 0.0}

    monkeypatch.setattr(finetune, "run_once", run_once)
    process = process_at(tmp_path, RUNS[0])
    kind = types.SimpleNamespace(metric="accuracy")
    lines = finetune.complete(finetune.Job("rte", None, kind, {}, None, None, tmp_path, [], {}), RUNS)
    process.wait()
    assert done == [3, 4] and [(line["seed"], line["value"]) for line in lines] == [(2, 1.0), (3, 0.0), (4, 0.0)]


@catches("finetune.make_job", 'if not found and (out / "sweep.jsonl").is_file():', "if False:")
def test_another_setup_in_the_same_folder_is_refused(finished, glue, tmp_path, capsys):
    tune(finished, "rte", glue, tmp_path / "run")
    before = (tmp_path / "run" / "sweep.jsonl").read_bytes()
    capsys.readouterr()
    assert "was made with other settings: task='rte' there, 'cola' here" in fails(lambda: tune(finished, "cola", glue, tmp_path / "run"), capsys)
    assert (tmp_path / "run" / "sweep.jsonl").read_bytes() == before
    for remains in ("{}", None):
        (tmp_path / "run" / "config.json").unlink()
        if remains:
            (tmp_path / "run" / "config.json").write_text(remains)
        assert "no config.json that says of what" in fails(lambda: tune(finished, "cola", glue, tmp_path / "run"), capsys)


@catches("finetune.validate", "if not moments.gram.isfinite().all():", "if False:")
def test_a_run_that_diverges_is_recorded_and_loses(finished, glue, tmp_path):
    for name, epochs in (("run", "3"), ("one-step", "0.1")):  # after one step the loss is finite, the weights are not
        result = tune(finished, "rte", glue, tmp_path / name, "--learning-rate", "1e38", "--epochs", epochs)
        assert result["values"] == [None, None] and result["median"] is None
        assert not (tmp_path / name / "encoder.pt").exists()


def test_every_format_of_ones_own_data_gives_the_same(finished, tmp_path):
    import pyarrow, pyarrow.parquet  # noqa: E401
    records = [{"text": f'{sentence(i)} "quoted", and\nmore', "text2": sentence(2 * i), "label": VERBS[i % 4]} for i in range(16)]
    results = []
    for suffix in ("csv", "jsonl", "parquet"):
        folder = tmp_path / suffix
        folder.mkdir()
        for part in ("train", "dev"):
            path = folder / f"{part}.{suffix}"
            if suffix == "csv":
                with open(path, "w", newline="") as file:
                    writer = csv.DictWriter(file, list(records[0]))
                    writer.writeheader()
                    writer.writerows(records)
            elif suffix == "jsonl":
                path.write_text("".join(json.dumps(r) + "\n" for r in records))
            else:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        results.append(tune(finished, "custom", folder, folder / "run"))
    assert results[0] == results[1] == results[2] and results[0]["metric"] == "accuracy"
    (tmp_path / "numbers").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "numbers" / f"{part}.jsonl").write_text("".join(json.dumps({"text": r["text"], "label": i / 2}) + "\n" for i, r in enumerate(records)))
    assert tune(finished, "custom", tmp_path / "numbers", tmp_path / "numbers" / "run")["metric"] == "spearman"


def test_fine_tuning_learns(finished, tmp_path):
    (tmp_path / "data").mkdir()
    for part, shift in (("train", 0), ("dev", 1000)):
        (tmp_path / "data" / f"{part}.jsonl").write_text("".join(
            json.dumps({"text": sentence(i + shift), "label": OBJECTS[(i + shift) // 16 % 2]}) + "\n" for i in range(160)))
    result = tune(finished, "custom", tmp_path / "data", tmp_path / "run", "--epochs", "4", "--learning-rate", "3e-3", "--seeds", "1", "--batch-size", "8")
    assert result["median"] > 95


def test_figure_3_is_drawn_from_the_checkpoints_of_a_run(finished, glue, tmp_path):
    paths = [str(path) for path in run_module.checkpoints(finished[0])]
    finetune.main(["--figure3", *paths, "--task", "rte", "--data", str(glue), "--out", str(tmp_path / "f"), *FAST])
    points = files.read_json(tmp_path / "f" / "figure3.json")["points"]
    assert [p["checkpoint"] for p in points] == paths and (tmp_path / "f" / "figure3.png").stat().st_size > 5000
    assert [p["hours"] * 3600 for p in points] == pytest.approx([torch.load(p, weights_only=True)["seconds"] for p in paths])


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_encoders_of_the_hub_go_through_the_same_code(family, glue, tmp_path):
    import tokenizers
    import transformers
    words = sorted({w for i in range(60) for w in re.findall(r"\w+|[^\w\s]", sentence(i))})
    special = {"bert": ("[CLS]", "[PAD]", "[SEP]", "[MASK]"), "roberta": ("<s>", "<pad>", "</s>", "<mask>")}[family]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate([*special, "[UNK]", *words])}, "[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pair = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "<s> $A </s> </s> $B </s>"}[family]
    model.post_processor = tokenizers.processors.TemplateProcessing(
        f"{special[0]} $A {special[2]}", pair, [(special[0], 0), (special[2], 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, cls_token=special[0], pad_token=special[1], sep_token=special[2],
                                                     mask_token=special[3], unk_token="[UNK]", model_max_length=40)
    config = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family](
        vocab_size=len(model.get_vocab()), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=42, pad_token_id=1, type_vocab_size=2 if family == "bert" else 1)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    text = finetune.load_pretrained(f"hf:{tmp_path / 'hub'}", 0.1)
    pair = some_pairs()[1]
    _, encoded = encode_sentences(text, [pair, pair._replace(text2=None)])
    assert [ids.tolist() for ids in encoded.ids] == [tokenizer(*texts)["input_ids"] for texts in (pair[:2], pair[:1])] and text.seq_len == 40
    both = tokenizer(sentence(1), sentence(2), return_tensors="pt", return_token_type_ids=family == "bert")
    encoder = text.fresh(0).eval()
    with torch.no_grad():
        ours = encoder(both["input_ids"], None, torch.zeros_like(both["input_ids"], dtype=torch.bool))
        torch.testing.assert_close(ours, encoder.model(**both).last_hidden_state)
    for task in ("rte", "squad2"):
        result = tune([f"hf:{tmp_path / 'hub'}"], task, glue, tmp_path / task, "--seeds", "1")
        assert result["median"] is not None and transformers.AutoModel.from_pretrained(tmp_path / task).config.hidden_size == 32


def break_answer(qas):
    return [{**q, "answers": [{"text": "nobody", "answer_start": 3}] if q["id"] == "q7" else q["answers"]} for q in qas]


@pytest.mark.parametrize("task, flags, damage, message", [
    ("rte", [], lambda d: (d / "RTE" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n1\ta\tb\tmaybe\n"),
     "label 'maybe' of 'a' is not in the task: entailment, not_entailment"),
    ("rte", [], lambda d: (d / "RTE" / "dev.tsv").write_text("index\tsentence1\tlabel\n1\ta\tentailment\n"),
     "dev.tsv, record 1: `sentence2` is missing; found: index, sentence1, label"),
    ("rte", [], lambda d: (d / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n"), "rte, part train in .*: empty"),
    ("rte", [], lambda d: (d / "RTE" / "train.tsv").unlink(), "no train.tsv there or in RTE/"),
    ("glue", [], lambda d: (d / "STS-B" / "dev.tsv").unlink(), "no dev.tsv there or in STS-B/"),
    ("stsb", [], lambda d: (d / "STS-B" / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tmuch\n"), "label 'much' of 'a' is not in"),
    ("squad2", [], lambda d: write_squad(d / "SQuAD" / "dev-v2.0.json", change=break_answer),
     "question q7: answer 'nobody' is not in its context, at character 3"),
    ("squad2", [], lambda d: (d / "SQuAD" / "train-v2.0.json").write_text("{}"), "not in the format of SQuAD: `data` is missing"),
    ("custom", [], lambda d: (d / "train.csv").write_text("text,kind\na,b\n") and (d / "dev.csv").write_text("text,label\na,b\n"),
     "train.csv, record 1: `label` is missing; found: text, kind"),
    ("custom", [], lambda d: [(d / f"{p}.jsonl").write_text("".join(json.dumps({"text": "x", "label": p + x}) + "\n" for x in "ab"))
                              for p in ("train", "dev")], "label 'deva' of 'x' is not in the task: traina, trainb"),
    ("rte", ["--init", "no/such"], lambda d: None, "no/such: no such run folder"),
    ("rte", ["--epochs", "0"], lambda d: None, "epochs=0.0: use a positive number"),
    ("rte", ["--seeds", "0"], lambda d: None, "--seeds 0: use a positive number"),
    ("rte", ["--figure3", "missing.pt"], lambda d: None, "missing.pt: cannot be read"),
    ("rte", ["--learning-rate", "inf"], lambda d: None, "learning_rate=inf: use a finite number"),
    ("rte", ["--keep", "first"], lambda d: None, "keep='first': use best or last"),
    ("rte", ["--out", ""], lambda d: None, "the name is empty"),
    ("sst3", [], lambda d: None, "invalid choice: 'sst3'.*mnli.*squad2"),
])
def test_bad_input_is_named_in_one_line_before_any_run(task, flags, damage, message, finished, tmp_path, capsys):
    tasks.read_task.cache_clear()
    folder = write_glue(tmp_path / "data")
    damage(folder)
    error = fails(lambda: tune(finished, task, folder, tmp_path / "out", *flags), capsys)
    assert re.search(message, error), error
    assert not (tmp_path / "out" / "sweep.jsonl").exists()


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
