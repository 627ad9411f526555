"""Claims about train.py: runs, the schedule, flags, costs."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import files
import maelm
import run
import train
from conftest import (HERE, TINY, QUICK, catches, fails, generator, last_checkpoint, let_use, model_and_batch, one_place,
                      random_tokens, same, run_with_wrong_version, short_run, tiny, write_corpus, wrong_versions)


def visible(folder):
    """The files of a folder, but for its lock."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


# ---- Runs -----------------------------------------------------------------------------------------------------------
def test_a_run_folder_holds_what_the_readme_says(finished):
    out, _ = finished
    assert {p.name for p in visible(out)} == {"config.json", "tokenizer.json", "log.jsonl", "loss.png", "step_0000003.pt",
                                               "step_0000006.pt"}
    log = run.read_log(out)
    assert log[0]["unigram_entropy"] > 1 and log[0]["step"] == 0
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        assert {"lr", "tokens_per_second", "seconds", "waiting"} <= set(line) and 0 <= line["waiting"] <= 1
    assert [line["step"] for line in log if "val_loss" in line] == [0, 3, 6]


@catches("run.Clock.paused", "self.start = time.perf_counter() - before", "pass")
def test_speed_and_seconds_do_not_depend_on_when_it_is_evaluated(corpus, tmp_path, monkeypatch):
    """With a clock that only a step moves, by 1 s, and an evaluation, by 100 s."""
    let_use(train, run, monkeypatch)
    now = [0.0]

    def passing(seconds, function):
        def slow(*arguments):
            now[0] += seconds
            return function(*arguments)
        return slow

    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train, "train_step", passing(1, train.train_step))
    monkeypatch.setattr(train, "evaluate", passing(100, train.evaluate))
    short_run(corpus, tmp_path / "run", "--log-interval", "4", "--eval-interval", "1")
    log = run.read_log(tmp_path / "run")
    assert [line["seconds"] for line in log if "val_loss" in line and line["step"]] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens_per_second"] for line in log if "loss" in line] == [8 * 24, 8 * 24]


@catches("train.restore", "optimizer.load_state_dict(saved)", "pass", stop=4)
@catches("train.train_step", "torch.manual_seed(seed_of(train.seed, step, number))", "pass", stop=4)
@catches("train.batch_of_step", "rows_of_step(train.seed, step, train",
         "rows_of_step(train.seed, np.random.randint(1000), train", stop=4)
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_continued_run_equals_an_uninterrupted_one_bitwise(corpus, finished, tmp_path, stop):
    short_run(corpus, tmp_path / "run", "--stop-at", str(stop))
    assert same(short_run(corpus, tmp_path / "run"), finished[1])
    steps = [line["step"] for line in run.read_log(tmp_path / "run") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_two_processes_equal_one_with_accumulation_over_20_steps_with_dropout(corpus, tmp_path):
    longer = ["--max-steps", "20", "--eval-interval", "10", "--checkpoint-interval", "20"]
    one = short_run(corpus, tmp_path / "one", *longer)["model"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py",
               "--data", str(corpus[1]), "--out", str(tmp_path / "two"), *QUICK, *longer]
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=240)
    two = torch.load(tmp_path / "two" / "step_0000020.pt", weights_only=True)["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0)
    losses = [[line["loss"] for line in run.read_log(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    assert len(losses[0]) == 20 and np.allclose(*losses, atol=1e-6, rtol=0)


def test_the_seed_decides_everything(corpus, finished, tmp_path):
    assert same(short_run(corpus, tmp_path / "same"), finished[1])
    assert not same(short_run(corpus, tmp_path / "other", "--seed", "1"), finished[1])


def test_the_same_command_never_destroys_a_finished_run(corpus, finished, capsys):
    out, _ = finished
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in visible(out)}
    short_run(corpus, out)
    assert "finished at step 6" in capsys.readouterr().out
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in visible(out)}


def test_a_diverging_run_stops_with_a_clear_line(corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, tmp_path / "run", "--learning-rate", "1e30", "--optimizer", "adamw")
    assert exit.value.code == 2 and "the gradient is not finite" in capsys.readouterr().err


@catches("train.train_step", "if not norm.isfinite():", "if False:")
@catches("train.train_step", "if not loss.isfinite()]", "if loss.isfinite()]")
@catches("train.not_finite", "drawn[numbers[0] * size:]", "drawn[numbers[0]:]")
def test_a_loss_that_is_not_finite_ends_the_run_at_once_names_the_rows_and_keeps_the_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    out, forward, calls = tmp_path / "run", maelm.MAELM.forward, []

    def poisoned(model, tokens, corruption):
        calls.append(model.training)
        loss = forward(model, tokens, corruption)
        # The second micro-batch of step 5, and only if it is noticed, no further one.
        return loss * float("nan") if calls.count(True) == 10 else loss

    monkeypatch.setattr(maelm.MAELM, "forward", poisoned)
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, out)
    rows = data.rows_of_step(0, 4, 8, 426)[4:]  # 8 rows a step, 4 a micro-batch
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and calls.count(True) == 10
    assert "step 5: the gradient is not finite, nor is the loss of 1 of its micro-batches" in error
    assert f"the training rows {', '.join(map(str, rows))}. step_0000003.pt is as it was" in error
    assert [line["step"] for line in run.read_log(out) if "loss" in line] == [1, 2, 3, 4]
    assert [path.name for path in run.checkpoints(out)] == ["step_0000003.pt"]


@catches("run.save_checkpoint", "if not weight.isfinite().all():", "if False:")
def test_weights_that_a_last_step_makes_infinite_are_not_saved(corpus, tmp_path, monkeypatch, capsys):
    let_use(train, run, monkeypatch)
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, tmp_path / "run", "--learning-rate", "1e38", "--max-steps", "1", "--warmup-steps", "0", "--weight-decay", "100")
    error = capsys.readouterr().err
    assert exit.value.code == 2 and "not finite" in error and not run.checkpoints(tmp_path / "run")


