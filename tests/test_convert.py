"""Claims about convert.py and modeling_maelm.py: what transformers computes from a folder of ours is what we compute,
and the other way round."""
import json
import re
import shutil
import stat
import sys
import sysconfig
import unicodedata
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import convert
import data
import files
import maelm
import run
import train
from conftest import (HERE, catches, fails, generator, model_and_batch, randomize, run_with_wrong_version, sentence, tiny,
                      write_hub_model, wrong_versions)

NATIVE = dict(norm="post", mask_in_encoder=1.0, decoder_layers=0, encoder_heads=2, vocab_size=320)  # a standard MLM
LONG = dict(seq_len=160)  # beyond the last bucket
TRUST = dict(trust_remote_code=True)


@pytest.fixture(scope="module", autouse=True)
def module_cache(tmp_path_factory):
    """transformers keeps the code that it loads, and imports it from there: here, from a folder of these tests."""
    patch = pytest.MonkeyPatch()
    folder = str(tmp_path_factory.mktemp("modules"))
    patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
    patch.syspath_prepend(folder)
    yield
    patch.undo()


def write_run(folder, shards, **fields):
    """A run folder with random weights of this configuration (pre-LN, unless it says otherwise) and the tokenizer of `shards`; returns its model."""
    model = randomize(maelm.MAELM(tiny(**{"vocab_size": 320, "encoder_heads": 2, "norm": "pre"} | fields)), 0.2).eval()
    state = {"step": 7, "config": asdict(model.config), "model": model.state_dict()}
    run.write_tensors(run.checkpoint_path(folder, 7), state)
    shutil.copy(shards / "tokenizer.json", folder)
    settings = {"data": "deep/text.txt+hf:a/b"}
    files.write_json(folder / "config.json", {"model": asdict(model.config), "train": settings})
    files.append_line(folder / "log.jsonl", {"step": 0, "unigram_entropy": 3.25, "val_loss": 6.0})
    files.append_line(folder / "log.jsonl", {"step": 7, "val_loss": 2.125})
    files.append_line(folder / "log.jsonl", {"step": 8, "val_loss": 9.0})  # after its checkpoint
    return model


def exported(tmp_path, shards, *flags, **fields):
    """Write a run and export it; returns its model and the folder."""
    model = write_run(tmp_path / "run", shards, **fields)
    convert.main(["export", str(tmp_path / "run"), str(tmp_path / "hub"), *flags])
    return model, tmp_path / "hub"


