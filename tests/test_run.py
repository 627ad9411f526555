"""Claims about run.py: the machine a run is on, the folder it leaves, the encoder it ends with."""
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import data
import maelm
import rank
import run
import train
from conftest import (HERE, QUICK, catches, fails, one_place, rank_json, run_with_wrong_version, same, sentence,
                      short_run, svd_ranks, wrong_versions)


# ---- Checkpoints ----------------------------------------------------------------------------------------------------
def test_a_damaged_checkpoint_is_passed_over(corpus, finished, tmp_path, capsys):
    for i, damage in enumerate((lambda b: b[:len(b) // 2], lambda b: b[:9000] + bytes([b[9000] ^ 255]) + b[9001:])):
        out = tmp_path / str(i)
        shutil.copytree(finished[0], out)
        newest = out / "step_0000006.pt"
        newest.write_bytes(damage(newest.read_bytes()))
        assert same(short_run(corpus, out), finished[1])
        assert "step_0000006.pt is damaged" in capsys.readouterr().err


def start(corpus, out, *flags):
    command = [sys.executable, "train.py", "--data", str(corpus[1]), "--out", str(out), *QUICK, *flags]
    return subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def test_sigterm_saves_a_checkpoint_and_says_how_to_go_on(corpus, tmp_path):
    out = tmp_path / "run"
    process = start(corpus, out, "--max-steps", "100000", "--checkpoint-interval", "100000")
    wait_for(lambda: len(run.read_log(out)) > 4)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "the same command continues" in text
    step = torch.load(run.checkpoints(out)[-1], weights_only=True)["step"]
    assert step == run.read_log(out)[-1]["step"]


def test_a_run_that_is_killed_while_saving_can_be_continued(corpus, tmp_path):
    out = tmp_path / "run"
    for kill in range(3):
        process = start(corpus, out, "--max-steps", "100000", "--checkpoint-interval", "1", "--keep-checkpoints", "2")
        before = {p.name for p in run.checkpoints(out)}
        wait_for(lambda: {p.name for p in run.checkpoints(out)} - before)  # noqa: B023, called at once
        end = time.monotonic() + 0.01 * kill
        wait_for(lambda: list(out.glob(".step*.tmp")) or time.monotonic() > end)  # noqa: B023
        process.kill()
        process.wait()
        saved = run.checkpoints(out)
        assert run.load_checkpoint(out, torch.device("cpu"))["step"] == int(saved[-1].stem[5:])
        assert run.read_log(out)


# ---- Run folders and flags ------------------------------------------------------------------------------------------
def test_another_run_is_refused_with_the_fields_that_differ(corpus, finished, capsys):
    error = fails(lambda: short_run(corpus, finished[0], "--mask-rate", "0.3", "--seed", "2"), capsys)
    assert "mask_rate=0.15 there, 0.3 here; seed=0 there, 2 here" in error


@catches("data.compare_runs", "there.get(name) != value", "name not in there")
def test_a_folder_of_other_settings_is_refused_in_the_same_words_by_every_program(corpus, finished, tmp_path, capsys):
    import finetune
    (tmp_path / "task").mkdir()
    for part in ("train", "dev"):
        rows = [json.dumps({"text": sentence(i), "label": i % 2}) for i in range(8)]
        (tmp_path / "task" / f"{part}.jsonl").write_text("\n".join(rows))
    prepare = ["prepare", "--data", str(corpus[0]), "--out", str(corpus[1]), "--seq-len", "99"]
    tune = ["--init", str(finished[0]), "--task", "custom", "--data", str(tmp_path / "task"), "--seeds", "1",
            "--epochs", "1", "--out", str(tmp_path / "tuned")]
    finetune.main(tune)
    for out, command in (
            (corpus[1], lambda: data.main(prepare)),
            (finished[0], lambda: short_run(corpus, finished[0], "--seed", "99")),
            (tmp_path / "tuned", lambda: finetune.main([*tune, "--seq-len", "20"]))):
        capsys.readouterr()
        error = fails(command, capsys)
        assert f"{out} was made with other settings: " in error
        assert re.search(" there, .* here; choose another --out$", error.strip()), error


def test_every_field_is_a_flag_with_its_comment_in_the_help(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    text = " ".join(capsys.readouterr().out.split())
    for config in (maelm.Config, train.TrainConfig):
        for field in dataclasses.fields(config):
            assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "delta of Figure 4: share of masked positions that the encoder reads [0.0]" in text


# ---- Encoders of run folders and of the Hub -------------------------------------------------------------------------
def test_checkpoints_prepared_data_and_fine_tuned_folders_are_read(corpus, finished, tmp_path):
    text, folder = corpus
    flags = ["--data", text, "--val-share", 1]
    newest = rank_json(tmp_path / "a", finished[0], *flags)["models"].popitem()[1]
    assert rank_json(tmp_path / "b", finished[0] / "step_0000006.pt", *flags)["models"].popitem()[1] == newest
    older = rank_json(tmp_path / "b", finished[0] / "step_0000003.pt", *flags)["models"].popitem()[1]
    assert older != newest and older["n"] == newest["n"]
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    state = finished[1]
    weights = {name.removeprefix("encoder."): x for name, x in state["model"].items() if name.startswith("encoder.")}
    torch.save({"encoder": weights, "config": state["config"]}, tuned / "encoder.pt")
    shutil.copy(finished[0] / "tokenizer.json", tuned)
    assert rank_json(tmp_path / "c", tuned, *flags)["models"].popitem()[1] == newest
    # The run's own validation rows are too few: lend it the others.
    meta = json.loads((folder / "meta.json").read_text())
    whole = tmp_path / "shards"
    shutil.copytree(folder, whole)
    (whole / "meta.json").write_text(json.dumps(meta | {"val": meta["train"]}))
    found = rank_json(tmp_path / "d", finished[0], "--data", whole)["models"].popitem()[1]
    assert found["n"]["with_mask"] == 24 * meta["train"][0][1]


SIZE = dict(vocab_size=200, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            pad_token_id=1)
HUB = {  # family: (configuration class, its fields)
    "roberta": ("RobertaConfig", SIZE | dict(max_position_embeddings=34)),
    "bert": ("BertConfig", SIZE | dict(max_position_embeddings=32)),
    "albert": ("AlbertConfig", SIZE | dict(embedding_size=8, max_position_embeddings=32)),
    "electra": ("ElectraConfig", SIZE | dict(embedding_size=8, max_position_embeddings=32)),
    "bart": ("BartConfig", dict(
        vocab_size=200, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, bos_token_id=0,
        pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)),
    "deberta": ("DebertaV2Config", SIZE | dict(
        max_position_embeddings=32, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)),
    "modernbert": ("ModernBertConfig", SIZE | dict(
        max_position_embeddings=32, bos_token_id=0, cls_token_id=0, eos_token_id=2, sep_token_id=2, local_attention=8)),
}


def hub_folder(folder, name, fields, mask=True):
    """A tiny random model of a configuration class and a tokenizer that puts special tokens around a row and states no
    limit, saved as transformers does."""
    import tokenizers
    import transformers
    torch.manual_seed(0)
    transformers.AutoModel.from_config(getattr(transformers, name)(**fields)).save_pretrained(folder)
    specials = ["<s>", "<pad>", "</s>", "<mask>", "<unk>"]
    words = [*specials, *(f"w{i}" for i in range(150)), "a"]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = dict(cls_token="<s>", pad_token="<pad>", sep_token="</s>", unk_token="<unk>")
    names |= {"mask_token": "<mask>"} if mask else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names).save_pretrained(folder)


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "words.txt"
    random = np.random.default_rng(0)
    path.write_text("\n\n".join(" ".join(f"w{i}" for i in random.integers(0, 150, 25)) + " <mask>" for _ in range(120)))
    return path


@pytest.mark.parametrize("family", HUB)
def test_encoders_of_the_hub_are_measured_with_their_own_tokens(family, words, tmp_path):
    import transformers
    hub_folder(tmp_path / "model", *HUB[family])
    name = f"hf:{tmp_path / 'model'}"
    _, config = rank.read_options([name, "--data", str(words), "--val-share", "1"])
    subject = rank.hub_subject(name, config, one_place())
    assert (subject.seq_len, subject.dim, subject.mask, subject.specials) == (32, 16, 3, [0, 1, 2, 3])
    assert (subject.rows[:, 0] == 0).all() and (subject.rows[:, -1] == 2).all() and not (subject.rows == 3).any()
    found = rank.as_json(rank.analyse(subject, config, one_place())[0])
    assert len(found["layers"]) == 3 and found["n"]["mask_only"] == 5 * len(subject.rows)
    model = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    model = model.get_encoder() if family == "bart" else model
    with torch.no_grad():
        h = model(torch.from_numpy(subject.rows)).last_hidden_state.flatten(0, 1).numpy()
    for centering, centered in rank.CENTERINGS.items():
        assert found["layers"][-1][centering]["without_mask"]["0.9"] == svd_ranks(h, centered)[0][2]


POSITIONS = {"BertConfig": 34, "RobertaConfig": 32, "CamembertConfig": 32, "XLMRobertaConfig": 32, "MPNetConfig": 32,
             "DistilBertConfig": 34, "ElectraConfig": 34}  # of a table of 34 rows, with padding id 1


@catches("run.positions_of", "if table.padding_idx is None", "if True", name="CamembertConfig")
@catches("run.positions_of", "if table.padding_idx is None", 'if "roberta" not in model.config.model_type',
         name="MPNetConfig")
@catches("run.positions_of", "table.num_embeddings - first", "table.num_embeddings - 2", name="BertConfig")
@pytest.mark.parametrize("name", POSITIONS)
def test_an_encoder_of_the_hub_reads_as_many_tokens_as_it_has_positions(name, tmp_path):
    fields = SIZE | dict(max_position_embeddings=34)
    if name == "DistilBertConfig":
        fields |= dict(dim=16, hidden_dim=32, n_layers=2, n_heads=2)
    hub_folder(tmp_path, name, fields)
    found = run.open_hub(f"hf:{tmp_path}")
    assert found.tokenizer.model_max_length > 10 ** 6 and found.seq_len == POSITIONS[name]
    tokens = torch.full((1, found.seq_len + 1), 7)
    with torch.no_grad():
        assert found.model(tokens[:, 1:]).last_hidden_state.shape == (1, found.seq_len, 16)
        with pytest.raises((IndexError, RuntimeError)):
            found.model(tokens)


def test_a_hub_model_without_mask_token_is_refused(words, tmp_path, capsys):
    hub_folder(tmp_path / "model", *HUB["bert"], mask=False)
    error = fails(lambda: rank.main([f"hf:{tmp_path / 'model'}", "--data", str(words), "--val-share", "1"]), capsys)
    assert "has no mask token" in error


def test_without_transformers_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(lambda: rank.main(["hf:roberta-base"]), capsys)


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