def test_other_errors_of_a_step_are_not_taken_for_a_gradient(corpus, tmp_path, monkeypatch):
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", fail)
    with pytest.raises(torch.AcceleratorError) as raised:
        short_run(corpus, tmp_path / "run")
    assert raised.value is error


class Recorded:
    """So many rows of random tokens, of which it is noted which are read."""
    vocab_size = 300

    def __init__(self, count):
        self.rows, self.read = random_tokens(count).numpy(), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, numbers):
        self.read.append(numbers.tolist())
        return self.rows[numbers]


@catches("train.evaluation_rows", "np.linspace(0, len(rows) - 1, min(train.eval_rows, len(rows)))",
         "np.arange(min(train.eval_rows, len(rows)))", total=1000, wanted=37)
@catches("train.evaluation_rows", "min(train.eval_rows, len(rows))", "train.eval_rows", total=20, wanted=37)
@catches("train.unigram_entropy", "rows[evaluation_rows(rows, train)]", "rows[np.arange(len(rows))]", total=1000, wanted=37)
@pytest.mark.parametrize("total, wanted", [(1000, 37), (1000, 999), (20, 37), (7, 1)])
def test_loss_and_entropy_are_of_the_same_rows_from_all_over_the_validation_part(total, wanted):
    rows, recipe = Recorded(total), train.TrainConfig(eval_rows=wanted)
    entropy = train.unigram_entropy(rows, recipe)
    train.evaluate(maelm.MAELM(tiny()), rows, recipe, one_place())
    (a, b), count = rows.read, min(total, wanted)
    assert a == b and len(set(a)) == len(a) == count and a[0] == 0 and (count == 1 or a[-1] == total - 1)
    gaps = np.diff(a)
    assert count == 1 or gaps.max() - gaps.min() <= 1
    _, frequency = np.unique(rows.rows[a][rows.rows[a] >= maelm.NUM_SPECIAL], return_counts=True)
    assert entropy == pytest.approx(scipy.stats.entropy(frequency))


FILLS = {"all removed": dict(), "a half": dict(mask_in_encoder=0.5), "all shown": dict(mask_in_encoder=1.0),
         "random": dict(mask_in_encoder=1.0, encoder_fill="random"), "trick": dict(mask_in_encoder=1.0, bert_trick=True),
         "half a trick": dict(mask_in_encoder=0.5, bert_trick=True)}


@catches("train.masks_at", "fill(tokens[None], config, noise)[0]", "torch.full_like(tokens, MASK)", kind="random")
@catches("train.masks_at", "fill(tokens[None], config, noise)[0]", "torch.full_like(tokens, MASK)", kind="trick")
@catches("train.masks_at", "round(config.mask_in_encoder * k)", "k * int(config.mask_in_encoder)", kind="a half")
@catches("train.masks_at", "at[torch.randperm(k, generator=generator)[shown:]]", "at[shown:]", kind="a half")
@pytest.mark.parametrize("kind", FILLS)
def test_what_predict_shows_the_encoder_is_what_corrupt_shows_it(kind):
    config = tiny(seq_len=400, mask_rate=0.5, **FILLS[kind])
    rows = random_tokens(8, 400)
    theirs = maelm.corrupt(rows, config, generator(0))
    shares = []
    for corruption in (theirs, [train.masks_at(row, masked.nonzero()[:, 0], config, generator(i))
                                for i, (row, masked) in enumerate(zip(rows, theirs.masked))]):
        if isinstance(corruption, list):
            corruption = maelm.Corruption(*(torch.cat(parts) for parts in zip(*corruption)))
        masked, kept, read = corruption
        assert torch.equal(masked, theirs.masked) and kept.shape == theirs.kept.shape and (kept.diff() > 0).all()
        true, shown = rows.gather(1, kept), masked.gather(1, kept)
        assert torch.equal(true[~shown], read[~shown])
        # Which masks are shown (their mean position), and as what.
        what = [(kept[shown].double().mean() - 200) / 200, (read == maelm.MASK)[shown].double().mean(),
                (read == true)[shown].double().mean()]
        shares.append([float(x) for x in what])
    assert np.allclose(*shares, atol=0.06, equal_nan=True), shares
    if kind == "random":
        assert maelm.MASK not in read and read[shown].unique().numel() > 200