def text_ids(count=3, n=24):
    """Padded texts, tokens (count, n) int64 with [MASK]s, and the attention mask."""
    tokens = torch.randint(maelm.NUM_SPECIAL, 320, (count, n), generator=generator(3))
    tokens[:, 0], tokens[:, 2::5] = maelm.CLS, maelm.MASK
    real = torch.arange(n) < torch.tensor([[n], [n // 2], [4]])[:count]
    return torch.where(real, tokens, maelm.PAD), real


@torch.no_grad()
def hidden_difference(model, theirs, n=24):
    """The largest difference between all hidden states of our encoder and theirs, at tokens that are no padding."""
    tokens, real = text_ids(n=n)
    ours = model.encoder(tokens, torch.arange(n)[None], ~real, all_layers=True)
    found = theirs.eval()(tokens, attention_mask=real.long(), output_hidden_states=True)
    assert torch.equal(found.last_hidden_state, found.hidden_states[-1])
    return max(float((a - b)[real].abs().max()) for a, b in zip(ours, found.hidden_states, strict=True))


@torch.no_grad()
def logits_difference(model, theirs, n=24):
    """The largest difference in the logits at [MASK], text by text without padding, as train.py --fill-mask has them."""
    tokens, real = text_ids(n=n)
    found = theirs.eval()(tokens, attention_mask=real.long()).logits
    largest = 0.0
    for row, length in zip(range(len(tokens)), real.sum(1)):
        text = tokens[row, :length]
        at = (text == maelm.MASK).nonzero()[:, 0]
        corruption = train.masks_at(text, at, model.config, generator(0))
        h = model.encode(corruption, at[None])
        ours = model.logits(model.decode(h, text[None], corruption, at[None]))[0]
        largest = max(largest, float((ours - found[row, at]).abs().max()))
    return largest


# ---- Export: native where that is exact ------------------------------------------------------------------------------
@pytest.mark.parametrize("fields, kind, hidden, logits", [
    (dict(encoder_dim=32), "mpnet", 0.0, 0.0),  # heads of 16, a power of 4: their scale is exact
    (dict(encoder_dim=96), "mpnet", 5e-6, 5e-5),  # heads of 48
    (dict(encoder_dim=32, rel_pos_buckets=0), "roberta", 3.8e-6, 3.8e-5)])
def test_a_post_ln_encoder_is_an_mpnet_or_a_roberta(fields, kind, hidden, logits, corpus, tmp_path):
    model, folder = exported(tmp_path, corpus[1], **NATIVE | LONG | fields)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["model_type"] == kind and "auto_map" not in settings and not (folder / "maelm.py").exists()
    assert hidden_difference(model, transformers.AutoModel.from_pretrained(folder), n=160) <= hidden
    tokens, real = text_ids(n=160)
    with torch.no_grad():
        ours = model.logits(model.encoder(tokens, torch.arange(160)[None], ~real))[real]
        found = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()(tokens, attention_mask=real.long())
    assert (ours - found.logits[real]).abs().max() <= logits


def test_base_is_an_mpnet():
    """With the widths of base, 12 layers and N(0, 0.02), in memory."""
    config = maelm.Config(vocab_size=320, seq_len=160, **maelm.ABLATIONS["mlm"])
    model = randomize(maelm.MAELM(config), 0.02).eval()
    source = convert.Source([], "", model.encoder, model, None, config, "mpnet", "")
    with torch.device("meta"):
        theirs = transformers.MPNetModel(transformers.MPNetConfig(**convert.hub_config(source)), add_pooling_layer=False)
    weights = convert.to_theirs(model.state_dict(), "mpnet", 12, head=False)
    theirs.load_state_dict({name.removeprefix("mpnet."): weight for name, weight in weights.items()}, assign=True)
    assert hidden_difference(model, theirs, n=160) <= 2e-6


def test_mpnet_has_our_buckets_of_32_and_no_others(corpus, tmp_path, capsys):
    distance = torch.arange(-8191, 8192)
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
    assert torch.equal(MPNetEncoder.relative_position_bucket(distance), maelm.relative_bucket(distance, 32, 128))
    write_run(tmp_path / "run", corpus[1], **NATIVE | LONG, rel_pos_buckets=64)
    error = fails(lambda: convert.main(["export", str(tmp_path / "run"), str(tmp_path / "hub"), "--format", "mpnet"]), capsys)
    assert "rel_pos_buckets=64" in error and "use --format maelm" in error
    # Whatever its configuration says: with a table of 64 buckets it reads 32 of them.
    config = tiny(**NATIVE | LONG, rel_pos_buckets=64)
    model = randomize(maelm.MAELM(config), 0.2).eval()
    source = convert.Source([], "", model.encoder, model, None, config, "mpnet", "")
    settings = convert.hub_config(source) | {"relative_attention_num_buckets": 64}
    theirs = transformers.MPNetForMaskedLM(transformers.MPNetConfig(**settings))
    theirs.load_state_dict(convert.to_theirs(model.state_dict(), "mpnet", 2, head=True), strict=False)
    assert hidden_difference(model, theirs.mpnet, n=160) > 1e-3


# ---- Export: with our own code ---------------------------------------------------------------------------------------
PRESETS = {name: {field: value for field, value in fields.items() if field in (
    "norm", "position_init", "rel_pos_buckets", "rel_pos_max_distance")} for name, fields in maelm.PRESETS.items()}


@pytest.mark.parametrize("fields", [*PRESETS.values(), *maelm.ABLATIONS.values(), dict(mask_in_encoder=0.75)],
                         ids=[*PRESETS, *maelm.ABLATIONS, "delta"])
def test_our_own_code_computes_the_same_bit_for_bit_and_fills_in_masks(fields, corpus, tmp_path):
    fields = LONG | {"norm": "post"} | fields | {"decoder_layers": min(2, fields.get("decoder_layers", 2))}
    if fields.get("decoder_dim"):
        fields["decoder_dim"] = {512: 16, 1024: 48}[fields["decoder_dim"]]
    model, folder = exported(tmp_path, corpus[1], "--format", "maelm", **fields)
    assert hidden_difference(model, transformers.AutoModel.from_pretrained(folder, **TRUST), n=160) == 0
    auto = json.loads((folder / "config.json").read_text())["auto_map"]
    if fields.get("decoder_cross") or fields.get("encoder_fill") == "random":
        assert "AutoModelForMaskedLM" not in auto and "the encoder alone" in (folder / "README.md").read_text()
    elif fields.get("mask_in_encoder") != 0.75:  # of several [MASK]s, that one reads a random part
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder, **TRUST)
        assert logits_difference(model, theirs, n=160) < 2e-5  # 3.7e-6 of the largest


def test_half_precision_and_its_padding_work(corpus, tmp_path):
    for fields in ({}, {"rel_pos_buckets": 0}):
        model, folder = exported(tmp_path, corpus[1], **fields)
        tokens, real = text_ids()
        with torch.no_grad():
            want = model.encoder(tokens, torch.arange(24)[None], ~real)[real]
            for dtype, limit in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
                encoder = transformers.AutoModel.from_pretrained(folder, dtype=dtype, **TRUST).eval()
                found = encoder(tokens, attention_mask=real.long()).last_hidden_state
                assert found.dtype == dtype and (found[real].float() - want).norm() < limit * want.norm()
                theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype, **TRUST).eval()
                assert theirs(tokens, attention_mask=real.long()).logits.isfinite().all()
        shutil.rmtree(tmp_path / "run")


@catches("maelm.compute_dtype", "return x.dtype", "return torch.float32")
def test_weights_in_half_precision_compute_in_it():
    model, tokens, corruption = model_and_batch()
    model = model.to(torch.bfloat16)
    assert model.encode(corruption).dtype == torch.bfloat16 and model(tokens, corruption).isfinite()


@catches("maelm.attention", "bias.to(q.dtype) if", "bias if")
def test_on_a_gpu_the_bias_of_half_precision_has_its_dtype(monkeypatch):
    """The fused kernel refuses another one."""
    calls = []

    def fused(q, k, v, attn_mask, dropout_p):
        calls.append(attn_mask.dtype)
        return q

    monkeypatch.setattr(maelm.F, "scaled_dot_product_attention", fused)
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16)
        maelm.attention(q, q, q, torch.empty(2, 1, 1, 8, device="cuda"))
    assert calls == [torch.bfloat16]


