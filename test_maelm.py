"""Claims of the paper and of the README, as tests. Each important claim is also shown to catch wrong code: MUTANTS
lists small mistakes in the source, and the last test of a section runs a claim against each of them.

    pytest                          # all of it, a few minutes on two cores
"""
import csv
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

import data  # noqa: E402
import maelm  # noqa: E402
import rank  # noqa: E402
import train  # noqa: E402

HERE = Path(__file__).parent
TINY = dict(vocab_size=300, seq_len=24, encoder_layers=2, encoder_dim=32, encoder_heads=4, dropout=0.0, mask_rate=0.25,
            decoder_layers=2, init_std=0.2)


def tiny(**fields):
    return maelm.Config(**{**TINY, **fields})


def random_tokens(B=6, n=24, vocab_size=300):
    """Rows that start with [CLS], end with [SEP], and hold real tokens between."""
    tokens = torch.randint(maelm.NUM_SPECIAL, vocab_size, (B, n), generator=generator(7))
    tokens[:, 0], tokens[:, -1] = maelm.CLS, maelm.SEP
    return tokens


def generator(seed):
    return torch.Generator().manual_seed(seed)


def model_and_batch(**fields):
    config = tiny(**fields)
    torch.manual_seed(0)
    model = maelm.MAELM(config).eval()
    for parameter in model.parameters():  # no parameter may hide at its neutral start
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = random_tokens()
    return model, tokens, maelm.corrupt(tokens, config, generator(1))


# ---- Section 3: removing the masked positions -----------------------------------------------------------------
def test_every_row_has_exactly_k_masks_and_no_special_token_among_them():
    tokens = random_tokens(50)
    masked, kept, inputs = maelm.corrupt(tokens, tiny(), generator(0))
    assert (masked.sum(1) == 6).all() and (tokens[masked] >= maelm.NUM_SPECIAL).all()
    assert kept.shape == inputs.shape == (50, 18)


def test_the_paper_masks_77_of_512():
    assert maelm.Config().masks_per_row(512) == 77


def test_kept_positions_are_the_rest_in_ascending_order():
    tokens = random_tokens()
    masked, kept, inputs = maelm.corrupt(tokens, tiny(), generator(0))
    for row in range(len(tokens)):
        assert kept[row].tolist() == [i for i in range(24) if not masked[row, i]]
    assert torch.equal(inputs, tokens.gather(1, kept))


def test_masks_are_uniform_over_real_tokens():
    tokens = random_tokens(4000)
    share = maelm.corrupt(tokens, tiny(), generator(0)).masked.float().mean(0)[1:-1]
    p = 6 / 22
    assert (share - p).abs().max() < 5 * math.sqrt(p * (1 - p) / 4000)


def test_corrupt_is_a_pure_function():
    tokens = random_tokens()
    before, state = tokens.clone(), torch.get_rng_state()
    first, second = (maelm.corrupt(tokens, tiny(), generator(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(tokens, before) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.masked, maelm.corrupt(tokens, tiny(), generator(4)).masked)


def test_delta_is_the_share_of_masks_that_the_encoder_reads():
    tokens = random_tokens()
    for delta, shown in ((0, 0), (0.25, 2), (0.5, 3), (0.75, 4), (1, 6)):  # of 6; round half to even
        masked, kept, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=delta), generator(0))
        at_kept = masked.gather(1, kept)
        assert masked.sum() == 6 * len(tokens) and (at_kept.sum(1) == shown).all()
        assert (inputs[at_kept] == maelm.MASK).all()
        assert torch.equal(inputs[~at_kept], tokens.gather(1, kept)[~at_kept])


def test_random_fill_is_a_real_token_and_mostly_not_the_true_one():
    tokens = random_tokens(200)
    masked, _, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=1.0, encoder_fill="random"), generator(0))
    assert inputs[masked].min() >= maelm.NUM_SPECIAL and inputs[masked].max() < 300
    assert (inputs[masked] == tokens[masked]).float().mean() < 0.03
    assert torch.equal(inputs[~masked], tokens[~masked])


def test_bert_trick_is_80_10_10():
    tokens = random_tokens(2000)
    masked, _, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=1.0, bert_trick=True), generator(0))
    filled, true = inputs[masked], tokens[masked]
    for share, event in ((0.8, filled == maelm.MASK), (0.1, filled == true), (0.1, (filled != true) & (filled > 3))):
        assert abs(event.float().mean() - share) < 0.015


def test_a_row_with_too_few_real_tokens_is_refused():
    tokens = torch.full((1, 24), maelm.SEP)
    tokens[0, :5] = 10
    with pytest.raises(ValueError, match="mask_rate=0.25 masks 6 of 24"):
        maelm.corrupt(tokens, tiny(), generator(0))


def test_masked_tokens_cannot_reach_the_encoder():
    for name in ("mae-lm", "mlm", "enc-mask", "cross"):
        model, tokens, corruption = model_and_batch(**maelm.ABLATIONS[name])
        changed = torch.where(corruption.masked, (tokens + 1).clamp(4, 299), tokens)
        again = maelm.corrupt(changed, model.config, generator(1))
        assert torch.equal(again.tokens, corruption.tokens)
        at = model.predicted(corruption.masked)
        assert torch.equal(model.logits(tokens, corruption, at), model.logits(changed, again, at))


def test_removing_equals_hiding():
    """The encoder on the kept tokens = the encoder on all tokens whose masked keys are hidden."""
    for norm in ("post", "pre"):
        model, tokens, corruption = model_and_batch(norm=norm)
        all_positions = torch.arange(24).expand(len(tokens), -1)
        hidden = model.encoder(tokens, all_positions, padding=corruption.masked)
        torch.testing.assert_close(model.encode(corruption), maelm.take(hidden, corruption.kept), atol=1e-5, rtol=1e-5)


def test_encoder_positions_skip_the_removed_tokens_only_if_aligned():
    for aligned in (True, False):
        model, tokens, corruption = model_and_batch(aligned_positions=aligned)
        positions = corruption.kept if aligned else torch.arange(18).expand(6, -1)
        torch.testing.assert_close(model.encode(corruption), model.encoder(corruption.tokens, positions))
        other = torch.arange(18).expand(6, -1) if aligned else corruption.kept
        assert not torch.allclose(model.encode(corruption), model.encoder(corruption.tokens, other))


def test_decoder_input_is_the_two_case_formula():
    for reset in (False, True):
        model, tokens, corruption = model_and_batch(mask_in_encoder=0.5, decoder_reset=reset)
        h = torch.randn(6, 21, 32, generator=generator(0))
        full = model.decoder_input(h, corruption)
        e_mask = model.encoder.token_embedding.weight[maelm.MASK]
        for b, i in itertools.product(range(6), range(24)):
            where = (corruption.kept[b] == i).nonzero()
            fill = len(where) == 0 or reset and corruption.masked[b, i]
            assert torch.equal(full[b, i], e_mask if fill else h[b, where[0, 0]])