def test_training_learns_the_little_language_and_fills_in_its_words(corpus, tmp_path, capsys):
    for ablation, sound in (("mae-lm", "(some|a)"), ("mlm", "some")):  # "some bread", or the other object, "a tree"
        out = tmp_path / ablation
        short_run(corpus, out, "--max-steps", "300", "--batch-size", "16", "--eval-interval", "300",
                  "--ablation", ablation, "--dropout", "0", "--checkpoint-interval", "300", "--muon-weight-decay",
                  "0.01", "--muon-learning-rate", "3e-2")
        log = run.read_log(out)
        assert log[-1]["val_loss"] < 0.5 * log[0]["unigram_entropy"], ablation
        capsys.readouterr()
        train.main(["--fill-mask", "my friend likes [MASK] bread today, number 12.", "--init", str(out)])
        assert re.match(rf"\[MASK\] 1: {sound} 0\.", capsys.readouterr().out)


class Words:
    """A tokenizer of which each token id is a piece of text, and rows of such ids."""
    texts = ["[CLS]", ".", "ing", *(f" w{letter}" for letter in "abcdefghij"), " 7"]
    vocab_size = len(texts)

    def __init__(self, rows):
        self.rows = np.array(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, indices):
        return self.rows[indices]

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


@catches("train.examples", "w(w[wp]{6})", "w([wp]{7})")
@catches("train.examples", "([wp]{7})w", "([wp-]{7})w")
@catches("train.examples", "ids[0] == row[at]", "ids[0] != row[at]")
@catches("train.examples", "sum(map(any, hits))", "sum(map(all, hits))")
@catches("train.examples", "hit[0] for hit", "hit[1] for hit")
def test_examples_are_the_first_that_the_rule_finds_and_their_hits_are_counted(monkeypatch):
    rows = Words(np.random.default_rng(0).choice(Words.vocab_size, (400, 40), p=[0.01, 0.02, 0.3, *[0.065] * 10, 0.02]))
    places = []
    for row in rows.rows:  # the rule once more, in words
        for at in range(7, 33):
            around = [rows.texts[i] for i in row[at - 7:at + 8]]
            whole = around[7].startswith(" w") and around[8].startswith(" w")
            if whole and all(text == "ing" or text.startswith(" w") for text in around):
                places.append((row.tolist(), at))
                break
    assert 150 < len(places) < 400
    asked = []

    def predict(model, tokens, at, generator):  # its guesses are always wa, wb, wc
        asked.append((tokens.tolist(), at.item()))
        return torch.tensor([[3, 4, 5]]), torch.tensor([[0.5, 0.2, 0.1]])

    monkeypatch.setattr(train, "predict", predict)
    model = maelm.MAELM(tiny())
    text = train.examples(model, rows, rows, shown=6, counted=100)
    assert asked == places[:100] and text.count("[w") == 6
    true = [row[at] for row, at in places[:100]]
    assert text.endswith(f"of the first 100 such words, {true.count(3)} are the model's first guess, "
                         f"{sum(i in (3, 4, 5) for i in true)} among its first three")
    assert "no examples" in train.examples(model, Words([[1] * 40]), Words([[1] * 40]))


# ---- The schedule ---------------------------------------------------------------------------------------------------
def test_learning_rate_warms_up_and_falls_linearly_to_zero():
    factors = [train.learning_rate_factor(s, 4, 12) for s in range(12)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert np.allclose(np.diff(factors[4:]), -1 / 8) and train.learning_rate_factor(12, 4, 12) == 0
    assert train.learning_rate_factor(0, 0, 5) == 1


@catches("train.learning_rate_factor", "(step + 1) / warmup_steps", "step / warmup_steps")
def test_warm_up_rises_in_equal_steps_and_ends_at_the_peak():
    assert [train.learning_rate_factor(s, 4, 12) for s in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])


@catches("train.learning_rate_factor", "/ (max_steps - warmup_steps)", "/ max_steps")
@catches("train.learning_rate_factor", "step < warmup_steps", "step <= warmup_steps")
def test_after_warm_up_the_rate_falls_linearly_to_zero():
    factors = [train.learning_rate_factor(s, 4, 12) for s in range(4, 12)]
    assert factors == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@catches("train.learning_rate_factor", "(max_steps - step)", "(max_steps - step - 1)")
def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert [train.learning_rate_factor(s, 0, 2) for s in range(2)] == pytest.approx([1, 0.5])


