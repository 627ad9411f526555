"""Claims about records: every number in the files that our programs write follows from other files."""
import copy
import math
import re
import shutil
import statistics
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

import finetune
import rank
from conftest import generator
from maelm import CLS, SEP, apply_masks, corrupt, draw_masks
from support import export, probe
from support.checkpoints import Pretrained, load_model
from support.classification import Encoded
from support.corpus import indices_of_step
from support.heads import ClassifierHead
from support.model import flops, make_model, seed_of
from support.program import json_lines, read_json, read_lines
from support.run import draw_loss
from tests.common import last_checkpoint, losses, read_log, sentence, short_run

FACTORS = 0.5, 1, 1, 0.75, 0.5, 0.25  # of the peak rate, in the six steps of a short run


# ---- Pre-training ---------------------------------------------------------------------------------------------------
def rows_of(out, split):
    """The sequences (N, 24) int64 of a split of a run's corpus."""
    values = read_json(out / "config.json")
    tokens = np.fromfile(f"{values['cache']}/{values['corpus']}/{split}.bin", np.uint16).astype(np.int64)
    tokens = tokens[:len(tokens) // 23 * 23]
    return torch.from_numpy(np.insert(tokens.reshape(-1, 23), 0, CLS, axis=1))


def test_a_log_follows_from_the_corpus_and_the_model(finished):
    files = {"config.json", "tokenizer.json", "log.jsonl", "loss.png", "step_0000003.pt", "step_0000006.pt"}
    assert {path.name for path in finished.glob("[!.]*")} == files
    first, *log = read_log(finished)
    rows = rows_of(finished, "val")
    rows = rows[np.linspace(0, len(rows) - 1, 16).astype(int)]  # --eval-rows 16
    _, counts = np.unique(rows[rows > 3], return_counts=True)
    assert first["unigram_entropy"] == pytest.approx(scipy.stats.entropy(counts))
    trained, _ = load_model(finished)
    torch.manual_seed(0)
    new = make_model(trained.config, "sinusoid").eval()
    start = first["start"]
    assert (start["torch"], start["processes"], start["micro_batch"]) == (torch.__version__, 1, 4)
    assert start["flops_per_token"] == flops(trained.config) / 24
    masked = draw_masks(rows > 3, 4, generator(0))  # 15% of 24
    true = rows.gather(1, masked)
    evaluations = [line for line in log if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    for model, line in ((new, evaluations[0]), (trained, evaluations[2])):
        with torch.no_grad():
            log_p = model.logits(apply_masks(rows, masked, model.config, generator(0))).log_softmax(-1)
        assert line["val_loss"] == pytest.approx(-log_p.gather(2, true[:, :, None]).mean().item(), rel=1e-5)
        assert line["val_accuracy"] == (log_p.argmax(-1) == true).double().mean()
    seconds = 0.0
    for step, line in enumerate((line for line in log if "loss" in line), start=1):
        assert line["step"] == step and line["tokens"] == step * 8 * 24
        assert line["tokens_per_second"] == pytest.approx(8 * 24 / (line["seconds"] - seconds))
        assert (line["lr"], line["muon_lr"]) == (6e-3 * FACTORS[step - 1], 2e-2 * FACTORS[step - 1])
        seconds = line["seconds"]
    assert step == 6 and last_checkpoint(finished)["seconds"] == seconds


def test_the_figure_of_a_run_shows_its_log(finished, figures, tmp_path):
    shutil.copy(finished / "log.jsonl", tmp_path)
    draw_loss(tmp_path)
    found = {line.get_label(): [*map(tuple, line.get_xydata())] for line in figures[0].axes[0].get_lines()}
    entropy = read_log(finished)[0]["unigram_entropy"]
    assert found == {"training": losses(finished), "validation with 15% masks": losses(finished, "val_loss"),
                     "unigram entropy": [(0, entropy), (1, entropy)]}


def test_a_run_is_this_loop(text, tmp_path):
    flags = """--log-interval 3 --optimizer adamw --dropout 0 --micro-batch-size 3 --clip-norm 0.5 --learning-rate 1e-2
               --adam-beta1 0.8 --adam-beta2 0.9 --adam-epsilon 1e-5 --weight-decay 0.3 --seed 4""".split()
    out = short_run(text, tmp_path / "run", *flags)
    found, _ = load_model(out)
    rows = rows_of(out, "train")
    torch.manual_seed(4)
    model = make_model(found.config, "sinusoid")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)
    results = []
    for step, factor in enumerate(FACTORS):
        tokens = rows[indices_of_step(4, step, 8, len(rows))]
        loss = model(tokens, corrupt(tokens, model.config, generator(seed_of(4, step, 0, 0))))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    log = [(line["loss"], line["grad_norm"]) for line in read_log(out) if "loss" in line]
    means = np.mean([results[:3], results[3:]], axis=1)
    np.testing.assert_allclose(log, means, rtol=1e-4)
    torch.testing.assert_close(found.state_dict(), model.state_dict(), atol=1e-4, rtol=0)


# ---- Fine-tuning ----------------------------------------------------------------------------------------------------
def rows_of_file(path):
    """The texts and the labels in a file of `labeled`."""
    return zip(*[line.values() for line in read_lines(path)])


def encoded(texts, tokenizer, n):
    """Texts as tokens, cut off after n."""
    return [torch.tensor([[CLS, *tokenizer.encode(text)[:n - 2].tolist(), SEP]]) for text in texts]


def states_of(encoder, tokens):
    """H^L of each text, (t, d)."""
    with torch.no_grad():
        return [encoder.hidden_states(each, torch.arange(each.shape[1])[None])[-1][0] for each in tokens]


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """A folder with train.jsonl and dev.jsonl, in which subjects decide labels, and the texts and labels of dev."""
    folder = tmp_path_factory.mktemp("labeled")
    for split, start, stop in (("train", 0, 60), ("dev", 100, 180)):
        rows = [{"text": sentence(i)[:20 + i % 20], "label": "zxy"[i % 4 % 3]} for i in range(start, stop)]
        (folder / f"{split}.jsonl").write_text(json_lines(rows))
    return folder, *rows_of_file(folder / "dev.jsonl")


@pytest.fixture(scope="module")
def tuned(labeled, finished, tmp_path_factory):
    """The folder of a fine-tuning run with two seeds, the accuracy at each checkpoint, and seeds: of batches, and of
    dropout before each checkpoint."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    accuracies, seeds, dropout = [], [], []
    evaluate, shuffled = finetune.FineTuning.evaluate, Encoded.shuffled

    def noting(*arguments):
        scores = evaluate(*arguments)
        accuracies.append(scores.metrics["accuracy"])
        dropout.append(torch.initial_seed())
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune.FineTuning, "evaluate", noting)
        patch.setattr(Encoded, "shuffled", lambda split, seed, size: seeds.append(seed) or shuffled(split, seed, size))
        finetune.main(f"""--init {finished} --task custom --data {labeled[0]} --out {out} --seeds 2 --epochs 11
            --seq-len 12 --batch-size 25 --learning-rate 1e-2 --dropout 0.3 --precision fp32""".split())
    return out, accuracies, seeds, dropout


def test_a_result_follows_from_the_saved_model(labeled, tuned, finished):
    _, texts, labels = labeled
    out, accuracies, seeds, dropout = tuned
    result = read_json(out / "result.json")
    state = torch.load(out / "encoder.pt")
    pretrained, tokenizer = load_model(finished)
    tokens = encoded(texts, tokenizer, 12)
    model = finetune.Tuned(pretrained.encoder, ClassifierHead(32, 3, 0.3))
    before = torch.cat(states_of(pretrained.encoder, tokens))
    model.load_state_dict(state["model"])
    model.eval()
    after = torch.cat(states_of(model.encoder, tokens))
    with torch.no_grad():
        scores = torch.cat([model(each, each < 0) for each in tokens]).softmax(-1)
    best = result["values"].index(max(result["values"]))  # the model of the better seed is saved
    lines = read_lines(out / f"seed{best + 1}/predictions.jsonl")
    assert [line["label"] for line in lines] == [*labels]
    for line, score in zip(lines, scores, strict=True):
        assert line["scores"] == pytest.approx(dict(zip("xyz", score.tolist())), abs=1e-5)
        assert line["prediction"] == "xyz"[score.argmax()]
    value = 100 * sklearn.metrics.accuracy_score(labels, [line["prediction"] for line in lines])
    # 33 steps (60 texts are three batches of at most 25), two checkpoints per epoch, but at most 20
    steps = sorted({math.ceil(33 * i / 20) for i in range(1, 21)})
    assert dropout[:20] + dropout[21:41] == [seed_of(seed, step - 1, 1) for seed in (1, 2) for step in steps]
    halves = accuracies[:20], accuracies[21:41]  # after the last checkpoint, the best one is evaluated again
    assert result["values"] == [max(half) for half in halves] and result["values"][best] == pytest.approx(value)
    assert result["steps"] == [steps[half.index(max(half))] for half in halves] and result["steps"][0] < 33
    assert 80 < result["median"] == result["metrics"]["accuracy"] == statistics.median(result["values"])
    runs = read_lines(out / "runs.jsonl")
    ranks = result["effective_rank"]
    assert [run["seed"] for run in runs] == seeds == [1, 2] and [run["ranks"] for run in runs] == ranks["after"]
    for found, h in ((ranks["before"], before), (ranks["after"][best], after)):
        assert found == dict(uncentered=rank.effective_rank(h), centered=rank.effective_rank(h - h.mean(0)))


def test_fine_tuning_is_this_loop(labeled, tuned, finished):
    """The better seed, up to its best checkpoint; Tables 5 and 6."""
    texts, labels = rows_of_file(labeled[0] / "train.jsonl")
    pretrained = Pretrained(str(finished)).with_dropout(0.3)
    ids = [tokens[0].numpy() for tokens in encoded(texts, pretrained.tokenizer, 12)]
    split = Encoded(ids, torch.tensor(["xyz".index(label) for label in labels]), [], "")
    result = read_json(tuned[0] / "result.json")
    best = result["values"].index(max(result["values"]))
    encoder = pretrained.new_encoder(best + 1)
    torch.manual_seed(seed_of(best + 1))
    model = finetune.Tuned(encoder, ClassifierHead(32, 3, 0.3))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    for step, chosen in zip(range(result["steps"][best]), split.shuffled(best + 1, 25)):
        tokens, padding, targets = split.batch(chosen, "cpu")
        torch.manual_seed(seed_of(best + 1, step, 1))
        torch.nn.functional.cross_entropy(model(tokens, padding), targets).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else (33 - step) / 31)  # 6% of 33 steps
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), torch.load(tuned[0] / "encoder.pt")["model"], atol=1e-4, rtol=0)


def normalized(x):
    """The rows of a matrix, with length 1."""
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def drawn(labels, shots, seed):
    """The indices of `shots` examples of each label, by rounds, or of all."""
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    places = {name: [i for i in order if labels[i] == name] for name in "xyz"}
    rounds = [sorted(each, key=order.index) for each in zip(*places.values())]
    return sum(rounds[:shots], []) if shots else [*range(len(labels))]


@pytest.mark.parametrize("init, pooling, strength, shots, seed", [
    ("", "mean", 0, 0, 1), ("", "cls", 3, 0, 1), ("random:", "mean", 0, 4, 2)])
def test_a_probe_follows_from_the_vectors_of_the_encoder(init, pooling, strength, shots, seed, labeled, finished,
                                                         tmp_path):
    folder, texts, labels = labeled
    finetune.main(f"""--init {init}{finished} --task custom --data {folder} --out {tmp_path}/out --frozen {pooling}
                      --seq-len 12 --l2 {strength} --shots {shots} --seeds {seed}""".split())
    result = read_json(tmp_path / "out/result.json")
    pretrained = Pretrained(f"{init}{finished}")
    encoder = pretrained.new_encoder(seed).eval()
    training, targets = rows_of_file(folder / "train.jsonl")
    vectors = []
    for split in (training, texts):
        states = states_of(encoder, encoded(split, pretrained.tokenizer, 12))
        vectors.append(np.stack([h.numpy()[0] if pooling == "cls" else h.numpy().mean(0) for h in states]))
    chosen = drawn(targets, shots, seed)
    targets = np.array(["xyz".index(label) for label in targets])[chosen]
    model = probe.fit(vectors[0][chosen], targets, strength, "accuracy")
    right = 100 * np.mean(["xyz"[i] for i in model.predict(vectors[1])] == np.array(labels))
    assert result["values"][-1] == pytest.approx(right) and len(result["values"]) == seed and right > 50
    run = read_lines(tmp_path / "out/runs.jsonl")[-1]
    assert run["strength"] == pytest.approx(1 / model[-1].C_) and result["shots"] == shots
    lines = read_lines(tmp_path / f"out/seed{seed}/predictions.jsonl")
    found = [[line["scores"][name] for name in "xyz"] for line in lines]
    np.testing.assert_allclose(found, model.predict_proba(vectors[1]), atol=1e-4)


def test_naive_bayes_counts_tokens_and_their_pairs(labeled, finished, tmp_path, monkeypatch):
    folder, texts, labels = labeled
    monkeypatch.setattr(probe, "SMOOTHING", [1e6, 0.1, 1e7])
    finetune.main(f"--init bow:{finished} --task custom --data {folder} --out {tmp_path}/out --seq-len 12 --shots 9 "
                  "--seeds 2".split())
    training, targets = rows_of_file(folder / "train.jsonl")
    tokenizer = Pretrained(str(finished)).tokenizer
    pieces = []
    for split in ([training[i] for i in drawn(targets, 9, 2)], texts):
        ids = [each[0].tolist() for each in encoded(split, tokenizer, 12)]
        pieces.append([[*each, *zip(each, each[1:])] for each in ids])
    names = [targets[i] for i in drawn(targets, 9, 2)]
    known = sorted({piece for each in pieces[0] for piece in each}, key=str)
    counts = {name: np.array([sum(each.count(piece) for each, label in zip(pieces[0], names) if label == name)
                              for piece in known]) for name in "xyz"}
    run = read_lines(tmp_path / "out/runs.jsonl")[1]
    assert run["strength"] == 0.1 and run["ranks"] is None
    log_p = {name: np.log((each + run["strength"]) / (each + run["strength"]).sum()) for name, each in counts.items()}
    lines = read_lines(tmp_path / "out/seed2/predictions.jsonl")
    for line, each in zip(lines, pieces[1], strict=True):
        logits = [sum(log_p[name][known.index(piece)] for piece in each if piece in known) for name in "xyz"]
        assert line["scores"] == pytest.approx(dict(zip("xyz", scipy.special.softmax(logits))), abs=1e-6)
    result = read_json(tmp_path / "out/result.json")
    right = sum(line["prediction"] == label for line, label in zip(lines, labels))
    assert result["values"][1] == pytest.approx(100 * right / len(labels))
    assert result["effective_rank"]["before"] is None


def test_lsa_projects_tfidf_on_singular_vectors_of_the_training_text(labeled, finished, tmp_path, monkeypatch):
    lsa_of, more = finetune.lsa_of, ["thrice", "thrice seldom", "seldom thrice"]
    # The text has fewer than 32 words, all of them frequent.
    monkeypatch.setattr(finetune, "lsa_of", lambda texts, dims: lsa_of([*texts, *more], {32: 8}[dims]))
    finetune.main(f"--init lsa:{finished} --task custom --data {labeled[0]} --out {tmp_path}/out --l2 3 --shots 9 "
                  "--seeds 2 --seq-len 12".split())
    tokenizer = Pretrained(str(finished)).tokenizer
    training, targets = rows_of_file(labeled[0] / "train.jsonl")
    cut = [[tokenizer.decode(each[0].tolist()[1:-1]) for each in encoded(texts, tokenizer, 12)]
           for texts in (training, labeled[1])]
    known = tokenizer.decode(rows_of(finished, "train")[:, 1:].flatten()).split("[SEP]") + more
    words = [[re.findall(r"\b\w\w+", text.lower()) for text in texts] for texts in (known, *cut)]
    found_in = Counter(word for each in words[0] for word in {*each})
    rare = np.array([math.log((1 + len(known)) / (1 + count)) + 1 for count in found_in.values() if count >= 3])
    vectors = []
    for texts in words:
        counts = np.array([[each.count(word) for word in found_in if found_in[word] >= 3] for each in texts])
        vectors.append(normalized(np.log(counts.clip(1)) * rare + (counts > 0) * rare))
    directions = np.linalg.svd(vectors[0])[2][:8]
    chosen = drawn(targets, 9, 2)
    x, dev = [normalized(each @ directions.T) for each in vectors[1:]]
    model = probe.fit(x[chosen], np.array(["xyz".index(targets[i]) for i in chosen]), 3, "accuracy")
    lines = read_lines(tmp_path / "out/seed2/predictions.jsonl")
    found = [[line["scores"][name] for name in "xyz"] for line in lines]
    np.testing.assert_allclose(found, model.predict_proba(dev), atol=1e-4)
    assert read_json(tmp_path / "out/result.json")["effective_rank"]["before"] is None


def test_with_few_labels_a_fifth_of_them_chooses_the_checkpoint(labeled, finished, tmp_path, monkeypatch):
    folder, texts, _ = labeled
    scored, trained, weights = [], [], []
    evaluate, shuffled = finetune.FineTuning.evaluate, Encoded.shuffled

    def noting(run, model, splits):
        scores = evaluate(run, model, splits)
        scored.append(([row.text for row in splits["dev"].examples], scores.metrics["accuracy"]))
        weights.append(copy.deepcopy(model.state_dict()))
        return scores

    def noting_too(split, *how):
        trained.append([row.text for row in split.examples])
        return shuffled(split, *how)

    monkeypatch.setattr(finetune.FineTuning, "evaluate", noting)
    monkeypatch.setattr(Encoded, "shuffled", noting_too)
    finetune.main(f"""--init {finished} --task custom --data {folder} --out {tmp_path}/out --seeds 4 --epochs 2
        --seq-len 12 --batch-size 5 --learning-rate 1e-2 --shots 10""".split())
    training, targets = rows_of_file(folder / "train.jsonl")
    result = read_json(tmp_path / "out/result.json")
    for seed in range(1, 5):
        chosen = [training[i] for i in drawn(targets, 10, seed)]
        *choices, last = scored[5 * seed - 5:5 * seed]
        assert trained[seed - 1] == chosen[:24] and [each for each, _ in choices] == 4 * [chosen[24:]]
        best = [value for _, value in choices].index(max(value for _, value in choices))
        assert result["steps"][seed - 1] == math.ceil(10 * (1 + best) / 4)
        assert last == ([*texts], result["values"][seed - 1])
    # The saved model is the best on dev, not on its own few labels.
    best = result["values"].index(max(result["values"]))
    torch.testing.assert_close(torch.load(tmp_path / "out/encoder.pt")["model"], weights[5 * best + 4])


# ---- Ranks and exports ----------------------------------------------------------------------------------------------
def test_ranks_follow_from_the_validation_text(text, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "VECTORS_PER_DIM", 5)  # the text is short
    rank.main(f"{finished} --tau 0.8 --tokens 1000 --out {tmp_path}".split())
    content = read_json(tmp_path / "rank.json")
    entry, = content["models"].values()
    encoder = Pretrained(str(finished)).new_encoder(1).eval()
    rows = rows_of(finished, "val")
    rows, count = rows[np.linspace(0, len(rows) - 1, 42).astype(int)], 42  # 1,000 tokens
    with torch.no_grad():
        layers = [h.flatten(0, 1) for h in encoder.hidden_states(rows, torch.arange(24)[None])]
    assert entry["uncentered"]["without_mask"] == [rank.effective_rank(h, 0.8) for h in layers]
    assert entry["centered"]["without_mask"] == [rank.effective_rank(h - h.mean(0), 0.8) for h in layers]
    assert entry["n"] == dict(with_mask=24 * count, without_mask=24 * count, mask_only=4 * count)
    assert (entry["text"], entry["trained_on_mask"], entry["d"], content["tau"]) == (str(text), False, 32, 0.8)


def test_an_export_gives_the_predictions_of_fine_tuning(labeled, tuned, hub, tmp_path):
    export.main([str(tuned[0]), str(tmp_path / "hub")])
    tokenizer = hub.AutoTokenizer.from_pretrained(tmp_path / "hub")
    model = hub.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", trust_remote_code=True)
    batch = tokenizer(list(labeled[1]), truncation=True, padding=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] == 12 and not model.training and not model.accepts_loss_kwargs
    with torch.no_grad():
        scores = model(**batch).logits.softmax(-1)
    values = read_json(tuned[0] / "result.json")["values"]
    lines = read_lines(tuned[0] / f"seed{values.index(max(values)) + 1}/predictions.jsonl")
    for line, score in zip(lines, scores, strict=True):
        assert line["scores"] == pytest.approx({model.config.id2label[i]: score[i].item() for i in range(3)}, abs=1e-5)