@catches("maelm.Decoder.forward", "attention_bias(self.bias, at, positions, padding)", "attention_bias(self.bias, at, positions)")
@catches("maelm.Decoder.forward", "positions, positions, padding)", "positions, positions)")
def test_the_decoder_does_not_read_padding():
    model, _, _ = model_and_batch()
    x, at = torch.randn(2, 24, 32, generator=generator(0)), torch.arange(15).expand(2, -1)
    padding = (torch.arange(24) >= 15).expand(2, -1)
    before = model.decoder(x, x, at, padding)
    assert torch.equal(before, model.decoder(torch.where(padding[:, :, None], 5.0, x), x, at, padding))


def test_heads_learn_and_pass_gradients_to_the_encoder(corpus, tmp_path):
    _, folder = exported(tmp_path, corpus[1])
    tokens, real = text_ids()
    given = dict(input_ids=tokens, attention_mask=real.long())
    three = torch.tensor([0, 1, 2])
    for head, labels in (("SequenceClassification", dict(labels=three)), ("TokenClassification", dict(labels=tokens % 3)),
                         ("QuestionAnswering", dict(start_positions=three, end_positions=three)),
                         ("MaskedLM", dict(labels=tokens))):
        auto = getattr(transformers, f"AutoModelFor{head}")
        model = auto.from_pretrained(folder, num_labels=3, **TRUST)
        loss = model(**given, **labels).loss
        loss.backward()
        assert loss.isfinite() and model.encoder.token_embedding.weight.grad.abs().sum() > 0, head
        found = model.eval()(**given, return_dict=False)
        assert isinstance(found, tuple) and found[0].isfinite().all()
        model.save_pretrained(tmp_path / head)  # with its code
        again = auto.from_pretrained(tmp_path / head, **TRUST).eval()(**given, return_dict=False)
        assert torch.equal(found[0], again[0])