# ---- Batches --------------------------------------------------------------------------------------------------------
@catches("train.batch_of_step", "[:, place.rank]", "[:, 0]")
@catches("train.batch_of_step", "reshape(-1, place.world, size)", "reshape(place.world, -1, size).swapaxes(0, 1)")
@catches("train.batch_of_step", "draw_noise(train.batch_size,", "draw_noise(len(tokens),")
@catches("train.batch_of_step", "x[torch.from_numpy(mine)]", "x[:len(tokens)]")
def test_each_process_draws_its_own_rows_and_masks_of_the_same_batch():
    rows = np.random.default_rng(0).integers(maelm.NUM_SPECIAL, 300, (200, 24))
    settings = train.TrainConfig(batch_size=48, micro_batch_size=4)
    config = maelm.Config(vocab_size=300, seq_len=24, mask_in_encoder=0.5, bert_trick=True)

    def batch(rank, world):
        place = train.Place(rank, world, torch.device("cpu"), torch.float32)
        return train.batch_of_step(7, rows, config, settings, place)

    tokens, corruption = batch(0, 1)
    assert torch.equal(tokens, torch.from_numpy(rows[data.rows_of_step(0, 7, 48, 200)]))
    seed = data.seed_of(0, 7)
    assert all(torch.equal(x, y) for x, y in zip(corruption, maelm.corrupt(tokens, config, generator(seed))))
    for world in (2, 3):
        parts = [batch(rank, world) for rank in range(world)]
        for i in range(12):  # micro-batches of 4
            mine, at = parts[i % world], slice(4 * (i // world), 4 * (i // world) + 4)
            for x, whole in zip((mine[0], *mine[1]), (tokens, *corruption)):
                assert torch.equal(x[at], whole[4 * i:4 * i + 4])


# ---- Muon -----------------------------------------------------------------------------------------------------------
def steps_of_muon(make, steps=3):
    """Matrices of a few shapes, two of them of one, after some steps of the optimizer that `make` makes of them."""
    random = generator(0)
    matrices = [torch.randn(shape, generator=random).requires_grad_() for shape in ((8, 8), (32, 8), (8, 8), (8, 32))]
    optimizer = make(matrices)
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=random)
        optimizer.step()
    return torch.cat([matrix.detach().flatten() for matrix in matrices])


@catches("train.make_optimizers", "train.muon_weight_decay", "train.weight_decay")
def test_each_optimizer_has_its_own_weight_decay():
    recipe = train.TrainConfig(optimizer="muon", weight_decay=0.02, muon_weight_decay=0.3)
    groups = [optimizer.param_groups[0] for optimizer in train.make_optimizers(maelm.MAELM(tiny()), recipe, torch.float32)]
    assert [group["weight_decay"] for group in groups] == [0.02, 0.3]
    assert all(parameter.ndim == 2 for parameter in groups[1]["params"])


@catches("train.Muon.step", "max(1, rows / columns)", "max(1, columns / rows)")
@catches("train.Muon.step", "1 - group[\"lr\"] * group[\"weight_decay\"]", "1 - group[\"weight_decay\"]")
@catches("train.Muon.step", "torch._foreach_lerp(gradients, momentum, group[\"momentum\"])", "momentum")
@catches("train.orthogonalize", "dim=(1, 2), keepdim=True", "keepdim=True")
@catches("train.orthogonalize", "for _ in range(5)", "for _ in range(4)")
def test_in_bf16_muon_is_pytorchs_muon():
    theirs = steps_of_muon(lambda matrices: torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1))
    ours = steps_of_muon(lambda matrices: train.Muon(matrices, 0.02, 0.1, torch.bfloat16))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # a step moves a number by about 0.02


@catches("train.orthogonalize", "beta=b, alpha=c", "beta=c, alpha=b")
@catches("train.orthogonalize", "y = x.to(dtype)", "y = x.bfloat16().to(dtype)")
def test_in_float32_orthogonalizing_is_the_formula_in_float64():
    for shape in ((1, 6, 6), (3, 20, 5), (2, 5, 20)):
        x = torch.randn(shape, generator=generator(0))
        u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
        s = s / s.norm(dim=1, keepdim=True)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
        expected = u @ torch.diag_embed(s) @ v
        torch.testing.assert_close(train.orthogonalize(x, torch.float32).double(), expected, atol=2e-5, rtol=0)


# ---- What a step costs ----------------------------------------------------------------------------------------------
@catches("maelm.Decoder.forward", "if self.cross else None", "if True else None")
@catches("train.flops", "m if config.decoder_layers else predicted", "m")
@catches("train.products_of_stack", "[length] * (layers - 1) + [last]", "[length] * layers")
@catches("train.products_of_stack", "+= 2 * q * s * dim", "+= q * s * dim")
@catches("train.flops", "sources.append(m)", "sources.append(n)")
def test_counted_flops_are_pytorchs(bench):
    """Of forward and backward, for every row of Table 2; and of RoBERTa and ModernBERT of the same size."""
    sizes = {"dec-512": dict(decoder_dim=16), "dec-1024": dict(decoder_dim=48)}
    for name, change in maelm.ABLATIONS.items():
        config = tiny(**TINY | dict(encoder_layers=3, dropout=0.1) | change | sizes.get(name, {}))
        model, tokens = maelm.MAELM(config), random_tokens(2)
        with FlopCounterMode(display=False) as counter:
            model(tokens, maelm.corrupt(tokens, config, generator(0))).backward()
        assert counter.get_total_flops() == 2 * train.flops(config), name
    for make in (bench.gpu.roberta, bench.gpu.modernbert):
        config = tiny(encoder_dim=48, mask_in_encoder=1.0, decoder_layers=0)
        model = make(config)
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            model(input_ids=random_tokens(2), labels=random_tokens(2)).loss.backward()
        assert counter.get_total_flops() == 2 * train.flops(config, predicted=24), make