# ---- Section 2.1: the Transformer -----------------------------------------------------------------------------
def test_attention_is_the_formula_in_float64_with_gradient_of_the_bias():
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator(i), requires_grad=True) for i in range(3))
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=generator(3), requires_grad=True)
    weights = torch.empty(2, 3, 5, 5, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(3), range(5)):
        logits = torch.stack([q[b, h, i] @ k[b, h, j] / 2 + bias[b, h, i, j] for j in range(5)])
        weights[b, h, i] = logits.exp() / logits.exp().sum()
    ours, direct = maelm.attention(q, k, v, bias), weights @ v
    torch.testing.assert_close(ours, direct, check_dtype=False, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v, bias), retain_graph=True) for out in (ours, direct)]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_layer_equals_pytorchs_own():
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        block = maelm.Block(tiny(norm=norm), 32, 0.0).eval()
        theirs = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, F.gelu, norm_first=norm == "pre", batch_first=True)
        attention = block.self_attention.f
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key_value.weight]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key_value.bias]))
        theirs.self_attn.out_proj.load_state_dict(attention.output.state_dict())
        for ours, name in ((block.ffn.f[0], "linear1"), (block.ffn.f[2], "linear2"), (block.self_attention.norm, "norm1"),
                           (block.ffn.norm, "norm2")):
            getattr(theirs, name).load_state_dict(ours.state_dict())
        x = torch.randn(2, 7, 32, generator=generator(0))
        torch.testing.assert_close(block(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_last_layer_at_masked_positions_equals_the_full_layer():
    for fields in (dict(), dict(norm="pre"), dict(decoder_cross=True), dict(decoder_self="none", decoder_cross=True)):
        model, tokens, corruption = model_and_batch(**fields)
        at, everywhere = model.predicted(corruption.masked), torch.arange(24).expand(6, -1)
        full = model.logits(tokens, corruption, everywhere)
        torch.testing.assert_close(model.logits(tokens, corruption, at), maelm.take(full, at), atol=1e-5, rtol=1e-4)
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    at = model.predicted(corruption.masked)
    torch.testing.assert_close(model.encode(corruption, at), maelm.take(model.encode(corruption), at), atol=1e-5, rtol=1e-4)


def test_mlm_is_the_textbook_mlm():
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    h = model.encoder(tokens.masked_fill(corruption.masked, maelm.MASK), torch.arange(24).expand(6, -1))
    logits = F.linear(model.head.transform(h), model.encoder.token_embedding.weight, model.head.bias)
    loss = F.cross_entropy(logits[corruption.masked], tokens[corruption.masked])
    torch.testing.assert_close(model(tokens, corruption), loss)


def test_padding_changes_nothing():
    model, tokens, _ = model_and_batch()
    positions = torch.arange(24)[None]
    short = model.encoder(tokens[:, :10], positions[:, :10])
    padded = tokens.clone()
    padded[:, 10:] = maelm.PAD
    long = model.encoder(padded, positions, padding=(positions >= 10).expand(6, -1))
    torch.testing.assert_close(short, long[:, :10], atol=1e-5, rtol=1e-5)


def test_all_layers_are_the_embedding_output_and_every_layer():
    model, tokens, _ = model_and_batch(norm="pre")
    positions = torch.arange(24)[None]
    states = model.encoder(tokens, positions, all_layers=True)
    assert len(states) == 3 and torch.equal(states[-1], model.encoder(tokens, positions))
    embedded = model.encoder.token_embedding(tokens) + model.encoder.position_embedding(positions)
    torch.testing.assert_close(states[0], model.encoder.norm(embedded))


# ---- Section 4.1: relative positions --------------------------------------------------------------------------
def test_relative_buckets_are_t5s():
    def naive(r, buckets, farthest):
        half, size = buckets // 2, abs(r)
        exact = half // 2
        if size >= exact:  # the largest bucket whose start exact * (farthest / exact)^(i / (half - exact)) is <= size
            size = max(i for i in range(half - exact)
                       if exact ** (half - exact - i) * farthest ** i <= size ** (half - exact)) + exact
        return size + half * (r > 0)

    for buckets, farthest in ((32, 128), (64, 128), (128, 256), (8, 20)):
        r = torch.arange(-600, 601)
        assert maelm.relative_bucket(r, buckets, farthest).tolist() == [naive(i, buckets, farthest) for i in range(-600, 601)]


def test_relative_buckets_agree_with_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention
    r = torch.arange(-511, 512)
    for buckets, farthest in ((32, 128), (64, 128), (128, 256)):
        theirs = T5Attention._relative_position_bucket(r, True, buckets, farthest)
        assert torch.equal(maelm.relative_bucket(r, buckets, farthest), theirs)


def test_relative_bias_is_a_function_of_key_minus_query():
    bias = maelm.RelativeBias(tiny())
    keys = torch.tensor([[0, 3, 4, 20]])
    with torch.no_grad():
        bias.table.weight.copy_(torch.arange(32.0)[:, None] + torch.arange(4) * 100)
    got = bias(keys, keys)
    for i, j, head in itertools.product(range(4), range(4), range(4)):
        bucket = maelm.relative_bucket(keys[0, j] - keys[0, i], 32, 128)
        assert got[0, head, i, j] == bucket + 100 * head


# ---- Appendix C, Eq. (1), Table 2 -----------------------------------------------------------------------------
def test_dropout_is_in_the_encoder_and_not_in_the_decoder():
    model, tokens, corruption = model_and_batch(dropout=0.5)
    model.train()
    at = model.predicted(corruption.masked)
    assert not torch.allclose(model.encode(corruption), model.encode(corruption))
    h = model.encode(corruption)
    x = model.decoder_input(h, corruption)
    assert torch.equal(model.decoder(x, h, at), model.decoder(x, h, at))


def test_loss_is_the_mean_negative_log_likelihood_over_masked_positions():
    model, tokens, corruption = model_and_batch()
    everywhere = torch.arange(24).expand(6, -1)
    log_p = model.logits(tokens, corruption, everywhere).log_softmax(-1)
    by_hand = [-log_p[b, i, tokens[b, i]] for b, i in corruption.masked.nonzero().tolist()]
    assert len(by_hand) == 36
    torch.testing.assert_close(model(tokens, corruption), torch.stack(by_hand).mean())


def test_output_embeddings_are_the_input_embeddings():
    model, tokens, corruption = model_and_batch()
    model(tokens, corruption).backward()
    absent = sorted(set(range(4, 300)) - set(tokens.flatten().tolist()))
    assert model.encoder.token_embedding.weight.grad[absent].abs().sum() > 0  # through the softmax alone


def test_dropout_zeroes_a_share_p_independently_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(1000, 1001, requires_grad=True)
    for p in (0.1, 0.5):
        y = maelm.dropout(x, p)
        zero = (y == 0).float()
        assert abs(zero.mean() - p) < 0.002 and torch.allclose(y[y > 0], torch.tensor(1 / (1 - p)))
        assert (zero.mean(0) - p).abs().max() < 0.1 and abs((zero[:, 1:] * zero[:, :-1]).mean() - p * p) < 0.002
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    assert maelm.dropout(x, 0.0) is x


def test_uni_decoder_cannot_see_the_future():
    model, tokens, corruption = model_and_batch(decoder_self="uni", decoder_cross=True)
    at = model.predicted(corruption.masked)
    assert at[0].tolist() == list(range(1, 24))
    changed = tokens.clone()
    changed[:, 15:] = 42
    a, b = model.logits(tokens, corruption, at), model.logits(changed, corruption, at)
    assert torch.equal(a[:, :15], b[:, :15]) and not torch.allclose(a[:, 15:], b[:, 15:])


@pytest.mark.parametrize("ablation", maelm.ABLATIONS)
def test_every_row_of_table_2_learns_and_uses_all_its_parameters(ablation):
    config = train.make_config("toy", ablation, **{k: v for k, v in TINY.items() if k != "decoder_layers"})
    torch.manual_seed(0)
    model = maelm.MAELM(replace(config, init_std=0.1))
    tokens = random_tokens(4)
    corruption = maelm.corrupt(tokens, config, generator(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = model(tokens, corruption)
    first.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    for _ in range(60):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(tokens, corruption)
        loss.backward()
    assert loss < first / 2


@pytest.mark.parametrize("preset, encoder, total", [("base", 110_616_960, 139_988_098),
                                                    ("base++", 134_603_520, 164_005_890),
                                                    ("large++", 368_375_808, 420_402_690)])
def test_parameter_counts_differ_from_the_official_model_by_two_vocabulary_rows_only(preset, encoder, total):
    config = train.make_config(preset)
    with torch.device("meta"):
        parts = maelm.Encoder(config), maelm.Decoder(config), maelm.Head(config, config.decoder_dim)
    counts = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert counts[0] == encoder - 2 * config.encoder_dim
    assert sum(counts) == total - 2 * (config.encoder_dim + 1)


def test_initial_weights_are_normal_with_the_stated_deviation():
    torch.manual_seed(0)
    model = maelm.MAELM(tiny(encoder_dim=256, init_std=0.02))
    for name, p in model.named_parameters():
        expected = 1.0 if "norm" in name and "weight" in name or name == "head.transform.2.weight" else 0.0
        if p.ndim == 1:
            assert (p == expected).all(), name
        elif p.numel() > 5000:
            assert abs(p.std() - 0.02) < 0.001 and p.abs().max() > 0.06, name  # normal, not truncated


def test_table_2_sizes_keep_their_ratio_to_the_encoder():
    assert train.make_config("base", "dec-512").decoder_dim == 512
    assert train.make_config("base", "dec-1024").decoder_dim == 1024
    small = dict(encoder_layers=6, encoder_dim=192, encoder_heads=6)
    sizes = {a: train.make_config("base", a, **small) for a in ("dec-512", "dec-1024", "dec-2", "dec-6")}
    assert [sizes["dec-512"].decoder_dim, sizes["dec-1024"].decoder_dim] == [128, 256]
    assert [sizes["dec-2"].decoder_layers, sizes["dec-6"].decoder_layers] == [1, 3]


@pytest.mark.parametrize("fields", [dict(mask_rate=1.5), dict(decoder_layers=0), dict(decoder_self="uni"), dict(norm="mid"),
                                    dict(encoder_heads=5), dict(rel_pos_buckets=7), dict(decoder_dim=33), dict(dropout=1.0),
                                    dict(vocab_size=100), dict(encoder_fill="zeros"), dict(mask_in_encoder=-0.1)])
def test_a_bad_field_is_named_with_its_value(fields):
    (name, value), = fields.items()
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}: "):
        tiny(**fields)


# ---- data.py: tokenizer, rows, corpora ------------------------------------------------------------------------
SUBJECTS, VERBS, OBJECTS = "the cat|a dog|my friend|Anna".split("|"), "sees|likes|finds|has".split("|"), "a tree|some bread".split("|")


def sentence(i):
    """The i-th sentence of a little language, with all its words in a few patterns."""
    parts = [words[i // step % len(words)] for words, step in ((SUBJECTS, 1), (VERBS, 4), (OBJECTS, 16))]
    return " ".join(parts) + f" {'today' if i % 3 else 'at last'}, number {i}."


def write_corpus(path, documents=400):
    path.write_text("\n\n".join(sentence(i) + " " + sentence(7 * i) for i in range(documents)))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small text file, and the folder that data.py prepare makes of it."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_corpus(folder / "text.txt")
    data.main(["prepare", "--data", str(text), "--out", str(folder / "shards"), "--vocab-size", "320", "--seq-len", "24",
               "--val-share", "0.1"])
    return text, folder / "shards"


def test_tokenizer_gives_back_every_text_and_agrees_with_tokenizers(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    texts = ["The cat sees a tree.", "naïve café — ∑ 数学 🙂\t\r\n  x", "[MASK] [CLS] is plain text", "\x00\x7f ~", "a" * 500,
             bytes(range(256)).decode("latin-1"), ""]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.lower()
        assert ids.tolist() == tokenizer.model.encode(text.lower(), add_special_tokens=False).ids
        assert len(ids) == 0 or data.NUM_SPECIAL <= ids.min() and ids.max() < len(tokenizer) <= 320


def test_token_ids_are_specials_then_bytes_then_merges(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    assert [tokenizer.decode([i]) for i in range(4)] == ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    assert [tokenizer.tiktoken.decode_single_token_bytes(4 + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert tokenizer.encode("Anna [MASK]", special=True)[-1] == maelm.MASK
    assert [maelm.CLS, maelm.PAD, maelm.SEP, maelm.MASK] == [data.SPECIALS.index(f"[{name}]") for name in
                                                             ("CLS", "PAD", "SEP", "MASK")]


def test_rows_are_the_documents_joined_by_sep_and_no_document_is_in_both_parts(corpus):
    text, folder = corpus
    tokenizer = data.Tokenizer.load(folder)
    found = {}
    for part in ("train", "val"):
        rows = data.Rows(folder, part, 320, 24)
        rows = rows[np.arange(len(rows))]
        assert (rows[:, 0] == maelm.CLS).all() and (rows[:, 1:] != maelm.CLS).all()
        assert (rows >= data.NUM_SPECIAL).sum(1).min() >= json.loads((folder / "meta.json").read_text())["min_real"]
        found[part] = tokenizer.decode(rows[:, 1:].flatten()).split("[SEP]")[:-1]  # the last one is cut off
    documents = [d.lower() for d in text.read_text().split("\n\n")]
    held_out = {d.lower() for d in text.read_text().split("\n\n") if data.in_validation(d, 0.1)}
    assert found["train"] == [d for d in documents if d not in held_out][:len(found["train"])]
    assert found["val"] == [d for d in documents if d in held_out][:len(found["val"])]
    assert len(found["val"]) > 10 and not set(found["train"]) & set(found["val"])


def test_the_same_text_gives_the_same_shards_from_every_format(corpus, tmp_path):
    import gzip, lzma, pyarrow, pyarrow.parquet  # noqa: E401
    documents = corpus[0].read_text().split("\n\n")
    lines = "".join(json.dumps({"id": 1, "text": d}) + "\n" for d in documents).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(corpus[0].read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "d.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(lines)
    sources = ["a.jsonl", "b.jsonl.gz", "c.txt.xz", "d.parquet", "hub"]
    for i, source in enumerate([*map(tmp_path.joinpath, sources), f"hf:{tmp_path / 'hub'}"]):
        out = data.prepare(str(source), tmp_path / str(i), 320, 24, True, 0.1)
        for name in ("train-00000.npy", "val-00000.npy", "tokenizer.json"):
            assert (out / name).read_bytes() == (corpus[1] / name).read_bytes(), source


def test_several_sources_are_joined_by_plus(corpus, tmp_path):
    other = write_corpus(tmp_path / "other.txt", 100)
    parts = data.parts(f"{corpus[0]}+{other}")
    assert [Path(name).name for _, name in parts] == ["text.txt", "other.txt"]
    assert data.parts("docs+hf:a/b:c") == [("docs", ""), ("hf", "a/b:c")]


def test_a_prepared_corpus_is_found_again_by_its_content(corpus, tmp_path):
    arguments = 320, 24, True, 0.1
    first = data.corpus(str(corpus[0]), tmp_path, *arguments)
    before = (first / "meta.json").stat().st_mtime_ns
    copy = tmp_path / "copy.txt"
    copy.write_bytes(corpus[0].read_bytes())
    assert data.corpus(str(copy), tmp_path, *arguments) == first and (first / "meta.json").stat().st_mtime_ns == before
    copy.write_text(copy.read_text() + "\n\nOne more document.")
    assert data.corpus(str(copy), tmp_path, *arguments) != first
    assert data.corpus(str(corpus[1]), tmp_path, *arguments) == corpus[1]


def test_an_epoch_is_a_permutation_without_replacement():
    for total, batch in ((1, 3), (10, 4), (97, 10), (1000, 64)):
        steps = [data.rows_of_step(5, s, batch, total) for s in range(-(-3 * total // batch))]
        stream = np.concatenate(steps)
        for epoch in range(3):
            assert sorted(stream[epoch * total:(epoch + 1) * total]) == list(range(total))
        if total > 50:
            assert list(stream[:total]) != list(stream[total:2 * total]) != list(range(total))
            assert list(steps[0]) != list(data.rows_of_step(6, 0, batch, total))
    far = data.rows_of_step(0, 10 ** 9, 2048, 3 * 10 ** 10)
    assert far.min() >= 0 and far.max() < 3 * 10 ** 10 and len(set(far)) == 2048


def test_the_permutation_looks_random():
    x = np.concatenate([data.rows_of_step(0, s, 1000, 10 ** 6) for s in range(20)])
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.04 and abs(x.mean() / 10 ** 6 - 0.5) < 0.02


def test_documentation_is_read_without_importing(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('''"""A module that cannot be imported at all."""
raise SystemExit
def f():
    """  Returns nothing of interest.

        Not even here."""
add_docstr(f, r"""f(x) -> y, said by a call.""")
def g(): "short"
''')
    assert data.docstrings(module) == ["A module that cannot be imported at all.",
                                       "Returns nothing of interest.\n\nNot even here.", "f(x) -> y, said by a call."]


def bad_jsonl(path):
    path.write_text('{"text": "fine"}\n{"content": "x", "id": 3}\n')


def bad_json(path):
    path.write_text('{"text": "fine"}\n{"text": \n')


def bad_bytes(path):
    path.write_bytes(b"good text\n\n" * 3 + b"caf\xe9")


def bad_gzip(path):
    path.write_bytes(b"this is no gzip file")


def bad_parquet(path):
    path.write_bytes(b"PAR1 not really")


@pytest.mark.parametrize("name, make, message", [
    ("a.jsonl", bad_jsonl, r"a\.jsonl, line 2: no text column `text`; found: content, id"),
    ("a.jsonl", bad_json, r"a\.jsonl, line 2: not JSON"),
    ("a.txt", bad_bytes, r"a\.txt: byte 36 is not UTF-8 \(0xe9\)"),
    ("a.txt.gz", bad_gzip, r"a\.txt\.gz: damaged \.gz file"),
    ("a.parquet", bad_parquet, r"a\.parquet: not a Parquet file"),
    ("a.txt", Path.touch, r"its train part is too small for one row"),
    ("a.csv", Path.touch, r"a\.csv: holds no text; use \.txt, \.jsonl, \.parquet"),
    ("nothing", lambda path: None, r"nothing: no such file or folder"),
    ("empty", Path.mkdir, r"empty: holds no text"),
])
def test_bad_data_is_named_in_one_line_before_anything_is_written(name, make, message, tmp_path, capsys):
    make(tmp_path / name)
    error = fails(lambda: train.main(["--data", str(tmp_path / name), "--out", str(tmp_path / "out"),
                                      "--cache", str(tmp_path / "cache")]), capsys)
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def fails(command, capsys):
    """Run a command that must end with exit code 2 and one line; returns that line."""
    with pytest.raises(SystemExit) as exit:
        command()
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == "" and len(captured.err.strip().splitlines()) == 1, captured
    return captured.err


def test_a_hub_name_without_network_says_so(tmp_path, monkeypatch):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "train.py", "--data", "hf:no/such-set", "--out", str(tmp_path / "o"), "--cache",
                             str(tmp_path / "cache")], cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and not (tmp_path / "o").exists()
    assert re.search("hf:no/such-set: cannot be loaded .* --data docs needs neither", result.stderr.strip().splitlines()[-1])


def test_damaged_or_foreign_shards_are_refused(corpus, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(corpus[1], folder)
    shard = folder / "train-00000.npy"
    whole = shard.read_bytes()
    with pytest.raises(data.UserError, match="prepared with seq_len=24, this run has 32: pass --seq-len 24"):
        data.Rows(folder, "train", 320, 32)
    for damage in (b"XX" + whole[2:], whole[:-7], b""):
        shard.write_bytes(damage)
        with pytest.raises(data.UserError, match="train-00000.npy: "):
            data.Rows(folder, "train", 320, 24)
    np.save(shard, np.load(corpus[1] / "train-00000.npy").astype(np.int64))
    with pytest.raises(data.UserError, match="bad header: int64"):
        data.Rows(folder, "train", 320, 24)
    rows = np.load(corpus[1] / "train-00000.npy")
    rows[3, 5] = 320
    np.save(shard, rows)
    with pytest.raises(data.UserError, match="row 3 holds token id 320, but vocab_size=320"):
        data.Rows(folder, "train", 320, 24)[np.array([1, 3])]


# ---- train.py -------------------------------------------------------------------------------------------------
MODEL = ["--vocab-size", "320", "--seq-len", "24", "--encoder-layers", "2", "--encoder-dim", "32", "--encoder-heads", "2"]
QUICK = [*MODEL, "--dropout", "0.1", "--precision", "fp32", "--batch-size", "8", "--micro-batch-size", "4", "--max-steps", "6",
         "--warmup-steps", "2", "--eval-interval", "3", "--eval-rows", "16", "--log-interval", "1",
         "--checkpoint-interval", "3", "--keep-checkpoints", "0"]


def run(corpus, out, *flags):
    train.main(["--data", str(corpus[1]), "--out", str(out), *QUICK, *flags])
    return torch.load(sorted(out.glob("step_*.pt"))[-1], weights_only=True)


def same(a, b):
    """Whether two checkpoints hold bitwise the same weights and optimizer states."""
    pairs = zip(torch.utils._pytree.tree_leaves((a["model"], a["optimizers"])),
                torch.utils._pytree.tree_leaves((b["model"], b["optimizers"])))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """The run folder and last checkpoint of a short run that nothing interrupted."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, run(corpus, out)


def test_a_run_folder_holds_what_the_readme_says(finished):
    out, _ = finished
    assert {p.name for p in out.iterdir()} == {"config.json", "tokenizer.json", "log.jsonl", "loss.png", "step_0000003.pt",
                                               "step_0000006.pt"}
    log = train.read_log(out)
    assert log[0]["unigram_entropy"] > 1 and log[0]["step"] == 0
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all({"lr", "tokens_per_second", "seconds"} <= set(line) for line in steps)
    assert [line["step"] for line in log if "val_loss" in line] == [0, 3, 6]


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_continued_run_equals_an_uninterrupted_one_bitwise(corpus, finished, tmp_path, stop):
    run(corpus, tmp_path / "run", "--stop-at", str(stop))
    assert same(run(corpus, tmp_path / "run"), finished[1])
    steps = [line["step"] for line in train.read_log(tmp_path / "run") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_two_processes_equal_one_with_accumulation(corpus, finished, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "--data",
               str(corpus[1]), "--out", str(tmp_path / "run"), *QUICK]
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=240)
    two = torch.load(tmp_path / "run" / "step_0000006.pt", weights_only=True)["model"]
    for name, value in finished[1]["model"].items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5)
    losses = [[line["loss"] for line in train.read_log(out) if "loss" in line] for out in (tmp_path / "run", finished[0])]
    assert np.allclose(*losses, atol=1e-5)


def test_the_seed_decides_everything(corpus, finished, tmp_path):
    assert same(run(corpus, tmp_path / "same"), finished[1])
    assert not same(run(corpus, tmp_path / "other", "--seed", "1"), finished[1])


def test_the_same_command_never_destroys_a_finished_run(corpus, finished, capsys):
    out, _ = finished
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    run(corpus, out)
    assert "finished at step 6" in capsys.readouterr().out
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}


def test_another_run_is_refused_with_the_fields_that_differ(corpus, finished, capsys):
    error = fails(lambda: run(corpus, finished[0], "--mask-rate", "0.3", "--seed", "2"), capsys)
    assert "mask_rate=0.15 there, 0.3 here; seed=0 there, 2 here" in error


def test_a_damaged_checkpoint_is_passed_over(corpus, finished, tmp_path, capsys):
    for i, damage in enumerate((lambda b: b[:len(b) // 2], lambda b: b[:9000] + bytes([b[9000] ^ 255]) + b[9001:])):
        out = tmp_path / str(i)
        shutil.copytree(finished[0], out)
        newest = out / "step_0000006.pt"
        newest.write_bytes(damage(newest.read_bytes()))
        assert same(run(corpus, out), finished[1])
        assert "step_0000006.pt is damaged" in capsys.readouterr().err


def start(corpus, out, *flags):
    return subprocess.Popen([sys.executable, "train.py", "--data", str(corpus[1]), "--out", str(out), *QUICK, *flags], cwd=HERE,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def test_sigterm_saves_a_checkpoint_and_says_how_to_go_on(corpus, tmp_path):
    out = tmp_path / "run"
    process = start(corpus, out, "--max-steps", "100000", "--checkpoint-interval", "100000")
    wait_for(lambda: len(train.read_log(out)) > 4)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "the same command continues" in text
    step = torch.load(train.checkpoints(out)[-1], weights_only=True)["step"]
    assert step == train.read_log(out)[-1]["step"]


def test_a_run_that_is_killed_while_saving_can_be_continued(corpus, tmp_path):
    out = tmp_path / "run"
    for kill in range(3):
        process = start(corpus, out, "--max-steps", "100000", "--checkpoint-interval", "1", "--keep-checkpoints", "2")
        before = {p.name for p in train.checkpoints(out)}
        wait_for(lambda: {p.name for p in train.checkpoints(out)} - before and
                 (list(out.glob(".step*.tmp")) or time.sleep(0.01 * kill) is None))
        process.kill()
        process.wait()
        saved = train.checkpoints(out)
        assert train.load_checkpoint(out, torch.device("cpu"))["step"] == int(saved[-1].stem[5:])
        assert train.read_log(out)


def test_learning_rate_warms_up_and_falls_linearly_to_zero():
    factors = [train.learning_rate_factor(s, 4, 12) for s in range(12)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert np.allclose(np.diff(factors[4:]), -1 / 8) and train.learning_rate_factor(12, 4, 12) == 0
    assert train.learning_rate_factor(0, 0, 5) == 1


def test_default_preset_ablation_flag_in_rising_precedence():
    config, recipe, _ = train.parse(["--preset", "base++", "--ablation", "enc-mask", "--encoder-layers", "6", "--seed", "3"])
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
        assert (t.batch_size, t.warmup_steps, t.adam_epsilon, t.adam_beta1, t.adam_beta2, t.weight_decay, t.optimizer) == (
            2048, 10_000, 1e-6, 0.9, 0.98, 0.01, "adamw")
        assert (c.dropout, c.mask_rate, c.seq_len, c.norm, c.decoder_layers, c.init_std) == (0.1, 0.15, 512, "post", 4, 0.02)
        assert c.decoder_dim == c.encoder_dim and t.uncased == (name == "base")


@pytest.mark.parametrize("flags, message", [
    (["--encoder-layer", "3"], "unknown flag --encoder-layer; the flags are .*--encoder-layers"),
    (["--preset", "huge"], "invalid choice: 'huge' .*toy.*large"),
    (["--ablation", "bert"], "invalid choice: 'bert' .*mae-lm.*dec-1024"),
    (["--max-steps", "many"], "--max-steps: invalid int value: 'many'"),
    (["--norm", "mid"], "norm='mid': use post or pre"),
    (["--optimizer", "sgd"], "optimizer='sgd': use adamw or muon"),
    (["--warmup-steps", "1000000"], "warmup_steps=1000000: it exceeds max_steps="),
    (["--batch-size", "0"], "batch_size=0: use a positive number"),
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
    assert re.search(message, fails(lambda: run(corpus, tmp_path / "run", *flags), capsys))
    assert not (tmp_path / "run").exists()


def test_a_full_or_forbidden_disk_is_named(corpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert "choose another" in fails(lambda: run(corpus, tmp_path / "file"), capsys)
    usage = train.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert "0.0 GB are free" in fails(lambda: run(corpus, tmp_path / "run"), capsys)
    assert not (tmp_path / "run").exists()
    with pytest.raises(data.UserError, match="cannot write .*No space left"):
        with data.atomic(tmp_path / "x"):
            raise OSError(28, "No space left on device")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_diverging_run_stops_with_a_clear_line(corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        run(corpus, tmp_path / "run", "--learning-rate", "1e30", "--optimizer", "adamw")
    assert exit.value.code == 2 and "the gradient is not finite" in capsys.readouterr().err


def test_training_learns_the_little_language_and_fills_in_its_words(corpus, tmp_path, capsys):
    for ablation in ("mae-lm", "mlm"):
        out = tmp_path / ablation
        run(corpus, out, "--max-steps", "300", "--batch-size", "16", "--eval-interval", "300", "--ablation", ablation,
            "--dropout", "0", "--checkpoint-interval", "300")
        log = train.read_log(out)
        assert log[-1]["val_loss"] < 0.5 * log[0]["unigram_entropy"], ablation
        capsys.readouterr()
        train.main(["--fill-mask", "my friend likes [MASK] bread today, number 12.", "--init", str(out)])
        assert capsys.readouterr().out.startswith("[MASK] 1: some 0.")


def test_every_field_is_a_flag_with_its_comment_in_the_help(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    text = " ".join(capsys.readouterr().out.split())
    for config in (maelm.Config, train.TrainConfig):
        for field in train.fields(config):
            assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "delta of Figure 4: share of masked positions that the encoder reads [0.0]" in text


def test_the_code_keeps_its_promises():
    """maelm.py is short and plain; data and maelm import no script; nothing is left undocumented."""
    import ast
    trees = {path.stem: ast.parse(path.read_text()) for path in HERE.glob("*.py") if not path.stem.startswith("test_")}
    assert len((HERE / "maelm.py").read_text().splitlines()) <= 420
    for name, tree in trees.items():
        imported = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names} | {
            node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert name not in ("data", "maelm") or not imported & {"train", "finetune", "rank", "convert"}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                count = sum(isinstance(n, (ast.If, ast.IfExp)) for n in ast.walk(node))
                assert name != "maelm" or count <= 3, f"{node.name} has {count} conditionals"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main":
                assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


TAUS = (0.5, 0.8, 0.9, 0.95, 0.99)


# ---- rank.py: effective rank ----------------------------------------------------------------------------------
def built(kind, n=2000, d=48):
    """(n, d) float32 with a known kind of spectrum, rotated, and in all but one case a mean row that is not small."""
    random = np.random.default_rng(len(kind))
    scale = {"geometric": 0.8 ** np.arange(d), "power": 1 / np.arange(1, d + 1), "two-step": np.where(np.arange(d) < 7, 9, 0.3),
             "rogue": 0.9 ** np.arange(d)}[kind]
    rotation = np.linalg.qr(random.standard_normal((d, d)))[0]
    h = random.standard_normal((n, d)) * scale @ rotation + (kind != "power") * random.standard_normal(d)
    if kind == "rogue":
        h[:, 3] += 1000 * h[:, 3].std()
    return h.astype(np.float32)


def svd_ranks(h, centered):
    """Ranks at TAUS by the paper's formula, from numpy's singular values in float64."""
    h = h.astype(np.float64)
    squares = np.linalg.svd(h - h.mean(0) * centered, compute_uv=False) ** 2
    return [int(np.argmax(np.cumsum(squares) / squares.sum() >= tau)) + 1 for tau in TAUS], squares


def moments_of(h, sizes):
    moments = rank.Moments(h.shape[1])
    for part in torch.from_numpy(h).split(sizes):
        moments.add(part)
    return moments


def test_rank_is_exact_on_built_spectra():
    for kind, centered in itertools.product(("geometric", "power", "two-step", "rogue"), (False, True)):
        h = built(kind)
        expected, squares = svd_ranks(h, centered)
        x = h.astype(np.float64) - h.astype(np.float64).mean(0) * centered
        assert [rank.effective_rank(x, tau) for tau in TAUS] == expected, kind
        assert [rank.effective_rank(torch.from_numpy(x.T @ x), tau) for tau in TAUS] == expected, kind
        for sizes in (2000, 64, [1, 999, 7, 993], [1500, 500]):
            values = moments_of(h, sizes).spectrum(centered)
            assert [rank.tau_rank(values, tau) for tau in TAUS] == expected, (kind, centered, sizes)
            np.testing.assert_allclose(values.numpy(), squares, rtol=2e-5, atol=1e-6 * squares[1])


def test_moments_of_parts_are_the_moments_of_the_whole():
    h = built("rogue")
    whole, parts = moments_of(h, 100), [moments_of(part, 50) for part in np.array_split(h, 5)]
    again = np.concatenate([np.repeat(part, times, axis=0) for part, times in zip(np.array_split(h, 5), (2, 0, 1, 3, 0))])
    for centered in (False, True):
        for ours, theirs in ((rank.combine(parts), whole), (rank.combine([whole, parts[0]], [1, -1]), moments_of(h[400:], 100)),
                             (rank.combine(parts, [2, 0, 1, 3, 0]), moments_of(again, 100))):
            assert ours.count == theirs.count
            torch.testing.assert_close(ours.spectrum(centered), theirs.spectrum(centered), rtol=2e-5, atol=0.02)
            assert abs(ours.mean_cosine() - theirs.mean_cosine()) < 1e-6


def test_equal_singular_values_count_exactly():
    for d, tau in itertools.product((3, 10, 64), TAUS):
        k = int(np.ceil(tau * d - 1e-9))
        assert rank.effective_rank(torch.eye(d), tau) == k, (d, tau)
        assert rank.effective_rank(torch.eye(d).repeat(3, 1), tau) == k


def test_equal_rows_have_rank_one_and_without_their_mean_none():
    random = np.random.default_rng(0)
    h = (random.standard_normal(16) * (1 + 1e-7 * random.standard_normal((500, 16)))).astype(np.float32)  # equal but for rounding
    moments = moments_of(h, 33)
    assert [rank.tau_rank(moments.spectrum(centered), 0.9) for centered in (False, True)] == [1, 0]
    assert abs(moments.mean_cosine() - 1) < 1e-5 and rank.effective_rank(np.zeros((5, 3))) == 0


def test_other_measures_follow_their_definitions():
    h = built("geometric", n=300, d=12)
    moments, sigma = moments_of(h, 100), np.linalg.svd(h.astype(np.float64), compute_uv=False)
    values, p = moments.spectrum(False), sigma / sigma.sum()
    assert np.isclose(rank.rankme(values), np.exp(-(p * np.log(p)).sum()), rtol=1e-4)
    assert np.isclose(rank.participation_ratio(values), (sigma ** 2).sum() ** 2 / (sigma ** 4).sum(), rtol=1e-4)
    assert np.isclose(rank.stable_rank(values), np.linalg.norm(h) ** 2 / np.linalg.norm(h, 2) ** 2, rtol=1e-4)
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i, j in itertools.permutations(range(300), 2)]
    assert np.isclose(moments.mean_cosine(), np.mean(cosines), atol=1e-5)
    flat = torch.ones(9, dtype=torch.float64)
    assert all(np.isclose(measure(flat), 9) and np.isfinite(measure(0 * flat)) for measure in rank.MEASURES.values())


@pytest.mark.parametrize("h, tau, message", [
    (np.ones((5, 3)), 0, "use 0 < tau < 1"), (np.ones((5, 3)), 1.0, "tau=1.0"), (np.ones((5, 3)), float("nan"), "tau=nan"),
    (np.full((5, 3), np.nan), 0.9, "NaN"), (np.ones(5), 0.9, r"\(5,\)"), (-np.eye(3), 0.9, "eigenvalue -1 < 0")])
def test_effective_rank_refuses_what_has_no_answer(h, tau, message):
    with pytest.raises(ValueError, match=message):
        rank.effective_rank(h, tau)


# ---- rank.py: what is measured --------------------------------------------------------------------------------
def small_subject(dim=8, layers=2, B=40, n=20):
    """A maelm encoder with large random weights, on rows with special tokens in them, as rank.py sees it."""
    config = maelm.Config(vocab_size=300, seq_len=n, encoder_layers=layers, encoder_dim=dim, encoder_heads=2, dropout=0.0)
    torch.manual_seed(0)
    encoder = maelm.MAELM(config).encoder.eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    rows = torch.randint(maelm.NUM_SPECIAL, 300, (B, n), generator=generator(3)).numpy()
    rows[:, 0], rows[::3, 7], rows[::2, 11] = maelm.CLS, maelm.SEP, maelm.SEP
    positions = torch.arange(n)[None]
    return rank.Subject("small", lambda tokens: encoder(tokens, positions, all_layers=True), rows, "rows", dim, n,
                        maelm.MASK, [0, 1, 2, 3], encoder)


def options_of(*flags):
    return rank.parse(["small", *flags])


def one_place():
    return train.Place(0, 1, torch.device("cpu"), torch.float32)


def test_each_curve_holds_the_states_it_says_at_each_layer():
    subject = small_subject()
    special = np.isin(subject.rows, [0, 1, 2, 3])
    masked = rank.draw_masks(special, np.arange(40), 0)
    with torch.no_grad():
        encoder = subject.encoder
        unmasked = torch.from_numpy(subject.rows)
        replaced = torch.where(torch.from_numpy(masked), maelm.MASK, unmasked)
        states = [[encoder.norm(encoder.token_embedding(x) + encoder.position_embedding.weight), *subject.encode(x)[1:]]
                  for x in (replaced, unmasked)]
    for flags, counted in (((), special | True), (("--no-specials",), ~special)):
        options = options_of("--batch-size", "7", *flags)
        found = rank.stream(subject, np.arange(40), options, one_place())
        for curve, h, rows in (("with_mask", states[0], counted), ("without_mask", states[1], counted),
                               ("mask_only", states[0], masked)):
            assert len(found[curve]) == 3
            for layer in range(3):
                direct = h[layer].numpy()[rows]
                assert found[curve][layer].count == rows.sum(), (curve, flags)
                for centered in (False, True):
                    _, squares = svd_ranks(direct, centered)
                    np.testing.assert_allclose(found[curve][layer].spectrum(centered), squares, rtol=1e-4, atol=1e-6 * squares[0])


def test_masks_are_fifteen_percent_of_real_tokens_and_a_function_of_seed_and_row():
    special = np.isin(small_subject().rows, [0, 1, 2, 3])
    masked = rank.draw_masks(special, np.arange(40), 0)
    assert (masked.sum(1) == 3).all() and not (masked & special).any()
    assert np.array_equal(rank.draw_masks(special[5:9], np.arange(5, 9), 0), masked[5:9])
    assert not np.array_equal(rank.draw_masks(special, np.arange(40), 1), masked)
    share = rank.draw_masks(np.zeros((20_000, 20), bool), np.arange(20_000), 0).mean(0)
    assert abs(share - 0.15).max() < 5 * (0.15 * 0.85 / 20_000) ** 0.5


def test_ranks_do_not_depend_on_batches_and_converge_to_the_whole():
    subject = small_subject()
    results = [rank.analyse(subject, options_of("--batch-size", size, "--tau", *map(str, TAUS)), one_place())[0]
               for size in ("1", "9", "64")]
    assert all(json.dumps(integers(result)) == json.dumps(integers(results[0])) for result in results)
    last = results[0]["layers"][-1]
    assert results[0]["convergence"][-1] == {"n": 800, **{c: last[c]["without_mask"]["0.5"] for c in rank.CENTERINGS}}


def integers(found):
    """All ranks of a model's part of rank.json."""
    return [{c: {k: [e[str(t)] for t in TAUS if str(t) in e] for k, e in curves.items()} for c, curves in layer.items()}
            for layer in found["layers"]]


def test_intervals_are_those_of_resampled_text_and_need_no_second_run():
    subject, flags = small_subject(dim=16, B=100), ["--bootstrap", "40", "--seed", "3", "--tau", *map(str, TAUS)]
    found, _ = rank.analyse(subject, options_of(*flags), one_place())
    _, parts = rank.measure(subject, options_of(*flags), one_place())
    assert len(parts) == rank.CHUNKS and len(parts[0]["with_mask"]) == 3
    draws = np.random.default_rng(3).multinomial(20, [1 / 20] * 20, 40)
    with torch.no_grad():
        h = subject.encode(torch.from_numpy(subject.rows))[2].numpy().reshape(20, -1, 16)
    for centering, centered in rank.CENTERINGS.items():
        samples = [np.concatenate([np.repeat(block, k, axis=0) for block, k in zip(h, draw)]) for draw in draws]
        ranks = [svd_ranks(sample, centered)[0] for sample in samples]
        low, high = np.percentile(ranks, (2.5, 97.5), axis=0)
        expected = {str(tau): [round(a), round(b)] for tau, a, b in zip(TAUS, low, high)}
        assert found["layers"][2][centering]["without_mask"]["interval"] == expected


def test_states_that_are_not_finite_are_named():
    subject = small_subject(B=80)
    broken = subject._replace(encode=lambda tokens: [h * float("nan") for h in subject.encode(tokens)])
    with pytest.raises(data.UserError, match="small: hidden states with NaN"):
        rank.analyse(broken, options_of(), one_place())


# ---- rank.py: theory ------------------------------------------------------------------------------------------
def test_pure_attention_collapses_double_exponentially_and_skip_connections_prevent_it():
    for seed in range(3):
        logs = np.log10(rank.collapse(seed=seed))
        assert (np.diff(logs) < 0).all() and logs[-1] < -50
        assert abs(logs[4] / logs[3] - 3) < 0.3 and abs(logs[5] / logs[4] - 3) < 0.15, logs
        assert rank.collapse(seed=seed, skip=True)[-1] > 0.05


def test_one_layer_of_pure_attention_is_the_formula():
    h, R, qk, vo = (torch.randn(*shape, dtype=torch.float64, generator=generator(i))
                    for i, shape in enumerate(((6,), (9, 6), (6, 6), (6, 6))))
    R = R - R.mean(0)
    H = R + h
    for skip in (False, True):
        new, mean = rank.attention_only(R, h, qk, vo, skip)
        torch.testing.assert_close(new + mean, (H @ qk @ H.T).softmax(1) @ H @ vo + skip * H)
        torch.testing.assert_close(new.mean(0), torch.zeros(6, dtype=torch.float64))
    assert abs(rank.relative_residual(R, h) - (H - H.mean(0)).norm() / H.norm()) < 1e-12


def test_residuals_are_exact_far_below_the_precision_of_float64():
    """Against the formula with 120 digits (mpmath comes with torch), for residuals far below the mean row."""
    import mpmath
    for seed, size in itertools.product(range(4), (1e-9, 1e-25)):
        h, R, qk, vo = (torch.randn(*shape, dtype=torch.float64, generator=generator(4 * seed + i))
                        for i, shape in enumerate(((3,), (5, 3), (3, 3), (3, 3))))
        R = size * (R - R.mean(0))
        new, _ = rank.attention_only(R, h, qk, vo)
        with mpmath.workdps(120):
            H = mpmath.matrix(R.tolist()) + mpmath.matrix([h.tolist()] * 5)
            A = (H * mpmath.matrix(qk.tolist()) * H.T).apply(mpmath.exp)
            A = mpmath.matrix([[A[i, j] / sum(A[i, k] for k in range(5)) for j in range(5)] for i in range(5)])
            out = A * H * mpmath.matrix(vo.tolist())
            exact = [[float(out[i, j] - sum(out[k, j] for k in range(5)) / 5) for j in range(3)] for i in range(5)]
        exact = torch.tensor(exact, dtype=torch.float64)
        assert 0 < exact.norm() < 1e3 * size ** 3 and (new - exact).norm() < 1e-6 * exact.norm(), (seed, size)


def test_both_sides_of_the_bound_are_app_a():
    real, qk, vo = (torch.randn(*shape, dtype=torch.float64, generator=generator(i)) * scale
                    for i, (shape, scale) in enumerate((((12, 6), 1), ((6, 6), 0.05), ((6, 6), 1))))
    mix = torch.rand(4, 12, dtype=torch.float64, generator=generator(5))
    masks = mix / mix.sum(1, keepdim=True) @ real
    for size in (0.5, 0.3, 0.1):
        R = size * (real - real.mean(0))
        sides = rank.both_sides(real.mean(0) + R, masks * size + (1 - size) * real.mean(0), qk, vo)
        assert sides["eq3"] < 1e-9 and sides["left"] <= sides["right"] and sides["spread"] < 1.256
    assert rank.both_sides(real[:3], masks, qk, vo)["eq3"] > 0.01  # three rows do not span what four lie in
    attention = maelm.Attention(6, 2, 0.0).double()
    qk, vo = rank.single_head(attention)
    x, parts = real, attention.key_value.weight.chunk(2)
    torch.testing.assert_close(x @ qk @ x.T, (x @ attention.query.weight.T) @ (x @ parts[0].T).T / 6 ** 0.5)
    torch.testing.assert_close(x @ vo, x @ parts[1].T @ attention.output.weight.T)


# ---- rank.py: the command -------------------------------------------------------------------------------------
def rank_json(out, *arguments):
    rank.main([*map(str, arguments), "--out", str(out)])
    return json.loads((out / "rank.json").read_text())


def test_the_command_writes_what_the_contract_says(corpus, finished, tmp_path, capsys):
    text, folder = corpus
    mlm = tmp_path / "mlm"
    run(corpus, mlm, "--ablation", "mlm", "--max-steps", "2")
    found = rank_json(tmp_path / "rank", finished[0], mlm, "--data", text, "--val-share", 1, "--tau", 0.9, 0.5, "--bootstrap", 3,
                      "--spectrum", "--theory", "--collapse")
    assert {p.name for p in (tmp_path / "rank").iterdir()} == {
        "rank.json", "rank.csv", "rank.png", "spectrum.csv", "spectrum.png", "collapse.png"}
    assert list(found["models"]) == [str(finished[0]), str(mlm)] and found["tau"] == [0.9, 0.5]
    for model in found["models"].values():
        assert len(model["layers"]) == 3 and model["d"] == 32
        assert model["n"]["with_mask"] == model["n"]["without_mask"] == 6 * model["n"]["mask_only"]  # 4 of 24
        for layer, centering, curve in itertools.product(model["layers"], rank.CENTERINGS, rank.CURVES):
            entry = layer[centering][curve]
            low, high = entry["interval"]["0.9"]
            assert 1 <= entry["0.5"] <= entry["0.9"] <= 32 and low <= entry["0.9"] + 2 and entry["0.9"] <= high + 2
    lines = list(csv.DictReader((tmp_path / "rank" / "rank.csv").open()))
    assert len(lines) == 2 * 3 * 2 * 3
    assert lines[-1]["rank_0.9"] == str(found["models"][str(mlm)]["layers"][-1]["centered"]["mask_only"]["0.9"])
    assert len((tmp_path / "rank" / "spectrum.csv").read_text().splitlines()) == 1 + 36 * 32
    printed = capsys.readouterr().out
    for piece in ("as Table 3", "Eq.(3) error", "are a token unknown to it", "convergence", "attention only"):
        assert piece in printed, piece


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
    meta = json.loads((folder / "meta.json").read_text())  # the run's own validation rows are too few: lend it the others
    whole = tmp_path / "shards"
    shutil.copytree(folder, whole)
    (whole / "meta.json").write_text(json.dumps(meta | {"val": meta["train"]}))
    found = rank_json(tmp_path / "d", finished[0], "--data", whole)["models"].popitem()[1]
    assert found["n"]["with_mask"] == 24 * meta["train"][0][1]


def test_two_processes_give_the_ranks_of_one(corpus, finished, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np, torch, train, rank, test_maelm as t
place = train.set_up("fp32")
found = []
for kind in ("geometric", "power", "two-step", "rogue"):
    for sizes in (2000, 77):
        rows = [t.built(kind)[:300], t.built(kind)[300:]][place.rank]
        moments = t.moments_of(rows, sizes).over_processes(place)
        found.append([kind, moments.count, *([rank.tau_rank(moments.spectrum(c), tau) for tau in t.TAUS] for c in (False, True))])
if place.rank == 0:
    json.dump(found, open({str(tmp_path / "found.json")!r}, "w"))
rank.main(sys.argv[1:])
""")
    flags = [str(finished[0]), "--data", str(corpus[0]), "--val-share", "1", "--tau", *map(str, TAUS), "--bootstrap", "2"]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), *flags,
                    "--out", str(tmp_path / "two")], cwd=HERE, check=True, capture_output=True, timeout=240)
    for kind, count, *ranks in json.loads((tmp_path / "found.json").read_text()):
        assert count == 2000 and ranks == [svd_ranks(built(kind), centered)[0] for centered in (False, True)], kind
    one, two = rank_json(tmp_path / "one", *flags), json.loads((tmp_path / "two" / "rank.json").read_text())
    (one,), (two,) = one["models"].values(), two["models"].values()
    assert one["n"] == two["n"] and one["convergence"] == two["convergence"]
    assert integers(one) == integers(two)


@pytest.mark.parametrize("flags, message", [
    ([], "MODEL: name a run folder or hf:NAME"), (["a", "a"], "name each model once"), (["a", "--tau", "1.5"], "use 0 < tau < 1"),
    (["a", "--tokens", "0"], "--tokens: use a positive number"), (["a", "--val-share", "2"], "0 < share <= 1"),
    (["hf:a", "--theory"], "--theory: for run folders of train.py only"), (["no/such/run"], "no/such/run: no such run folder"),
    (["hf:no/such/folder"], "hf:no/such/folder: transformers cannot load it")])
def test_a_bad_rank_command_gets_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in fails(lambda: rank.main(flags), capsys)


def test_too_few_tokens_are_refused(corpus, finished, tmp_path, capsys):
    command = [str(finished[0]), "--out", str(tmp_path / "out")]
    for flags in ([], ["--data", str(corpus[0]), "--val-share", "1", "--tokens", "1000"]):
        error = fails(lambda: rank.main([*command, *flags]), capsys)
        assert "fewer than 10 d = 320" in error and "Raise --tokens" in error and not (tmp_path / "out").exists()
    command += ["--data", str(corpus[0]), "--val-share", "1e-6"]
    assert "less than a row of 24" in fails(lambda: rank.main(command), capsys)


# ---- rank.py: encoders of the Hub -----------------------------------------------------------------------------
SIZE = dict(vocab_size=200, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, pad_token_id=1)
HUB = {  # family: (configuration class, its fields)
    "roberta": ("RobertaConfig", SIZE | dict(max_position_embeddings=34)),
    "bert": ("BertConfig", SIZE | dict(max_position_embeddings=32)),
    "albert": ("AlbertConfig", SIZE | dict(embedding_size=8, max_position_embeddings=32)),
    "electra": ("ElectraConfig", SIZE | dict(embedding_size=8, max_position_embeddings=32)),
    "bart": ("BartConfig", dict(vocab_size=200, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
                                decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
                                bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)),
    "deberta": ("DebertaV2Config", SIZE | dict(max_position_embeddings=32, relative_attention=True, pos_att_type=["c2p", "p2c"],
                                               position_biased_input=False)),
    "modernbert": ("ModernBertConfig", SIZE | dict(max_position_embeddings=32, bos_token_id=0, cls_token_id=0, eos_token_id=2,
                                                   sep_token_id=2, local_attention=8)),
}


def hub_folder(family, folder, mask=True):
    """A tiny random model of a family and a tokenizer that puts special tokens around a row, saved as transformers does."""
    import tokenizers
    import transformers
    name, fields = HUB[family]
    torch.manual_seed(0)
    transformers.AutoModel.from_config(getattr(transformers, name)(**fields)).save_pretrained(folder)
    specials = ["<s>", "<pad>", "</s>", "<mask>", "<unk>"]
    words = [*specials, *(f"w{i}" for i in range(150)), "a"]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
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
    hub_folder(family, tmp_path / "model")
    name = f"hf:{tmp_path / 'model'}"
    options = rank.parse([name, "--data", str(words), "--val-share", "1"])
    subject = rank.load_hub(name, options, one_place())
    assert (subject.seq_len, subject.dim, subject.mask, subject.specials) == (32, 16, 3, [0, 1, 2, 3])
    assert (subject.rows[:, 0] == 0).all() and (subject.rows[:, -1] == 2).all() and not (subject.rows == 3).any()
    found, _ = rank.analyse(subject, options, one_place())
    assert len(found["layers"]) == 3 and found["n"]["mask_only"] == 5 * len(subject.rows)
    model = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    model = model.get_encoder() if family == "bart" else model
    with torch.no_grad():
        h = model(torch.from_numpy(subject.rows)).last_hidden_state.flatten(0, 1).numpy()
    for centering, centered in rank.CENTERINGS.items():
        assert found["layers"][-1][centering]["without_mask"]["0.9"] == svd_ranks(h, centered)[0][2]


def test_a_hub_model_without_mask_token_is_refused(words, tmp_path, capsys):
    hub_folder("bert", tmp_path / "model", mask=False)
    error = fails(lambda: rank.main([f"hf:{tmp_path / 'model'}", "--data", str(words), "--val-share", "1"]), capsys)
    assert "has no mask token" in error


def test_without_transformers_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(lambda: rank.main(["hf:roberta-base"]), capsys)


# ---- README.md ------------------------------------------------------------------------------------------------
def readme_commands():
    """Every python and torchrun command in the README's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    commands = [part.partition("  #")[0].strip() for block in blocks for line in block.splitlines()
                for part in line.split("&&")]
    return [command for command in commands if re.match(r"(python|torchrun) ", command)]


SHORTER = ("--max-steps 3 --warmup-steps 1 --eval-rows 8 --batch-size 8 --micro-batch-size 4 --encoder-layers 1 --encoder-dim 32 "
           "--encoder-heads 2").split()


def test_every_command_of_the_readme_runs(tmp_path):
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in ("my_texts", "hub"):
        (tmp_path / folder).mkdir()
        write_corpus(tmp_path / folder / "text.txt", 10_000)
    commands = readme_commands()
    assert commands[0] == "python train.py" and len(commands) > 5
    for command in commands:
        words = re.sub(r"hf:\S+", f"hf:{tmp_path / 'hub'}", command).replace("--nproc_per_node 8", "--nproc_per_node 2")
        words = shlex.split(words) + (SHORTER + ["--cache", "cache"] if "train.py" in words else [])
        start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(start + words[1:], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command == "python train.py":
            assert "unigram entropy" in done.stdout and done.stdout.count("[") >= 4
    assert (tmp_path / "out/toy/loss.png").is_file() and (tmp_path / "out/toy-mlm/loss.png").is_file()


def test_the_readme_lists_every_ablation_and_preset():
    text = (HERE / "README.md").read_text()
    for name in [*maelm.ABLATIONS, *maelm.PRESETS]:
        assert f"`{name}`" in text, name
    assert "Differs from the paper" not in text and (HERE / "maelm.py").read_text().count("Differs from the paper") == 4


# ---- Mistakes that the claims above must catch -----------------------------------------------------------------
MUTANTS = [  # (claim, file, source, mistake)
    (test_every_row_has_exactly_k_masks_and_no_special_token_among_them, "maelm",
     "noise.masked_fill(special, 2.0).topk", "noise.topk"),
    (test_every_row_has_exactly_k_masks_and_no_special_token_among_them, "maelm",
     "noise.masked_fill(special, 2.0).topk(k, largest=False).indices",
     "torch.randint(1, n - 1, (B, k), generator=generator)"),
    (test_masks_are_uniform_over_real_tokens, "maelm", "noise.masked_fill(special, 2.0).topk(k, largest=False)",
     "(noise * torch.linspace(1, 2, n)).masked_fill(special, 2.0).topk(k, largest=False)"),
    (test_kept_positions_are_the_rest_in_ascending_order, "maelm", "kept = (~removed).nonzero()[:, 1].view(B, -1)",
     "kept = (~removed).nonzero()[:, 1].view(B, -1).flip(1)"),
    (test_corrupt_is_a_pure_function, "maelm", "torch.rand(2, B, n, generator=generator, device=tokens.device)",
     "torch.rand(2, B, n)"),
    (test_delta_is_the_share_of_masks_that_the_encoder_reads, "maelm", "chosen[:, shown:]", "chosen[:, :shown]"),
    (test_delta_is_the_share_of_masks_that_the_encoder_reads, "maelm", "shown = round(config.mask_in_encoder * k)",
     "shown = int(config.mask_in_encoder * k)"),
    (test_random_fill_is_a_real_token_and_mostly_not_the_true_one, "maelm",
     "torch.randint(NUM_SPECIAL, config.vocab_size", "torch.randint(0, config.vocab_size"),
    (test_bert_trick_is_80_10_10, "maelm", "u < random + unchanged", "u < random"),
    (test_masked_tokens_cannot_reach_the_encoder, "maelm", "torch.where(masked, fill, tokens).gather(1, kept)",
     "tokens.gather(1, kept)"),
    (test_removing_equals_hiding, "maelm", "kept if self.config.aligned_positions and removed else consecutive",
     "consecutive"),
    (test_removing_equals_hiding, "maelm", "keys[:, None, :] - queries[:, :, None] + len",
     "torch.arange(keys.shape[1])[None, None] - torch.arange(queries.shape[1])[None, :, None] + 0 * keys[:, None] + len"),
    (test_encoder_positions_skip_the_removed_tokens_only_if_aligned, "maelm",
     "self.config.aligned_positions and removed", "not self.config.aligned_positions and removed"),
    (test_decoder_input_is_the_two_case_formula, "maelm", "(masked & self.config.decoder_reset)", "(masked & False)"),
    (test_decoder_input_is_the_two_case_formula, "maelm", "weight[MASK]", "weight[SEP]"),
    (test_attention_is_the_formula_in_float64_with_gradient_of_the_bias, "maelm", "q * q.shape[-1] ** -0.5", "q"),
    (test_attention_is_the_formula_in_float64_with_gradient_of_the_bias, "maelm", "logits + bias)", "logits + bias.detach())"),
    (test_a_layer_equals_pytorchs_own, "maelm", "nn.GELU(), nn.Linear(4", 'nn.GELU("tanh"), nn.Linear(4'),
    (test_a_layer_equals_pytorchs_own, "maelm", "return x if self.pre else self.norm(x)", "return self.norm(x)"),
    (test_last_layer_at_masked_positions_equals_the_full_layer, "maelm", "context = (y, *context)",
     "context = (take(y, at), *context)"),
    (test_mlm_is_the_textbook_mlm, "maelm", "positions.expand(len(at), -1).gather(1, at)",
     "positions.expand(len(at), -1)[:, :at.shape[1]]"),
    (test_padding_changes_nothing, "maelm", "where(~padding, -torch.inf)", "where(padding, -torch.inf)"),
    (test_all_layers_are_the_embedding_output_and_every_layer, "maelm", "return states if all_layers", "return states[1:] if all_layers"),
    (test_relative_buckets_are_t5s, "maelm", "half * (distance > 0)", "half * (distance < 0)"),
    (test_relative_buckets_are_t5s, "maelm", "exact = half // 2\n", "exact = half // 4\n"),
    (test_relative_bias_is_a_function_of_key_minus_query, "maelm", "keys[:, None, :] - queries[:, :, None]",
     "queries[:, :, None] - keys[:, None, :]"),
    (test_dropout_is_in_the_encoder_and_not_in_the_decoder, "maelm", 'Block(config, d, 0.0, config.decoder_self != "none"',
     'Block(config, d, config.dropout, config.decoder_self != "none"'),
    (test_loss_is_the_mean_negative_log_likelihood_over_masked_positions, "maelm",
     "return masked.int().topk(self.config.masks_per_row(n)).indices", "return torch.arange(n).expand(B, -1)"),
    (test_loss_is_the_mean_negative_log_likelihood_over_masked_positions, "maelm",
     "tokens.gather(1, at).flatten())", 'tokens.gather(1, at).flatten(), reduction="sum")'),
    (test_output_embeddings_are_the_input_embeddings, "maelm", "h, at), self.encoder.token_embedding.weight)",
     "h, at), self.encoder.token_embedding.weight.detach())"),
    (test_uni_decoder_cannot_see_the_future, "maelm", "torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)", "tokens"),
    (test_uni_decoder_cannot_see_the_future, "maelm", "keys[:, None, None, :] <= queries", "keys[:, None, None, :] >= queries"),
    (test_initial_weights_are_normal_with_the_stated_deviation, "maelm", "nn.init.normal_(module.weight, std=self.config.init_std)",
     "nn.init.trunc_normal_(module.weight, std=self.config.init_std, a=-0.04, b=0.04)"),
    (test_table_2_sizes_keep_their_ratio_to_the_encoder, "train", "if layers and not rest:", "if False:"),
    (test_an_epoch_is_a_permutation_without_replacement, "data", "outside = x >= total", "outside = x < 0"),
    (test_an_epoch_is_a_permutation_without_replacement, "data", "+ epoch[:, None].astype(np.uint64)", ""),
    (test_learning_rate_warms_up_and_falls_linearly_to_zero, "train", "(step + 1) / warmup_steps", "step / warmup_steps"),
    (test_learning_rate_warms_up_and_falls_linearly_to_zero, "train", "/ (max_steps - warmup_steps)", "/ max_steps"),
    (test_rank_is_exact_on_built_spectra, "rank", "torch.linalg.svdvals(x) ** 2", "torch.linalg.svdvals(x)"),
    (test_rank_is_exact_on_built_spectra, "rank", "reached = values.cumsum(0)",
     "values = values.sqrt()\n    reached = values.cumsum(0)"),
    (test_rank_is_exact_on_built_spectra, "rank", "int((~reached).sum()) + 1", "int((~reached).sum())"),
    (test_rank_is_exact_on_built_spectra, "rank", "if centered else whole", "if not centered else whole"),
    (test_rank_is_exact_on_built_spectra, "rank", "about(torch.zeros_like(self.shift)).gram", "gram"),
    (test_rank_is_exact_on_built_spectra, "rank", "self.shift = h.mean(0).to(self.shift)", "pass"),
    (test_rank_is_exact_on_built_spectra, "rank", "(y.T @ y).to", "(y.bfloat16().T @ y.bfloat16()).to"),
    (test_moments_of_parts_are_the_moments_of_the_whole, "rank", "self.count * torch.outer(delta, delta)",
     "torch.outer(delta, delta)"),
    (test_moments_of_parts_are_the_moments_of_the_whole, "rank", "part = part.about(shift)", "pass"),
    (test_equal_singular_values_count_exactly, "rank", "(tau - 1e-9)", "tau"),
    (test_equal_rows_have_rank_one_and_without_their_mean_none, "rank", "* ~noise", ""),
    (test_other_measures_follow_their_definitions, "rank", "p = values.sqrt() / values.sqrt()", "p = values / values"),
    (test_other_measures_follow_their_definitions, "rank", "- self.count) / max(1.0, self.count * (self.count - 1))",
     ") / max(1.0, self.count * self.count)"),
    (test_each_curve_holds_the_states_it_says_at_each_layer, "rank", "to(place.device))):", "to(place.device))[1:]):"),
    (test_each_curve_holds_the_states_it_says_at_each_layer, "rank", "~special | options.specials", "~special | True"),
    (test_each_curve_holds_the_states_it_says_at_each_layer, "rank", '"mask_only": masked}', '"mask_only": counted}'),
    (test_each_curve_holds_the_states_it_says_at_each_layer, "rank", '"mask_only": masked}),\n                  (tokens, {',
     '"mask_only": masked}),\n                  (np.where(masked, subject.mask, tokens), {'),
    (test_masks_are_fifteen_percent_of_real_tokens_and_a_function_of_seed_and_row, "rank", "return masked & ~special",
     "return np.roll(masked, 1, axis=1)"),
    (test_masks_are_fifteen_percent_of_real_tokens_and_a_function_of_seed_and_row, "rank", "mix(indices.astype(np.uint64)",
     "mix(np.arange(len(indices)).astype(np.uint64)"),
    (test_intervals_are_those_of_resampled_text_and_need_no_second_run, "rank", "combine(blocks, list(draw))",
     "combine(blocks, [min(1, k) for k in draw])"),
    (test_residuals_are_exact_far_below_the_precision_of_float64, "rank", "torch.expm1(F - scale[:, None])",
     "(torch.exp(F - scale[:, None]) - 1)"),
    (test_one_layer_of_pure_attention_is_the_formula, "rank",
     "torch.where(small, torch.log1p(torch.expm1(F) @ r), (F + log_r).logsumexp(1))", "0 * F[0]"),
    (test_one_layer_of_pure_attention_is_the_formula, "rank", "R @ qk.T @ h", "R @ qk @ h"),
    (test_both_sides_of_the_bound_are_app_a, "rank", "query.T @ key / len(query) ** 0.5", "query @ key.T / len(query) ** 0.5"),
    (test_both_sides_of_the_bound_are_app_a, "rank", "+ 1 / len(real)", ""),
    (test_pure_attention_collapses_double_exponentially_and_skip_connections_prevent_it, "rank",
     "new, shift = new + skip * R", "new, shift = new + (not skip) * R"),
]


def load_mutant(folder, file, source, mistake):
    """The module `file` with one mistake in it, imported under another name."""
    text = (HERE / f"{file}.py").read_text()
    assert text.count(source) == 1, f"{source!r} must occur once in {file}.py"
    path = folder / f"{file}_mutant.py"
    path.write_text(text.replace(source, mistake))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("claim, file, source, mistake", MUTANTS, ids=[f"{m[0].__name__[5:45]}-{i}" for i, m in enumerate(MUTANTS)])
def test_the_claim_catches_the_mistake(claim, file, source, mistake, tmp_path, monkeypatch):
    mutant = load_mutant(tmp_path, file, source, mistake)
    claim()  # holds for the code as it is
    monkeypatch.setitem(globals(), file, mutant)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        claim()


def test_continuing_catches_what_was_not_saved_or_seeded(corpus, finished, tmp_path, monkeypatch):
    claim = test_a_continued_run_equals_an_uninterrupted_one_bitwise
    for i, (source, mistake) in enumerate((
            ("optimizer.load_state_dict(saved)", "pass"),
            ("torch.manual_seed(seed_of(train.seed, step, number))", "pass"),
            ("rows_of_step(train.seed, step, train", "rows_of_step(train.seed, np.random.randint(1000), train"))):
        monkeypatch.setitem(globals(), "train", load_mutant(tmp_path, "train", source, mistake))
        (tmp_path / str(i)).mkdir()
        with pytest.raises(AssertionError):
            claim(corpus, finished, tmp_path / str(i), stop=4)