def test_fill_mask_of_transformers_guesses_what_ours_does(corpus, finished, tmp_path):
    convert.main(["export", str(finished[0]), str(tmp_path / "hub")])
    fill = transformers.pipeline("fill-mask", str(tmp_path / "hub"), top_k=3, **TRUST)
    model, tokenizer = run.load_model(finished[0])
    text = "my friend likes [MASK] bread today, number 12."
    found = [(guess["token"], round(guess["score"], 3)) for guess in fill(text)]
    ids = torch.tensor([0, *tokenizer.encode(text.replace(" [MASK]", "[MASK]"), special=True).astype(int), 2])
    best, probabilities = train.predict(model, ids, (ids == 3).nonzero()[:, 0], generator(0))
    assert [i for i, _ in found] == best[0].tolist()
    assert np.allclose([p for _, p in found], probabilities[0], atol=1e-3)


def test_a_text_that_is_too_long_is_refused_by_the_model_and_cut_by_the_tokenizer(corpus, tmp_path):
    _, folder = exported(tmp_path, corpus[1])
    model = transformers.AutoModel.from_pretrained(folder, **TRUST)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="25 tokens, but this model reads at most 24"):
        model(torch.full((1, 25), 9))
    assert model(**tokenizer(sentence(3) * 9, truncation=True, return_tensors="pt")).last_hidden_state.shape[1] == 24
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 24


# ---- The tokenizer, the folder, the card -----------------------------------------------------------------------------
def test_the_tokenizer_gives_our_ids_for_every_character_and_text(corpus, tmp_path):
    model, folder = exported(tmp_path, corpus[1])
    ours, theirs = data.Tokenizer.load(tmp_path / "run"), transformers.AutoTokenizer.from_pretrained(folder)
    assigned = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) not in ("Cn", "Co", "Cs")]
    texts = ["".join(assigned[i:i + 100]) for i in range(0, len(assigned), 100)] + ["ΟΔΟΣ ΣΑΣ", *convert.TEXTS]
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts += data.docstrings(file)
    texts = [text.replace("[", "(") for text in texts]  # no special tokens
    assert len(assigned) > 140_000 and len(texts) > 4000
    for text, ids in zip(texts, theirs(texts, verbose=False)["input_ids"]):
        assert ids == [0, *ours.encode(text), 2], text[:50]
    assert theirs("a", "b")["input_ids"] == [0, *ours.encode("a"), 2, *ours.encode("b"), 2]
    assert theirs("the [MASK] sat", add_special_tokens=False)["input_ids"] == [*ours.encode("the"), 3, *ours.encode(" sat")]
    assert theirs.model_max_length == 24 and "token_type_ids" not in theirs("a")
    assert theirs.padding_side == "right" and theirs.pad_token_id == 1


def test_others_can_read_the_files_and_the_name_may_have_any_sign(corpus, tmp_path):
    write_run(tmp_path / "run", corpus[1])
    folder = tmp_path / "deep" / "base++ v1.5-beta"
    convert.main(["export", str(tmp_path / "run"), str(folder)])
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "maelm.py", "model.safetensors", "modeling_maelm.py", "sentence_bert_config.json",
        "tokenizer.json", "tokenizer_config.json"}
    if sys.platform != "win32":
        (tmp_path / "any").touch()
        usual = stat.S_IMODE((tmp_path / "any").stat().st_mode)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {usual}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    transformers.AutoModel.from_pretrained(folder, **TRUST)
    convert.main(["export", str(tmp_path / "run"), str(folder)])  # again: the same files