def test_checkpointing_gives_the_same_gradients_from_fewer_saved_bytes():
    def step(model, tokens, corruption):
        saved = {}

        def note(x):
            saved[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            torch.manual_seed(3)
            loss = model(tokens, corruption)
        loss.backward()
        return [p.grad for p in model.parameters()], sum(saved.values())

    model, *batch = model_and_batch(dropout=0.2, encoder_layers=4)
    before, whole = step(model.train(), *batch)
    model, *batch = model_and_batch(dropout=0.2, encoder_layers=4)
    train.checkpoint_activations(model)
    after, part = step(model.train(), *batch)
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and part < whole / 2


def test_a_compiled_run_compiles_in_its_first_steps_only_and_equals_the_eager_one(corpus, tmp_path, monkeypatch):
    compile_module = torch.nn.Module.compile

    def end(name, *flags):
        losses = []
        original = train.train_step

        def step(*arguments):
            torch.compiler.set_stance("fail_on_recompile" if len(losses) > 2 else "default")
            losses.append(float(original(*arguments)))
            return torch.tensor(losses[-1])

        monkeypatch.setattr(train, "train_step", step)
        monkeypatch.setattr(maelm.MAELM, "compile", partialmethod(compile_module, backend="aot_eager"))
        short_run(corpus, tmp_path / name, "--max-steps", "7", "--eval-interval", "2", "--dropout", "0", *flags)
        monkeypatch.setattr(train, "train_step", original)
        torch.compiler.set_stance("default")
        return losses

    torch.testing.assert_close(end("compiled", "--compile", "on"), end("eager"), rtol=1e-5, atol=0)


def test_an_estimate_states_what_a_run_takes_without_making_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main("--preset base --estimate --devices 64 --mfu 0.4 --peak 300".split())
    printed = capsys.readouterr().out
    work = train.flops(maelm.Config()) * 2048 * 125_000
    assert f"{work / 64 / 300e12 / 0.4 / 3600:,.1f} hours" in printed and "131.1 G tokens" in printed
    assert f"{sum(p.numel() for p in maelm.MAELM(maelm.Config()).parameters()):,}, of which" in printed
    assert "1 micro-batches of 32 on each of 64 devices" in printed and not list(tmp_path.iterdir())


@catches("train.memory", "tokens_predicted(config, n)", "config.masks_per_row(n)")
def test_memory_counts_the_logits_of_all_positions_that_have_a_loss():
    uni, cross = [train.memory(tiny(decoder_cross=True, decoder_self=name), train.TrainConfig(), 0, rows=1)[1]
                  for name in ("uni", "none")]
    n, k, V = tiny().seq_len, tiny().masks_per_row(tiny().seq_len), tiny().vocab_size
    assert uni - cross == 10 * (n - 1 - k) * V


# ---- The command ----------------------------------------------------------------------------------------------------
@catches("maelm.Config.__post_init__", "not self.decoder_cross", "True")
def test_a_decoder_that_is_not_there_has_no_self_attention_of_its_own():
    """The "uni" decoder predicts the whole row; an MLM's encoder would be asked for tokens that it reads."""
    with pytest.raises(ValueError, match="decoder_cross=True: without a decoder"):
        tiny(mask_in_encoder=1.0, decoder_layers=0, decoder_self="uni", decoder_cross=True)


@catches("maelm.MAELM.init_parameters", 'config.init_std if config.decoder_self == "uni" else ', "")
@catches("maelm.MAELM.init_parameters", "else config.decoder_position_std", "else 1.0")
def test_position_waves_are_as_large_as_embeddings_and_in_the_decoder_as_stated():
    for name, size in (("bi", 0.25), ("none", 0.25), ("uni", 0.05)):
        model = maelm.MAELM(tiny(position_init="sinusoid", init_std=0.05, decoder_position_std=0.25, decoder_self=name,
                                 decoder_cross=True))
        deviations = [part.position_embedding.weight.square().mean().sqrt().item() for part in (model.encoder, model.decoder)]
        assert deviations == pytest.approx([0.05, size], rel=1e-3)


def test_default_preset_ablation_flag_in_rising_precedence():
    config, recipe, _ = train.parse("--preset base++ --ablation enc-mask --encoder-layers 6 --seed 3".split())
    assert (config.vocab_size, config.mask_in_encoder, config.encoder_layers, config.seq_len) == (64000, 1.0, 6, 512)
    assert (recipe.learning_rate, recipe.seed, recipe.batch_size) == (2e-4, 3, 2048)
    config, _, _ = train.parse(["--ablation", "enc-mask-dec-resets", "--no-decoder-reset"])
    assert config == train.parse(["--ablation", "enc-mask"])[0]


def test_presets_are_table_4():
    table = {"base": (125_000, 5e-4, 32, 128, 2.0), "base++": (2_000_000, 2e-4, 64, 128, 2.0),
             "large++": (1_000_000, 1e-4, 128, 256, 1.0)}
    for name, expected in table.items():
        c, t, _ = train.parse(["--preset", name])
        assert (t.max_steps, t.learning_rate, c.rel_pos_buckets, c.rel_pos_max_distance, t.clip_norm) == expected
        assert (t.batch_size, t.warmup_steps, t.weight_decay, t.optimizer) == (2048, 10_000, 0.01, "adamw")
        assert (t.adam_epsilon, t.adam_beta1, t.adam_beta2) == (1e-6, 0.9, 0.98)
        assert (c.dropout, c.mask_rate, c.seq_len, c.norm) == (0.1, 0.15, 512, "post")
        assert (c.decoder_layers, c.init_std) == (4, 0.02)
        assert c.decoder_dim == c.encoder_dim and t.uncased == (name == "base")


@pytest.mark.parametrize("flags, message", [
    (["--encoder-layer", "3"], "unknown flag --encoder-layer; the flags are .*--encoder-layers"),
    (["--preset", "huge"], "invalid choice: 'huge' .*toy.*large"),
    (["--ablation", "bert"], "invalid choice: 'bert' .*mae-lm.*dec-1024"),
    (["--max-steps", "many"], "--max-steps: invalid int value: 'many'"),
    (["--init", "out/toy"], "out/toy: no such run folder"), (["--estimate", "--mfu", "nan"], "--mfu nan: use a positive"),
    (["--estimate", "--preset", "base", "--devices", "6"], "batch_size=2048 is not a multiple of 6 processes; change --batch-size"),
    (["--ablation", "mae-lm", "--bert-trick"], "bert_trick=True: needs mask_in_encoder > 0"), (["--out", ""], "--out: the name is empty"),
    (["--max-steps", "1" * 8], "max_steps=11111111: use less than"),
    (["--init-std", "-1"], "init_std=-1.0: "), (["--seed", "9" * 20], "use 0 <= seed < 2"),
    (["--norm", "mid"], "norm='mid': "),
    (["--optimizer", "sgd"], "optimizer='sgd': use adamw or muon"),
    (["--warmup-steps", "1000000"], "warmup_steps=1000000: it exceeds max_steps="),
    (["--batch-size", "0"], "batch_size=0: use a positive number"),
    (["--encoder-heads", "0", "--ablation", "dec-512"], "encoder_heads=0: "),
    (["--ablation", "dec-6"], "decoder_layers=1.5: dec-6 has 6 .* base's 4, and toy has 1; give --decoder-layers"),
    (["--resume", "--out", "no/such/run"], "--resume: no/such/run holds no run to continue"),
    (["--fill-mask", "a [MASK]", "--init", "no/such/run"], "no/such/run: no such run folder"),
])
def test_a_bad_command_line_gets_one_line(flags, message, capsys):
    assert re.search(message, fails(lambda: train.main(flags), capsys))


@pytest.mark.parametrize("flags, message", [
    (["--micro-batch-size", "3"], "batch_size=8 is not a multiple of micro_batch_size=3 times 1"),
    (["--mask-rate", "0.99"], r"mask_rate=0.99 masks 24 of 24 tokens, but the smallest row has \d+ real tokens"),
    (["--mask-rate", "0.001"], "mask_rate=0.001 masks 0 of 24 tokens"),
])
def test_what_cannot_work_is_found_before_anything_is_written(corpus, tmp_path, flags, message, capsys):
    assert re.search(message, fails(lambda: short_run(corpus, tmp_path / "run", *flags), capsys))
    assert not (tmp_path / "run").exists()


def test_a_full_or_forbidden_disk_is_named(corpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert "choose another" in fails(lambda: short_run(corpus, tmp_path / "file"), capsys)
    usage = train.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert "0.0 GB are free" in fails(lambda: short_run(corpus, tmp_path / "run"), capsys)
    assert not (tmp_path / "run").exists()
    with pytest.raises(data.UserError, match="cannot write .*No space left"):
        with data.atomic(tmp_path / "x"):
            raise OSError(28, "No space left on device")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


@catches("train.check_disk", "coming = last // interval - step // interval", "coming = 1")
@catches("train.check_disk", "if run.train.keep_checkpoints:", "if True:")
@catches("train.check_disk", "run.train.keep_checkpoints + 1 - len(checkpoints(run.out))", "run.train.keep_checkpoints")
def test_there_must_be_room_for_all_checkpoints_to_come(corpus, tmp_path, monkeypatch, capsys):
    usage, one = train.shutil.disk_usage(tmp_path), 12 * 51_648
    out = tmp_path / "run"

    def needs(count, *flags):
        monkeypatch.setattr(train.shutil, "disk_usage", lambda path: usage._replace(free=count * one - 1))
        assert f"{count} checkpoints need 0.0 GB and 0.0 GB are free" in fails(lambda: short_run(corpus, out, *flags), capsys)
        monkeypatch.setattr(train.shutil, "disk_usage", lambda path: usage._replace(free=count * one))
        short_run(corpus, out, *flags)
        capsys.readouterr()

    needs(2, "--keep-checkpoints", "0", "--checkpoint-interval", "2", "--stop-at", "3")
    needs(2, "--keep-checkpoints", "3", "--checkpoint-interval", "1")  # two are there; three stay, and one more for a moment


# ---- One folder, one run --------------------------------------------------------------------------------------------
def copied(finished, folder):
    shutil.copytree(finished[0], folder)
    return folder


@catches("train.check_folder", 'any(out.glob("step_[0-9]*.pt*"))', "False")
def test_checkpoints_without_their_config_are_refused(corpus, finished, tmp_path, capsys):
    out = copied(finished, tmp_path / "run")
    (out / "config.json").unlink()
    for path in run.checkpoints(out)[1:]:
        path.rename(f"{path}.damaged")
    before = contents(out)
    assert "config.json: missing, beside checkpoints" in fails(lambda: short_run(corpus, out), capsys)
    assert contents(out) == before


def contents(folder):
    """The files of a folder, but for its lock, with their bytes."""
    return {path.name: path.read_bytes() for path in visible(folder)}


@catches("train.restore", 'there = state["run"] | state["config"]', 'there = state["config"]',
         change=lambda state: state | {"run": state["run"] | {"seed": 5}})
@catches("train.restore", "strict=True", "strict=False", change=lambda state: state | {"optimizers": []})
@pytest.mark.parametrize("change", [
    lambda state: state | {"run": state["run"] | {"seed": 5}}, lambda state: state | {"run": state["run"] | {"corpus": "other"}},
    lambda state: state | {"optimizers": []}, lambda state: {name: x for name, x in state.items() if name != "optimizers"},
    lambda state: state | {"optimizers": [{}, {}]}, lambda state: state | {"step": 5}, lambda state: state | {"run": 3},
    lambda state: state | {"config": state["config"] | {"mask_rate": 0.3}}, lambda state: state | {"seconds": None},
    lambda state: state | {"model": {name: x[:1] for name, x in state["model"].items()}}])
def test_the_checkpoint_of_another_run_or_a_part_of_one_is_refused(corpus, finished, tmp_path, capsys, change):
    out = copied(finished, tmp_path / "run")
    torch.save(change(finished[1]), out / "step_0000006.pt")
    before = contents(out)
    assert "step_0000006.pt" in fails(lambda: short_run(corpus, out), capsys)
    assert contents(out) == before


@catches("train.check_corpus", "if changed:", "if False:", version="earlier")
@catches("train.check_corpus", 'and "tokenizer" not in there', "and False", version="earlier")
@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_text_that_has_changed_does_not_continue_the_run(tmp_path, capsys, version):
    text = write_corpus(tmp_path / "text.txt")
    command = ["--data", str(text), "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache"), *QUICK, "--val-share", "0.1"]
    train.main([*command, "--stop-at", "3"])
    if version == "earlier":  # no hashes in config.json and in the checkpoint
        config = files.read_json(tmp_path / "run" / "config.json")
        (tmp_path / "run" / "config.json").write_text(json.dumps({name: config[name] for name in ("model", "train")}))
        state = last_checkpoint(tmp_path / "run")
        del state["run"]
        torch.save(state, tmp_path / "run" / "step_0000003.pt")
    before = contents(tmp_path / "run")
    original = text.read_text()
    text.write_text(original.replace("Anna sees", "Anna hears"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        train.main(command)
    assert exit.value.code == 2 and "has changed since; bring it back" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before
    text.write_text(original)
    train.main(command)
    assert "continuing at step 3" in capsys.readouterr().out


@catches("train.open_run", '("uncased", "val_share") if field in stated', '("val_share",) if field in stated')
@catches("train.main", "TRAIN_PRESETS[options.preset] | given", "given")
def test_a_folder_of_shards_must_be_prepared_as_flag_and_preset_say(corpus, tmp_path, capsys):
    cased = tmp_path / "cased"
    data.main(["prepare", "--data", str(corpus[0]), "--out", str(cased), "--vocab-size", "320", "--seq-len", "24", "--val-share", "0.1",
               "--no-uncased"])
    capsys.readouterr()

    def command(folder, *flags):
        return lambda: train.main(["--data", str(folder), "--out", str(tmp_path / "run"), *QUICK, *flags])

    for folder, flags, message in (
            (cased, ["--preset", "base"], "prepared with uncased=False, this run has True: pass --no-uncased or prepare"),
            (corpus[1], ["--preset", "base++"], "prepared with uncased=True, this run has False"),
            (cased, ["--uncased"], "prepared with uncased=False, this run has True"),
            (corpus[1], ["--val-share", "0.2"], "prepared with val_share=0.1, this run has 0.2: pass --val-share 0.1 or")):
        assert message in fails(command(folder, *flags), capsys)
    command(cased)()
    command(cased, "--no-uncased", "--out", str(tmp_path / "other"))()


@catches("train.main", 'held.enter_context(claim_folder(options.out, "run"))', "pass")
def test_a_folder_has_one_run_at_a_time_and_no_other_program(corpus, finished, tmp_path, capsys):
    out = copied(finished, tmp_path / "run")
    with files.claim_folder(out, "run"):
        assert f"process {os.getpid()} on" in fails(lambda: short_run(corpus, out), capsys)
    before = contents(corpus[1])
    assert "was made by data.py prepare" in fails(lambda: short_run(corpus, corpus[1]), capsys)
    assert contents(corpus[1]) == before


def test_a_lost_figure_comes_back(corpus, finished, tmp_path):
    out = copied(finished, tmp_path / "run")
    (out / "loss.png").unlink()
    short_run(corpus, out)
    assert (out / "loss.png").is_file()


@catches("train.restore", 'state.get("logged", 0)', "0")
def test_a_log_that_was_deleted_or_cut_off_is_not_continued(corpus, finished, tmp_path, capsys):
    out = copied(finished, tmp_path / "run")
    (out / "step_0000006.pt").unlink()
    whole = (out / "log.jsonl").read_text().splitlines(keepends=True)
    for left in (None, whole[:2]):
        (out / "log.jsonl").unlink(missing_ok=True)
        if left:
            (out / "log.jsonl").write_text("".join(left))
        error = fails(lambda: short_run(corpus, out), capsys)
        assert "log.jsonl: missing, or cut off before step 3" in error
    (out / "log.jsonl").write_text("".join(whole[:-2]))  # as after a crash behind the checkpoint
    short_run(corpus, out)
    assert len(run.read_log(out)) == len(whole)


# ---- Signals, and several processes ---------------------------------------------------------------------------------
@pytest.mark.parametrize("stage, number", [("open_corpus", signal.SIGTERM), ("evaluate", signal.SIGINT),
                                           ("draw_loss", signal.SIGTERM), ("examples", signal.SIGINT)])
def test_a_signal_at_any_stage_gets_one_line_and_its_code(corpus, finished, tmp_path, monkeypatch, capsys, stage, number):
    def interrupted(*arguments):
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr(train, stage, interrupted)
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, tmp_path / "run")
    assert exit.value.code == 128 + number
    assert capsys.readouterr().err == "train.py: interrupted; the same command continues\n"
    monkeypatch.undo()
    assert same(short_run(corpus, tmp_path / "run"), finished[1])


@catches("run.Interrupt.say", "except BrokenPipeError:", "except ZeroDivisionError:")
def test_a_reader_of_stdout_that_goes_away_ends_the_run_with_a_checkpoint(corpus, tmp_path, monkeypatch):
    let_use(train, run, monkeypatch)
    before = os.dup(1)
    reader, writer = os.pipe()
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    original = train.train_step

    def step(*arguments):
        if arguments[3] == 2:
            os.close(reader)
        return original(*arguments)

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, out, "--max-steps", "1000", "--checkpoint-interval", "1000")
    os.close(before)
    assert exit.value.code == 141 and len(run.checkpoints(out)) == 1
    assert last_checkpoint(out)["step"] == run.read_log(out)[-1]["step"] < 10


def two_processes(tmp_path, patch, *flags):
    """Run train.py twice under torchrun, with the code `patch` in each process before; returns exit code and what our
    processes said on stderr: torchrun's own report has times, and what came before it."""
    program = tmp_path / "program.py"
    places = [str(HERE), str(Path(run.__file__).parent)]
    program.write_text(f"import os, sys\nsys.path[:0] = {places!r}\nimport {run.__name__} as run\nsys.modules['run'] = run\n"
                       f"import maelm, train\n"
                       f"rank = int(os.environ['RANK'])\n{patch}\nif __name__ == '__main__':\n    train.main()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    said, _, _ = done.stderr.partition("torch/distributed/elastic")
    ours = [line for line in said.splitlines() if "train.py: " in line or "Error" in line or "Traceback" in line]
    return done.returncode, ours, done.stderr


@catches("run.first_alone", "if rank > 0:", "if rank > 2:", patch="",
         flags=["--encoder-layers", "0"], message="encoder_layers=0: ")
@pytest.mark.parametrize("patch, flags, message", [
    ("", ["--encoder-layers", "0"], "encoder_layers=0: "),
    # Losses of one process are not finite: both stop.
    ("f = maelm.MAELM.forward\nmaelm.MAELM.forward = lambda m, *x: f(m, *x) * (float('nan') if m.training and rank == 1 else 1)",
     ["--precision", "fp32"], "step 1: the gradient is not finite, nor is the loss of 1 of its micro-batches; the first has the"),
    # Only the first process finds the checkpoint.
    ("if rank == 1:\n    train.load_checkpoint = lambda *x, **y: None", ["--max-steps", "6"],
     "not all processes continue from the same checkpoint: process 0 step 3, process 1 step 0"),
    # The first one cannot save; the other one loses its connection.
    ("def fail(*x): raise run.UserError('cannot write it')\ntrain.save_checkpoint = fail", ["--max-steps", "6"], "cannot write it"),
], ids=["flag", "nan", "checkpoints", "disk"])
def test_of_several_processes_one_says_what_is_wrong_and_all_end(corpus, tmp_path, patch, flags, message):
    out = tmp_path / "run"
    if "checkpoint" in message:
        short_run(corpus, out, "--stop-at", "3")
    code, ours, everything = two_processes(tmp_path, patch, "--data", str(corpus[1]), "--out", str(out), *QUICK, *flags)
    assert code != 0 and len(ours) == 1 and message in ours[0], everything


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
