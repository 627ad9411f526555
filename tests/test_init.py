"""Claims about train.py --init: pre-training that begins with the weights of another run."""
import shutil

import numpy as np
import pytest
import torch
import transformers

import convert
import data
import files
import maelm
import rank
import run
import train
from conftest import (MODEL, QUICK, catches, fails, last_checkpoint, one_place, run_with_wrong_version,
                      same, tiny, wrong_versions, write_corpus, write_hub_model)

SHORT = [flag for flag in QUICK[len(MODEL):]]  # without the shape, which is the run's


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The folder of a random RoBERTa, and the run folder that convert.py makes of it."""
    folder = tmp_path_factory.mktemp("imported")
    write_hub_model(folder / "hub")
    convert.main(["import", str(folder / "hub"), str(folder / "roberta")])
    write_corpus(folder / "text.txt", 100)
    return folder


def begin(init, out, text, *flags):
    """Pre-train briefly from the weights of a run; returns the last checkpoint."""
    train.main(["--init", str(init), "--data", str(text), "--out", str(out), "--cache", str(out.parent / "cache"),
                "--val-share", "0.1", *SHORT, *flags])
    return last_checkpoint(out)


# ---- Where it begins -------------------------------------------------------------------------------------------------
def test_ten_steps_from_an_imported_roberta_begin_at_the_loss_of_transformers(imported, tmp_path):
    begin(imported / "roberta", tmp_path / "out", imported / "text.txt", "--dropout", "0", "--max-steps", "10")
    first = next(line for line in files.read_lines(tmp_path / "out/log.jsonl") if "loss" in line)
    # The batch of the first step, in their ids.
    theirs = transformers.RobertaForMaskedLM.from_pretrained(imported / "hub").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(imported / "hub")
    _, order = convert.read_tokenizer("hub", their_tokenizer, theirs.config.vocab_size)
    config, recipe, options = train.parse(["--init", str(imported / "roberta"), *SHORT])
    rows = data.Rows(next((tmp_path / "cache").iterdir()), "train", config.vocab_size, config.seq_len)
    tokens, corruption = train.batch_of_step(0, rows, config, recipe, one_place())
    labels = torch.where(corruption.masked, order[tokens], -100)
    with torch.no_grad():
        want = theirs(input_ids=order[corruption.tokens], labels=labels).loss
    assert abs(first["loss"] - float(want)) < 1e-4
    steps = [line["step"] for line in files.read_lines(tmp_path / "out/log.jsonl") if "loss" in line]
    assert steps == list(range(1, 11))


@catches("train.take_weights", "nn.init.zeros_(model.encoder.bias.table.weight)", "pass")
@catches("train.take_weights", "model.load_state_dict(taken, strict=False)", "pass")
def test_relative_positions_that_are_added_change_nothing_at_the_start():
    torch.manual_seed(0)
    before = maelm.MAELM(tiny(rel_pos_buckets=0, mask_in_encoder=1.0, decoder_layers=0)).eval()
    flags = dict(rel_pos_buckets=32, rel_pos_max_distance=128)
    model = maelm.MAELM(train.config_from(before.config, "mae-lm", flags)).eval()
    said = train.take_weights(model, before)
    tokens = torch.randint(4, 300, (2, 24))
    positions = torch.arange(24)[None]
    for a, b in zip(before.encoder(tokens, positions, all_layers=True), model.encoder(tokens, positions, all_layers=True)):
        assert torch.equal(a, b)
    assert "new: encoder.bias.table, decoder.position_embedding.weight" in said and "left behind: nothing" in said


@catches("train.take_weights", "and x.shape == here[name].shape", "and not name.startswith('head')")
@catches("train.take_weights", "if name not in taken]", "if name in taken]")
def test_what_fits_is_taken_and_the_rest_is_named():
    torch.manual_seed(0)
    before = maelm.MAELM(tiny())  # two layers in its decoder
    for ablation, fields, new, left in (
            ("mae-lm", {}, "nothing", "nothing"),
            ("mae-lm", dict(decoder_layers=3), "decoder.blocks.2", "nothing"),
            ("mlm", {}, "nothing", "decoder.position_embedding.weight, decoder.norm.weight, decoder.norm.bias, "
                                   "decoder.blocks.0, decoder.blocks.1"),
            ("mae-lm", dict(decoder_dim=16), None, None)):
        model = maelm.MAELM(train.config_from(before.config, ablation, fields))
        fresh = {name: x.clone() for name, x in model.state_dict().items()}
        said = train.take_weights(model, before)
        if new is not None:
            assert said == f"new: {new}; left behind: {left}"
        else:
            assert "new: decoder.project.weight" in said and "head.transform.0" in said and "encoder" not in said
        there = before.state_dict()
        for name, weight in model.state_dict().items():
            fits = name in there and there[name].shape == weight.shape
            assert torch.equal(weight, there[name] if fits else fresh[name]), name


def test_a_run_says_what_it_begins_with_and_reads_its_corpus_with_that_tokenizer(imported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(imported / "roberta", "out/roberta")
    train.main(["--init", "out/roberta", "--data", str(imported / "text.txt"), "--ablation", "mae-lm", "--cache", "cache",
                "--val-share", "0.1", *SHORT])
    out = tmp_path / "out/roberta-mae-lm"  # its name, unless there is an --out
    said = capsys.readouterr().out
    assert "the weights are those of out/roberta; new: decoder.position_embedding.weight" in said
    settings = files.read_json(out / "config.json")
    assert settings["train"]["init"] == "out/roberta" and not settings["train"]["uncased"]
    assert settings["init_weights"] == files.file_hash(tmp_path / "out/roberta/step_0000000.pt")
    assert settings["model"]["decoder_layers"] == 1 and settings["model"]["mask_in_encoder"] == 0
    assert settings["model"]["rel_pos_buckets"] == 0
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "out/roberta/tokenizer.json").read_bytes()
    shard = np.load(next((tmp_path / "cache").rglob("train-*.npy")))
    assert "the cat" in data.Tokenizer.load(out).decode(shard[0])
    # Other programs read the same rows.
    made = sorted(path.name for path in (tmp_path / "cache").iterdir())
    subject = rank.run_subject(str(out), rank.RankConfig(), one_place())
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == made
    assert "number" in data.Tokenizer.load(out).decode(subject.rows[np.array([0])][0])


# ---- What decides its shape ------------------------------------------------------------------------------------------
@catches("train.config_from", "if ablation is None:", "if False:")
@catches("train.config_from", '"mask_rate")', '"norm")')
@catches("train.config_from", "max(1, min(4, there.encoder_layers // 3))", "4")
def test_the_shape_is_that_runs_and_an_ablation_decides_about_masks_and_decoder():
    there = tiny(mask_in_encoder=1.0, decoder_layers=0, dropout=0.3, norm="pre")
    assert train.config_from(there, None, {}) == there
    assert train.config_from(there, None, dict(dropout=0.0)) == tiny(mask_in_encoder=1.0, decoder_layers=0, norm="pre")
    assert train.config_from(there, "mae-lm", {}) == tiny(decoder_layers=1, dropout=0.3, norm="pre")
    assert train.config_from(there, "bi+cross", dict(decoder_layers=2)) == tiny(decoder_cross=True, dropout=0.3, norm="pre")
    for layers, decoder in ((3, 1), (6, 2), (12, 4), (24, 4)):  # those of the presets
        assert train.config_from(tiny(encoder_layers=layers, mask_in_encoder=1.0, decoder_layers=0), "mae-lm",
                                 {}).decoder_layers == decoder
    assert train.config_from(tiny(decoder_layers=2), "mae-lm", {}).decoder_layers == 2
    assert train.config_from(tiny(), "dec-512", {}).decoder_dim == 24  # heads of 8: two thirds of 32, in whole ones
    assert train.config_from(tiny(bert_trick=True, mask_in_encoder=1.0), "mae-lm", {}) == tiny()


@catches("train.config_from", "if flags.get(name, has) != has and not may_be_added:", "if False:")
@catches("train.config_from", "if config.rel_pos_buckets == 0 < there.rel_pos_buckets:", "if False:")
def test_what_contradicts_the_weights_is_refused():
    for name in train.SHAPE:
        value = {"norm": "pre", "rel_pos_max_distance": 256, "encoder_heads": 2}.get(name, 2 * getattr(tiny(), name))
        with pytest.raises(ValueError, match=f"{name}=.*leave this flag out"):
            train.config_from(tiny(), None, {name: value})
        train.config_from(tiny(), None, {name: getattr(tiny(), name)})
    with pytest.raises(ValueError, match="no-relative: the weights of --init have relative positions"):
        train.config_from(tiny(), "no-relative", {})


@pytest.mark.parametrize("flags, message", [
    (["--encoder-layers", "3"], "encoder_layers=3: the weights of --init have encoder_layers=2"),
    (["--seq-len", "12"], "seq_len=12"), (["--vocab-size", "400"], "vocab_size=400"), (["--norm", "pre"], "norm='pre'"),
    (["--uncased"], "uncased=True: the tokenizer of --init has False"), (["--ablation", "dec-7"], "invalid choice"),
    (["--init", "no/such"], "no/such: no such run folder"), (["--init", ""], "--init: the name is empty"),
    (["--init", "hf:roberta-base"], "first python convert.py import hf:roberta-base FOLDER"),
    (["--data", "other"], "prepared with another tokenizer than that of --init"),
    (["--decoder-layers", "3", "--decoder-self", "uni"], "needs decoder_cross")])
def test_bad_flags_get_one_line_before_anything_is_written(flags, message, imported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "--data" in flags:
        vocab_size = str(run.load_model(imported / "roberta")[0].config.vocab_size)
        data.main(["prepare", "--data", str(imported / "text.txt"), "--out", "other", "--vocab-size", vocab_size,
                   "--seq-len", "24", "--no-uncased", "--val-share", "0.1"])
        capsys.readouterr()
    command = ["--init", str(imported / "roberta"), "--data", str(imported / "text.txt"), "--out", "out", *SHORT, *flags]
    assert message in fails(lambda: train.main(command), capsys)
    assert not (tmp_path / "out").exists()


@catches("data.first_pass", "if tokenizer is None:", "if True:")
@catches("data.tokenizer_hash", "if len(there) > vocab_size or there.uncased != uncased:", "if False:")
def test_a_corpus_is_prepared_with_a_given_tokenizer(imported, tmp_path, capsys):
    size = str(run.load_model(imported / "roberta")[0].config.vocab_size)
    command = ["prepare", "--data", str(imported / "text.txt"), "--out", str(tmp_path / "shards"), "--seq-len", "24",
               "--val-share", "0.1", "--tokenizer", str(imported / "roberta")]
    for flags in (["--vocab-size", size], ["--no-uncased", "--vocab-size", "261"]):
        assert "its tokenizer needs --no-uncased and --vocab-size 3" in fails(lambda: data.main([*command, *flags]), capsys)
    data.main([*command, "--no-uncased", "--vocab-size", size])
    assert (tmp_path / "shards/tokenizer.json").read_bytes() == (imported / "roberta/tokenizer.json").read_bytes()
    assert "--tokenizer RUN" in data.mending(tmp_path / "shards", data.read_meta(tmp_path / "shards"))
    begin(imported / "roberta", tmp_path / "out", tmp_path / "shards")
    # Another tokenizer into the same folder is another corpus.
    del command[-2:]
    capsys.readouterr()
    assert "given=" in fails(lambda: data.main([*command, "--no-uncased", "--vocab-size", size]), capsys)


# ---- Continuing ------------------------------------------------------------------------------------------------------
@catches("train.open_run", "start.weights if start is not None else None", "None")
@catches("train.check_folder", '{"init_weights": None} | saved', '{"init_weights": settings["init_weights"]}')
def test_the_same_command_continues_bitwise_and_other_weights_are_refused(finished, corpus, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path / "first")
    whole = begin(tmp_path / "first", tmp_path / "whole", corpus[1], "--ablation", "mlm")
    assert whole["config"]["decoder_layers"] == 0 and whole["step"] == 6
    begin(tmp_path / "first", tmp_path / "half", corpus[1], "--ablation", "mlm", "--stop-at", "3")
    assert same(begin(tmp_path / "first", tmp_path / "half", corpus[1], "--ablation", "mlm"), whole)
    # From elsewhere, the same weights are the same; an earlier checkpoint is not, nor are random weights.
    (tmp_path / "first").rename(tmp_path / "moved")
    capsys.readouterr()
    begin(tmp_path / "moved", tmp_path / "half", corpus[1], "--ablation", "mlm")
    assert "nothing to do" in capsys.readouterr().out
    earlier = tmp_path / "moved/step_0000003.pt"
    error = fails(lambda: begin(earlier, tmp_path / "half", corpus[1], "--ablation", "mlm"), capsys)
    assert "init_weights=" in error and "choose another --out" in error
    plain = ["--data", str(corpus[1]), "--out", str(tmp_path / "half"), *QUICK, "--val-share", "0.1"]
    assert "init_weights=" in fails(lambda: train.main([*plain, "--ablation", "mlm"]), capsys)
    for checkpoint in (tmp_path / "half").glob("step_*.pt"):  # as if it had stopped before its first one
        checkpoint.unlink()
    assert "init_weights=" in fails(lambda: train.main([*plain, "--ablation", "mlm"]), capsys)
    started = ["--init", str(tmp_path / "moved"), *plain]
    error = fails(lambda: train.main([*started[:-2], "--out", str(tmp_path / "moved")]), capsys)
    assert "init_weights=None there" in error


def test_continued_training_begins_where_the_run_ended_with_a_new_schedule(finished, corpus, tmp_path):
    begin(finished[0], tmp_path / "more", corpus[1], "--learning-rate", "1e-9", "--muon-learning-rate", "1e-9")
    last = [line["val_loss"] for line in files.read_lines(finished[0] / "log.jsonl") if "val_loss" in line][-1]
    first = next(line["val_loss"] for line in files.read_lines(tmp_path / "more/log.jsonl") if "val_loss" in line)
    assert first == last
    rates = [line["lr"] for line in files.read_lines(tmp_path / "more/log.jsonl") if "lr" in line]
    assert rates[0] < rates[1] and len(rates) == 6


# ---- Wrong versions --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