@catches("convert.is_export", " <= set(FILES)", "")
@catches("convert.is_export", '.get("maelm_weights") == file_hash(folder / "model.safetensors")', '.get("maelm_weights")')
def test_what_others_made_of_an_export_is_not_written_over(corpus, tmp_path, capsys):
    """Trained further and saved in its place, or with files beside it, as sentence-transformers does."""
    _, folder = exported(tmp_path, corpus[1], **NATIVE)
    again = ["export", str(tmp_path / "run"), str(folder)]
    convert.main(again)
    capsys.readouterr()
    (folder / "modules.json").write_text("[]")
    assert "not as convert.py left it" in fails(lambda: convert.main(again), capsys)
    (folder / "modules.json").unlink()
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.bias += 1
    model.save_pretrained(folder)
    before = (folder / "model.safetensors").read_bytes()
    assert "not as convert.py left it" in fails(lambda: convert.main(again), capsys)
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_export_in_another_format_leaves_nothing_of_the_one_before(corpus, tmp_path):
    _, folder = exported(tmp_path, corpus[1], "--format", "maelm", **NATIVE)
    assert (folder / "modeling_maelm.py").is_file()
    convert.main(["export", str(tmp_path / "run"), str(folder)])
    assert not (folder / "modeling_maelm.py").exists() and [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


def test_what_finetune_leaves_is_exported_as_an_encoder(corpus, tmp_path, capsys):
    for name, fields in (("toy", {}), ("base", NATIVE)):
        model = write_run(tmp_path / name, corpus[1], **fields)
        tuned = tmp_path / f"tuned-{name}"
        run.write_tensors(tuned / "encoder.pt", {"config": asdict(model.config), "encoder": model.encoder.state_dict()})
        shutil.copy(corpus[1] / "tokenizer.json", tuned)
        for source in (tuned, tuned / "encoder.pt"):
            convert.main(["export", str(source), str(tmp_path / f"hub-{name}")])
            assert "an encoder alone" in capsys.readouterr().out
        assert hidden_difference(model, transformers.AutoModel.from_pretrained(tmp_path / f"hub-{name}", **TRUST)) == 0


def asks(question):
    """In place of input(): whoever does what we say is not asked whether to trust us."""
    pytest.fail(question)


def test_the_card_has_the_numbers_of_the_run_and_code_that_runs(corpus, tmp_path, monkeypatch, capsys):
    for fields in ({}, NATIVE, dict(norm="post")):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        _, folder = exported(tmp_path, corpus[1], **fields)
        card = (folder / "README.md").read_text()
        assert "| validation loss | 2.125 nats a masked token, after 7 steps |" in card
        assert "3.250 nats" in card and "| text | text.txt + hf:a/b |" in card and "9.000" not in card
        assert ("pipeline_tag: fill-mask" in card) == (fields != dict(norm="post"))
        block, = re.findall(r"```python\n(.*?)```", card, re.S)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("builtins.input", asks)
        capsys.readouterr()
        exec(block, {})
        assert "torch.Size([1, " in capsys.readouterr().out


def test_the_python_of_the_tutorial_runs(corpus, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "docs/transformers.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", corpus[1])
    convert.main(["export", "run", "exported/toy"])
    monkeypatch.setattr("builtins.input", asks)
    ran = [block for block in blocks if "sentence_transformers" not in block]
    for block in ran:
        exec(block, {})
    assert ran and len(ran) == len(blocks) - 1 and "torch.Size([2, " in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["run", "run"], "was made by train.py"), (["run", "foreign"], "not empty"), (["no/such", "hub"], "no such run folder"),
    (["run", "hub", "--format", "roberta"], "use --format maelm"), (["run", "hub", "--format", "bert"], "invalid choice"),
    (["run", "file"], "a file, not a folder")])
def test_what_cannot_be_exported_is_said_and_nothing_is_touched(arguments, message, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", corpus[1])
    Path("foreign").mkdir()
    Path("foreign/model.safetensors").write_text("precious")
    Path("file").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    assert message in fails(lambda: convert.main(["export", *arguments]), capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_transformers_it_says_what_to_install(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in ("export", "import"):
        assert "pip install transformers" in fails(lambda: convert.main([command, "a", "b"]), capsys)


# ---- The check of an export notices mistakes -------------------------------------------------------------------------
def swap(names, first, second):
    """These names, with those of two modules exchanged."""
    return names | {first: names[second], second: names[first]}


def wrong_settings(**fields):
    """hub_config with other values."""
    right = convert.hub_config
    return lambda source: right(source) | fields


def one_row_later(weights, kind, layers, head, right=convert.to_theirs):
    """to_theirs with each position where the next one belongs."""
    found = right(weights, kind, layers, head)
    name = f"{kind}.embeddings.position_embeddings.weight"
    return found | {name: found[name].roll(1, 0)}


def without_frame(tokenizer):
    """hub_tokenizer without [CLS] and [SEP]."""
    return json.loads(tokenizer.model.to_str())


KEYS = "self_attention.f.key_value"
MISTAKES = {  # what to patch, with what, and what the message names
    "swapped keys and values": lambda kind: (convert.LAYERS, kind, convert.LAYERS[kind] | {
        KEYS: convert.LAYERS[kind][KEYS][::-1]}, "hidden states of layer 1"),
    "swapped norms": lambda kind: (convert.LAYERS, kind, swap(convert.LAYERS[kind], "self_attention.norm", "ffn.norm"),
                                   "hidden states of layer 1"),
    "another eps": lambda kind: (convert, "EPS", 1e-12, "hidden states of layer 0"),
    "another GELU": lambda kind: (convert, "hub_config", wrong_settings(hidden_act="gelu_new"), "hidden states of layer 1"),
    "positions off by one": lambda kind: (convert, "to_theirs", one_row_later, "hidden states of layer 0"),
    "no special tokens": lambda kind: (convert, "hub_tokenizer", without_frame, "tokenizer reads"),
}


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_export_is_noticed_and_not_kept(mistake, kind, corpus, tmp_path, monkeypatch, capsys):
    place, name, wrong, message = MISTAKES[mistake](kind)
    patch = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
    patch(place, name, wrong)
    write_run(tmp_path / "run", corpus[1], **NATIVE | LONG, rel_pos_buckets=32 if kind == "mpnet" else 0)
    error = fails(lambda: convert.main(["export", str(tmp_path / "run"), str(tmp_path / "hub")]), capsys)
    assert message in error and "kept" in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("file, source, mistake, fields, message", [
    ("modeling_maelm.py", "module.bucket.copy_(RelativeBias(self.shape).bucket)", "module.bucket.zero_()", {}, "layer 1"),
    ("modeling_maelm.py", "real & ~masked", "real", {}, "logits at [MASK]"),
    ("modeling_maelm.py", "self.decoder(h, h, everywhere, padding)", "self.decoder(h, h, everywhere)", {}, "logits at [MASK]"),
    ("modeling_maelm.py", "if not self.shape.aligned_positions", "if False", dict(aligned_positions=False), "logits at [MASK]"),
    ("modeling_maelm.py", " or self.shape.decoder_reset", "", dict(mask_in_encoder=1.0, decoder_reset=True), "logits at"),
    ("modeling_maelm.py", "else attention_mask == 0", "else attention_mask == 2", {}, "hidden states of layer 1"),
    ("maelm.py", "nn.GELU(), nn.Linear", 'nn.GELU("tanh"), nn.Linear', {}, "hidden states of layer 1"),
    ("maelm.py", "k, v = self", "v, k = self", {}, "hidden states of layer 1")])
def test_wrong_code_in_an_export_is_noticed_and_not_kept(file, source, mistake, fields, message, corpus, tmp_path,
                                                         monkeypatch, capsys):
    def write(given, name, out, right=convert.write_export):
        right(given, name, out)
        text = (out / file).read_text()
        assert text.count(source) == 1
        (out / file).write_text(text.replace(source, mistake))
    write_run(tmp_path / "run", corpus[1], **LONG | fields)
    monkeypatch.setattr(convert, "write_export", write)
    error = fails(lambda: convert.main(["export", str(tmp_path / "run"), str(tmp_path / "hub")]), capsys)
    assert message in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- Import ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, hidden", [("roberta", 4.3e-6), ("mpnet", 4.4e-6)])
def test_a_model_of_transformers_computes_the_same_as_ours(kind, hidden, tmp_path):
    theirs, their_tokenizer = write_hub_model(tmp_path / "hub", kind, seq_len=160)
    convert.main(["import", f"hf:{tmp_path / 'hub'}", str(tmp_path / "run")])
    model, tokenizer = run.load_model(tmp_path / "run")
    texts = [sentence(i) + " It's 7,000 café's  \n\n for you're <s> [MASK]." for i in range(3)]
    for text in texts:
        ids = torch.tensor([[0, *tokenizer.encode(text).astype(int), 2]])
        their_ids = their_tokenizer(text.replace("<s>", "< s>"), return_tensors="pt")["input_ids"]
        ids = torch.tensor([[0, *tokenizer.encode(text.replace("<s>", "< s>")).astype(int), 2]])
        ours = model.encoder(ids, torch.arange(ids.shape[1])[None])
        found = theirs(their_ids, output_hidden_states=True)
        assert (ours - found.hidden_states[-1]).abs().max() < hidden
        # A row of the vocabulary is the same token in both.
        for i in (0, 1, 2, 3, 4, 100, 300):
            token = tokenizer.model.id_to_token(i)
            there = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[MASK]": "<mask>"}.get(token, token)
            row = their_tokenizer.get_vocab()[there]
            assert torch.equal(model.encoder.token_embedding.weight[i], theirs.get_input_embeddings().weight[row])
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0] and not tokenizer.uncased


def positions_one_later(weights, *rest, right=convert.to_ours):
    """to_ours with each position where the next one belongs."""
    found = right(weights, *rest)
    name = "encoder.position_embedding.weight"
    return found | {name: found[name].roll(1, 0)}


def without_segment(weights, *rest, right=convert.to_ours):
    """to_ours without the embedding of the segment."""
    name = "roberta.embeddings.token_type_embeddings.weight"
    return right(weights | {name: torch.zeros_like(weights[name])}, *rest)


def keys_for_values(weights, kind, layers, order, right=convert.to_ours):
    """to_ours with keys and values exchanged."""
    found = right(weights, kind, layers, order)
    for name in [name for name in found if "key_value" in name]:
        found[name] = found[name].roll(len(found[name]) // 2, 0)
    return found


@pytest.mark.parametrize("wrong, layer", [(positions_one_later, 0), (without_segment, 0), (keys_for_values, 1)])
def test_a_wrong_import_is_noticed_and_not_kept(wrong, layer, tmp_path, monkeypatch, capsys):
    write_hub_model(tmp_path / "hub")
    monkeypatch.setattr(convert, "to_ours", wrong)
    capsys.readouterr()
    error = fails(lambda: convert.main(["import", str(tmp_path / "hub"), str(tmp_path / "run")]), capsys)
    assert f"hidden states of layer {layer}" in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
def test_import_export_import_gives_equal_weights(kind, tmp_path):
    write_hub_model(tmp_path / "hub", kind)
    source = tmp_path / "hub"
    for turn in ("1", "2"):
        convert.main(["import", str(source), str(tmp_path / f"run{turn}")])
        source = tmp_path / f"hub{turn}"
        convert.main(["export", str(tmp_path / f"run{turn}"), str(source)])
        assert json.loads((source / "config.json").read_text())["model_type"] == kind
    first, second = [run.load_model(tmp_path / f"run{turn}") for turn in ("1", "2")]
    assert first[0].config == second[0].config
    for name, weight in first[0].state_dict().items():
        assert torch.equal(weight, second[0].state_dict()[name]), name
    assert (tmp_path / "run1/tokenizer.json").read_bytes() == (tmp_path / "run2/tokenizer.json").read_bytes()


def test_an_imported_model_serves_the_other_programs(tmp_path, capsys):
    write_hub_model(tmp_path / "hub")
    convert.main(["import", str(tmp_path / "hub"), str(tmp_path / "run")])
    train.main(["--fill-mask", "the cat [MASK] a tree", "--init", str(tmp_path / "run")])
    assert "[MASK] 1: " in capsys.readouterr().out
    encoder, tokenizer, config = run.load_encoder(tmp_path / "run")
    assert config.mask_in_encoder == 1 and len(tokenizer) <= config.vocab_size
    convert.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert "| began with the weights of | hub |" in (tmp_path / "back/README.md").read_text()
    assert run.run_settings(tmp_path / "run") == {"init": str(tmp_path / "hub")} and files.kind_of(tmp_path / "run") == "run"


def other_model(folder):
    config = transformers.BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(folder)


def word_pieces(folder):
    write_hub_model(folder)
    import tokenizers
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    names = dict(cls_token="<s>", pad_token="<pad>", sep_token="</s>", mask_token="<mask>", unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names).save_pretrained(folder)


def without_a_layer(folder):
    model, _ = write_hub_model(folder)
    kept = {name: weight for name, weight in model.state_dict().items() if "encoder.layer.1." not in name}
    model.save_pretrained(folder, state_dict=kept)


def with_composed_letters(folder):
    write_hub_model(folder)
    changes = {"tokenizer.json": {"normalizer": {"type": "NFKC"}},  # RoBERTa's own class would make it anew
               "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    for file, fields in changes.items():
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(found | fields))


def with_tokens_too_many(folder):
    """A mask token behind the last embedding."""
    _, tokenizer = write_hub_model(folder)
    size = len(tokenizer) - 1
    transformers.RobertaForMaskedLM(transformers.RobertaConfig(**(json.loads((folder / "config.json").read_text()) | {
        "vocab_size": size}))).save_pretrained(folder)


def with_prefix_space(folder):
    write_hub_model(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(re.sub('"add_prefix_space": false', '"add_prefix_space": true', text))


@pytest.mark.parametrize("make, message", [
    (other_model, "of type bert; roberta and mpnet can be imported"),
    (lambda folder: write_hub_model(folder, layer_norm_eps=1e-12), "has layer_norm_eps=1e-12, maelm 1e-05"),
    (lambda folder: write_hub_model(folder, hidden_act="relu"), "has hidden_act='relu'"),
    (lambda folder: write_hub_model(folder, intermediate_size=64), "has intermediate_size=64, maelm 128"),
    (without_a_layer, "it lacks weights of the encoder, such as roberta.encoder.layer.1"),
    (with_composed_letters, "its tokenizer changes text by NFKC"), (with_tokens_too_many, "its tokenizer does not fit its"),
    (word_pieces, "its tokenizer is no byte-level BPE, but WordPiece"), (with_prefix_space, "its tokenizer reads"),
    (lambda folder: folder.mkdir(), "transformers cannot load it"),
    (lambda folder: files.write_json(folder / "config.json", {"model_type": "maelm"}), "made by convert.py export")])
def test_what_cannot_be_imported_is_said_and_nothing_is_written(make, message, tmp_path, capsys):
    make(tmp_path / "hub")
    capsys.readouterr()
    error = fails(lambda: convert.main(["import", f"hf:{tmp_path / 'hub'}", str(tmp_path / "run")]), capsys)
    assert message in error and not (tmp_path / "run").exists(), error


@catches("convert.import_model", "if path == name and", "if False and")
def test_a_name_that_is_no_folder_is_not_looked_for_on_the_hub(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *x, **y: pytest.fail("asked the Hub"))
    error = fails(lambda: convert.main(["import", "roberta-base", str(tmp_path / "run")]), capsys)
    assert "roberta-base: no such folder; before the name of a model of the Hub write hf:" in error


def test_a_run_is_not_overwritten_and_a_missing_head_is_said(tmp_path, capsys):
    model, _ = write_hub_model(tmp_path / "hub")
    model.roberta.save_pretrained(tmp_path / "hub")
    convert.main(["import", str(tmp_path / "hub"), str(tmp_path / "run")])
    assert "begins with random weights" in capsys.readouterr().out
    error = fails(lambda: convert.main(["import", str(tmp_path / "hub"), str(tmp_path / "run")]), capsys)
    assert "holds a model already" in error


# ---- Wrong versions --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
