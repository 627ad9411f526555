"""Claims of the paper and of the README, as tests. Each important claim is also shown to catch wrong code: MUTANTS
lists small mistakes in the source, and the last test of a section runs a claim against each of them.

    pytest                          # all of it, 10 minutes on one core; -n 2 uses two
    python test_maelm.py -h         # for classes: --blank makes an assignment, --grade marks it; docs/teaching.md
"""
import ast
import contextlib
import csv
import doctest
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

import data  # noqa: E402
import finetune  # noqa: E402
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


def test_on_a_gpu_attention_is_fused_and_never_cudnns(monkeypatch):
    """cuDNN's kernel may read a mask as another dtype and has returned NaN gradients for padded lengths."""
    from torch._subclasses import FakeTensorMode
    allowed = []

    def fused(q, k, v, attn_mask, dropout_p):
        allowed.append([getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("cudnn", "flash", "mem_efficient", "math")])
        return q

    monkeypatch.setattr(maelm.F, "scaled_dot_product_attention", fused)
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, device="cuda")
        maelm.attention(q, q, q, torch.empty(2, 4, 8, 8, device="cuda"))
    assert allowed == [[False, True, True, True]]


@pytest.mark.parametrize("m", [18, 20, 24])
def test_a_bias_lies_in_memory_as_fused_kernels_want_it(m):
    bias = maelm.RelativeBias(tiny())
    positions = torch.arange(24).expand(3, -1)[:, :m]
    found = bias(positions, positions)
    assert found.shape == (3, 4, m, m) and found.stride(-1) == 1 and all(s % 8 == 0 for s in found.stride()[:-1])


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
        parts = maelm.Encoder(config), maelm.Decoder(config), maelm.Head(config)
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


# ---- data.py: large corpora ------------------------------------------------------------------------------------
SMALL = dict(BLOCK_CHARACTERS=2000, SHARD_TOKENS=2400, PROCESS_BYTES=1)  # a small text has many blocks and shards
OPTIONS = ["--vocab-size", "320", "--seq-len", "24", "--val-share", "0.1"]


def prepare_small(monkeypatch, source, out, processes=1):
    for name, value in SMALL.items():
        monkeypatch.setattr(data, name, value)
    return contents(data.prepare(str(source), out, 320, 24, True, 0.1, processes=processes))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_do_not_depend_on_processes_nor_rows_on_shards(corpus, tmp_path, monkeypatch):
    source = f"{corpus[0]}+{write_corpus(tmp_path / 'other.txt', 100)}"
    large = data.prepare(source, tmp_path / "large", 320, 24, True, 0.1)
    one, three = (prepare_small(monkeypatch, source, tmp_path / str(n), n) for n in (1, 3))
    assert one == three and {"train-00003.npy", "val-00003.npy", "meta.json", "tokenizer.json"} < set(one)
    for part in ("train", "val"):
        whole, many = (data.Rows(folder, part, 320, 24) for folder in (large, tmp_path / "1"))
        assert len(whole.shards) == 1 < len(many.shards) and len(whole) == len(many)
        assert np.array_equal(*(rows[np.arange(len(whole))] for rows in (whole, many)))


class End(BaseException):
    """The end of a process."""


def end_after(monkeypatch, writes):
    """Let the process end before the next file after so many were written."""
    left, rename = iter(range(writes)), os.replace

    def replace(source, target):
        if next(left, None) is None:
            raise End
        rename(source, target)
    monkeypatch.setattr(os, "replace", replace)


def test_preparing_continues_wherever_it_ended(corpus, tmp_path, monkeypatch):
    whole, out, ends = prepare_small(monkeypatch, corpus[0], tmp_path / "whole"), tmp_path / "out", 0
    while not (out / "meta.json").is_file():
        done = json.loads((out / "progress.json").read_text()) if (out / "progress.json").is_file() else {}
        files = {name: (out / name).stat().st_ino for part in ("train", "val") for name, _ in done.get(part, ())}
        with monkeypatch.context() as patch, contextlib.suppress(End):
            end_after(patch, 3 + ends % 2)  # the shards of both parts and progress.json; or one file of the next, too
            ends += 1
            assert ends < 50
            prepare_small(patch, corpus[0], out)
        assert files == {name: (out / name).stat().st_ino for name in files}, "a finished shard was written again"
    assert ends > 5 and contents(out) == whole


def test_a_killed_command_leaves_no_process_and_continues(corpus, tmp_path, monkeypatch):
    whole, out = prepare_small(monkeypatch, corpus[0], tmp_path / "whole"), tmp_path / "out"
    code = ("import data, time\n"
            f"data.__dict__.update({SMALL})\n"
            "rename = data.os.replace\n"
            "data.os.replace = lambda a, b: time.sleep(1000 * ('train-00001' in str(b))) or rename(a, b)\n"
            "data.main()")
    command = [sys.executable, "-c", code, "prepare", "--data", str(corpus[0]), "--out", str(out), *OPTIONS]
    process = subprocess.Popen([*command, "--processes", "2"], cwd=HERE, stdout=subprocess.PIPE)
    while not list(out.glob(".train-00001.npy.*.tmp")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)  # the pipe is closed when the workers, which have it too, have ended
    assert not (out / "meta.json").is_file() and (out / "train-00000.npy").is_file()
    assert prepare_small(monkeypatch, corpus[0], out) == whole


def test_a_folder_of_another_corpus_is_refused_and_a_finished_one_left_alone(corpus, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(corpus[0].read_bytes())
    command = ["prepare", "--data", str(text), "--out", str(out), *OPTIONS]
    data.main(command)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    data.main([*command, "--processes", "2"])
    capsys.readouterr()
    error = fails(lambda: data.main([*command, "--seq-len", "32"]), capsys)
    assert "prepared with seq_len=24, this command has seq_len=32: choose another --out, or delete the folder" in error
    (out / "meta.json").rename(out / "progress.json")  # an unfinished one, too
    assert "uncased=True, this command has uncased=False" in fails(lambda: data.main([*command, "--no-uncased"]), capsys)
    (out / "progress.json").rename(out / "meta.json")
    text.write_text(text.read_text() + "\n\nOne more document.")
    assert "prepared with content_hash=" in fails(lambda: data.main(command), capsys)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_the_tokenizer_learns_from_training_documents_all_over_the_corpus():
    texts = [sentence(i) + " é" for i in range(4000)]
    size = sum(len(text.encode()) for text in texts)
    whole, facts = data.sample(texts, 0.1, size)
    assert [text.decode() for text in whole] == [text for text in texts if not data.in_validation(text, 0.1)]
    assert facts["bytes"] == size
    for val_share in (0.1, 0.9):
        some, facts = data.sample(texts, val_share, size // 10)
        assert size / 30 < facts["sample"]["bytes"] == sum(map(len, some)) <= size / 10
        places = [texts.index(text.decode()) for text in some]
        assert places == sorted(places) and abs(np.mean(places) / 4000 - 0.5) < 0.1
        assert sorted(some) == sorted(data.sample(reversed(texts), val_share, size // 10)[0])
        assert not any(data.in_validation(text.decode(), val_share) for text in some)


def test_text_is_read_only_a_little_ahead_of_what_is_written():
    read = []
    for written, text in enumerate(data.in_order(str.upper, (read.append(i) or f"a{i}" for i in range(40)), 2)):
        assert text == f"A{written}" and len(read) <= written + 5
    assert written == 39


def test_a_huge_document_is_cut_and_a_huge_line_of_json_refused(tmp_path, monkeypatch):
    for name, value in (("LONGEST", 100), ("LONGEST_LINE", 150)):
        monkeypatch.setattr(data, name, value)
    text = "é🙂 wörds " * 100
    (tmp_path / "a.txt").write_text(text + "\n\nshort")
    (tmp_path / "b.txt").write_text(text.replace(" ", "\n"))
    pieces = list(data.documents((".txt", str(tmp_path / "a.txt"))))
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "") + "short" and max(map(len, pieces)) <= 100
    assert pieces[-1] == "short" and len(pieces) < 25
    assert max(len(piece) for piece in data.documents((".txt", str(tmp_path / "b.txt")))) <= 100
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "fine \ud800"}) + "\n" + json.dumps({"text": text}) + "\n")
    documents = data.documents((".jsonl", str(tmp_path / "c.jsonl")))
    assert next(documents) == "fine ?"
    with pytest.raises(data.UserError, match="c.jsonl, line 2: not JSON, or longer than 150"):
        next(documents)


def test_a_hundred_gigabytes_of_shards_are_read_by_the_row(tmp_path):
    count, rows, n = 25, 1 << 22, 512  # 10^11 bytes and 5 * 10^10 tokens, in sparse files
    for i in range(count):
        shard = np.lib.format.open_memmap(tmp_path / f"train-{i:05d}.npy", "w+", np.uint16, (rows, n))
        shard[0], shard[-1] = 4 + 2 * i, 5 + 2 * i
    meta = {"seq_len": n, "vocab_size": 100, "min_real": n, "dtype": "uint16",
            "train": [[f"train-{i:05d}.npy", rows] for i in range(count)]}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = data.Rows(tmp_path, "train", 100, n)
    assert len(found) * n > 5 * 10 ** 10
    ends = np.arange(count)[:, None] * rows + [0, rows - 1]
    assert np.array_equal(found[ends.flatten()], np.arange(4, 4 + 2 * count)[:, None].repeat(n, 1))
    for step in (0, 51_199, 10 ** 7):
        assert found[data.rows_of_step(1, step, 2048, len(found))].shape == (2048, n)


@pytest.mark.parametrize("claim, source, mistake", [
    (test_shards_do_not_depend_on_processes_nor_rows_on_shards, "yield waiting.popleft().result()\n            while",
     "yield waiting.pop().result()\n            while"),
    (test_shards_do_not_depend_on_processes_nor_rows_on_shards, "        self.rows, self.tokens = [], 0\n\n\n",
     "        self.rows, self.tokens, self.rest = [], 0, self.rest[:0]\n\n\n"),
    (test_preparing_continues_wherever_it_ended, "writer.rest.tolist()", "[]"),
    (test_preparing_continues_wherever_it_ended, '"place": place, "bytes"', '"place": (0, 0), "bytes"'),
    (test_preparing_continues_wherever_it_ended, "            number += len(block)\n", ""),
    (test_a_killed_command_leaves_no_process_and_continues, "        stale.unlink()", "        pass"),
    (test_the_tokenizer_learns_from_training_documents_all_over_the_corpus, "max(val_share, 1 - share)", "1 - share"),
    (test_text_is_read_only_a_little_ahead_of_what_is_written, "> 2 * processes", "> 20 * processes"),
])
def test_claims_about_large_corpora_catch_the_mistake(claim, source, mistake, corpus, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # where processes find the mutant
    monkeypatch.setitem(globals(), "data", load_mutant(tmp_path, "data", source, mistake))
    given = dict(corpus=corpus, tmp_path=tmp_path, monkeypatch=monkeypatch)
    with pytest.raises(AssertionError):
        claim(**{name: given[name] for name in claim.__code__.co_varnames[:claim.__code__.co_argcount]})


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
    assert all({"lr", "tokens_per_second", "seconds", "waiting"} <= set(line) and 0 <= line["waiting"] <= 1 for line in steps)
    assert [line["step"] for line in log if "val_loss" in line] == [0, 3, 6]


def test_speed_and_seconds_do_not_depend_on_when_it_is_evaluated(corpus, tmp_path, monkeypatch):
    """With a clock that only a step moves, by 1 s, and an evaluation, by 100 s."""
    now = [0.0]

    def passing(seconds, function):
        def slow(*arguments):
            now[0] += seconds
            return function(*arguments)
        return slow

    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train, "train_step", passing(1, train.train_step))
    monkeypatch.setattr(train, "evaluate", passing(100, train.evaluate))
    run(corpus, tmp_path / "run", "--log-interval", "4", "--eval-interval", "1")
    log = train.read_log(tmp_path / "run")
    assert [line["seconds"] for line in log if "val_loss" in line and line["step"]] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens_per_second"] for line in log if "loss" in line] == [8 * 24, 8 * 24]


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_continued_run_equals_an_uninterrupted_one_bitwise(corpus, finished, tmp_path, stop):
    run(corpus, tmp_path / "run", "--stop-at", str(stop))
    assert same(run(corpus, tmp_path / "run"), finished[1])
    steps = [line["step"] for line in train.read_log(tmp_path / "run") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_two_processes_equal_one_with_accumulation_over_20_steps_with_dropout(corpus, tmp_path):
    longer = ["--max-steps", "20", "--eval-interval", "10", "--checkpoint-interval", "20"]
    one = run(corpus, tmp_path / "one", *longer)["model"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "--data",
               str(corpus[1]), "--out", str(tmp_path / "two"), *QUICK, *longer]
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=240)
    two = torch.load(tmp_path / "two" / "step_0000020.pt", weights_only=True)["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0)
    losses = [[line["loss"] for line in train.read_log(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    assert len(losses[0]) == 20 and np.allclose(*losses, atol=1e-6, rtol=0)


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


def test_checkpointing_gives_the_same_gradients_from_fewer_saved_bytes():
    def step(model, tokens, corruption):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x.nbytes}) or x, lambda x: x):
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


def test_a_compiled_run_does_not_compile_again_after_its_first_steps_and_equals_the_eager_one(corpus, tmp_path, monkeypatch):
    def end(name, *flags):
        losses = []
        original = train.train_step

        def step(*arguments):
            torch.compiler.set_stance("fail_on_recompile" if len(losses) > 2 else "default")
            losses.append(float(original(*arguments)))
            return torch.tensor(losses[-1])

        monkeypatch.setattr(train, "train_step", step)
        monkeypatch.setattr(maelm.MAELM, "compile", lambda self, **options: torch.nn.Module.compile(self, backend="aot_eager", **options))
        run(corpus, tmp_path / name, "--max-steps", "7", "--eval-interval", "2", "--dropout", "0", *flags)
        monkeypatch.setattr(train, "train_step", original)
        torch.compiler.set_stance("default")
        return losses

    torch.testing.assert_close(end("compiled", "--compile"), end("eager"), rtol=1e-5, atol=0)


def test_an_estimate_states_what_a_run_takes_without_making_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main("--preset base --estimate --devices 64 --mfu 0.4 --peak 300".split())
    printed = capsys.readouterr().out
    work = train.flops(maelm.Config()) * 2048 * 125_000
    assert f"{work / 64 / 300e12 / 0.4 / 3600:,.1f} hours" in printed and "131.1 G tokens" in printed
    assert f"{sum(p.numel() for p in maelm.MAELM(maelm.Config()).parameters()):,}, of which" in printed
    assert "1 micro-batches of 32 on each of 64 devices" in printed and not list(tmp_path.iterdir())


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
    (["--init", "out/toy"], "--init out/toy: for --fill-mask only"), (["--estimate", "--mfu", "nan"], "--mfu nan: use a positive"),
    (["--estimate", "--preset", "base", "--devices", "6"], "batch_size=2048 is not a multiple of 6 processes; change --batch-size"),
    (["--init-std", "-1"], "init_std=-1.0: it needs init_std > 0"), (["--seed", "9" * 20], "use 0 <= seed < 2"),
    (["--norm", "mid"], r"norm='mid': it needs norm in \('post', 'pre'\)"),
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
    trees = {path.stem: ast.parse(path.read_text()) for path in HERE.glob("*.py") if not path.stem.startswith("test_")}
    assert len((HERE / "maelm.py").read_text().splitlines()) <= 400
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
    ([".", "no/such/run"], "no/such/run: no such run folder"), (["hf:no/such/folder"], "hf:no/such/folder: transformers cannot load it")])
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


@pytest.fixture(scope="session")
def pretrained(finished):
    """The encoder of the finished run, as fine-tuning sees it."""
    return finetune.load_pretrained(str(finished[0]), dropout=0.1)


# ---- finetune.py: metrics -------------------------------------------------------------------------------------
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
                assert finetune.spearman(guess, true) == pytest.approx(expected, abs=1e-12, nan_ok=True)
                if true.dtype == int:
                    assert finetune.accuracy(guess, true) == pytest.approx(sklearn.metrics.accuracy_score(true, guess), abs=1e-12)
                    assert finetune.matthews(guess, true) == pytest.approx(sklearn.metrics.matthews_corrcoef(true, guess), abs=1e-12)


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


def test_squad_scores_equal_an_independent_reading_of_the_rules():
    texts = adversarial_strings()
    for a, b in zip(texts, texts[1:] + texts[:1]):
        for x, y in ((a, b), (a, a + " the "), (a + b, b + a)):
            assert finetune.exact_match(x, y) == float(plain_words(x) == plain_words(y)), (x, y)
            assert finetune.token_f1(x, y) == pytest.approx(plain_f1(x, y), abs=1e-12), (x, y)


def random_squad(n, seed):
    random = np.random.default_rng(seed)
    texts = ["the cat", "cat", "a dog", "dog cat", "", "a", "cat cat dog"]
    questions = [finetune.Question(str(i), "?", "", tuple((0, t) for t in random.choice(texts, random.integers(0, 3)))) for i in range(n)]
    return questions, list(random.choice(texts, n)), random.integers(-3, 4, n) + random.choice([0, 0.5], n)


def test_squad_metrics_equal_every_threshold_tried():
    for n, seed in itertools.product((1, 2, 30), range(20)):
        questions, answers, null = random_squad(n, seed)
        answers = [a if plain_words(a) else "dog" for a in answers] if seed % 2 else answers
        null = null + np.linspace(0, 0.01, n)  # no ties: each threshold is one that can be had
        found = finetune.squad_metrics(questions, answers, null, 0.25)
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


# ---- finetune.py: answers and windows -------------------------------------------------------------------------
UNICODE = "İstanbul'da  ÇOK Straße, \"naïve\" café—数学🙂 ΣΑΣα [MASK]\tend.\u00a0x"


def test_tokens_know_their_characters_even_where_lower_case_is_longer(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    for text in (UNICODE, UNICODE * 3, "İİİ a", "", "  ", "plain"):
        ids, starts, ends = finetune.character_spans(tokenizer)(text)
        assert ids.tolist() == tokenizer.encode(text).tolist() and maelm.MASK not in ids
        assert (starts <= ends).all() and (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()
        for i, start, end in zip(ids, starts, ends):
            piece = tokenizer.tiktoken.decode_single_token_bytes(int(i))
            assert piece.strip() in text[start:end].lower().encode() or not text[start:end]
        covered = {c for start, end in zip(starts, ends) for c in range(start, end)}
        assert covered >= {c for c in range(len(text)) if not text[c].isspace()}


def test_every_answer_of_whole_tokens_is_recovered_exactly(corpus):
    spans = finetune.character_spans(data.Tokenizer.load(corpus[1]))
    for context in (UNICODE, "The cat sees a tree today, number 12. " + UNICODE):
        _, starts, ends = spans(context)
        for start, end in itertools.combinations(range(len(context) + 1), 2):
            answer = context[start:end]
            if not answer.strip():
                continue
            first, last, exact = finetune.answer_tokens(finetune.Question("1", "", context, ((start, answer),)), starts, ends)
            got = context[starts[first]:ends[last]]
            assert answer.strip() in got and exact == (got == answer.strip())
            if start in starts and end in ends and not answer[0].isspace() and not answer[-1].isspace():
                assert exact, answer
        for word in re.finditer(r"[^\W\d_]+", context):
            question = finetune.Question("1", "", context, ((word.start(), word[0]),))
            assert finetune.answer_tokens(question, starts, ends)[2], word[0]


def test_in_training_every_answer_is_recovered_exactly_and_elsewhere_none_changes_the_tokens(corpus, pretrained):
    spans = finetune.character_spans(data.Tokenizer.load(corpus[1]))
    context = "The cat sees a tree today, number 12. " + UNICODE
    plain = spans(context)[0].tolist()
    cut = 0
    for start, end in itertools.combinations(range(len(context) + 1), 2):
        answer = context[start:end].strip()
        if not answer:
            continue
        q = finetune.Question("1", "", context, ((start, context[start:end]),))
        ids, starts, ends = finetune.cut_at_answer(spans, q)
        first, last, exact = finetune.answer_tokens(q, starts, ends)
        assert exact and context[starts[first]:ends[last]] == answer
        cut += len(ids) > len(plain)
    assert cut
    inside = [finetune.Question("1", "who?", "a cat.", ((3, "a"),))]  # "a" of "cat"
    kind, encoded = squad_task(pretrained, inside, training=True)
    row, (first, last, passage) = encoded.ids[0], encoded.targets[0].tolist()
    assert pretrained.spans("a")[0].tolist() == row[first:last + 1].tolist() and "1 answers begin or end" in encoded.remarks[-1]
    natural = squad_task(pretrained, inside)[1].ids[0]
    assert natural[passage:-1].tolist() == pretrained.encode("a cat.").tolist() != row[passage:-1].tolist()


def squad_task(pretrained, questions, training=False, **fields):
    tune = finetune.TuneConfig(**{"max_query": 6, "doc_stride": 5, "seq_len": 24, "n_best": 4, "max_answer": 5} | fields)
    kind = finetune.Spans("squad2", questions, pretrained, tune)
    return kind, kind.encode(questions, training)


def test_windows_cover_the_context_and_their_targets_are_the_answer(pretrained):
    context = " ".join(sentence(i) for i in (0, 1, 18, 3))
    questions = [finetune.Question(m[0], f"where is {m[0]}, and why is the question so long?", context, ((m.start(), m[0]),))
                 for m in re.finditer(r"\w+", context)]
    questions.append(finetune.Question("none", "what?", context, ()))
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


def test_the_best_spans_are_those_of_a_search_over_all(pretrained):
    questions = [finetune.Question("1", "who?", sentence(0) + " " + sentence(5), ())]
    kind, encoded = squad_task(pretrained, questions)
    tokens, padding, targets = finetune.collate(encoded, np.arange(len(encoded.ids)), maelm.PAD, torch.device("cpu"))
    logits = torch.randn(*tokens.shape, 2, generator=generator(0)) * 3
    out = kind.decode(logits, targets, padding)
    for row, ids, (_, _, first), x in zip(out, encoded.ids, targets.tolist(), logits):
        allowed = range(first, len(ids) - 1)
        spans = sorted(((float(x[a, 0] + x[b, 1]), a, b) for a in allowed for b in allowed if a <= b < a + 5), reverse=True)[:4]
        assert row[0] == x[0].sum() and row[1:5].tolist() == pytest.approx([s[0] for s in spans])
        assert list(zip(row[5:9].tolist(), row[9:].tolist())) == [s[1:] for s in spans]


def test_a_perfect_model_gets_100_percent(pretrained):
    context = " ".join(sentence(i) for i in range(4))
    questions = [finetune.Question(w, "who?", context, ((context.index(w), w),)) for w in ("cat", "dog", "friend")]
    questions.append(finetune.Question("none", "what?", context, ()))
    kind, encoded = squad_task(pretrained, questions)
    tokens, padding, targets = finetune.collate(encoded, np.arange(len(encoded.ids)), maelm.PAD, torch.device("cpu"))
    logits = 10.0 * F.one_hot(targets[:, :2], tokens.shape[1]).transpose(1, 2)
    metrics, files = kind.score(kind.decode(logits, targets, padding).numpy(), encoded)
    assert metrics["exact"] == metrics["f1"] == metrics["best_f1"] == 100
    assert files["predictions.json"] == {"cat": "cat", "dog": "dog", "friend": "friend", "none": ""}
    assert kind.loss(logits, targets, padding) < 0.1
    assert all(len(texts) <= 4 and texts == sorted(texts, key=lambda t: -t["score"]) for texts in files["nbest.json"].values())


# ---- finetune.py: inputs and batches --------------------------------------------------------------------------
def encode_sentences(pretrained, examples, name="rte", **fields):
    kind = finetune.Sentences(name, examples, pretrained, finetune.TuneConfig(**fields))
    return kind, kind.encode(examples)


def some_pairs(count=40):
    return [finetune.Example(sentence(i) * (1 + i % 3), sentence(i + 1) if i % 5 else "", finetune.ENTAILMENT[i % 2]) for i in range(count)]


def test_inputs_are_cls_a_sep_b_sep_and_the_longer_text_is_cut(pretrained):
    a, b = "the cat", "a dog sees a tree today, number 3, at last, number 4, my friend"
    A, B = (pretrained.encode(x).tolist() for x in (a, b))
    _, one = encode_sentences(pretrained, [finetune.Example(a, None, "entailment")])
    _, two = encode_sentences(pretrained, [finetune.Example(a, b, "entailment"), finetune.Example(b, a, "entailment"), finetune.Example(b, b, "entailment")])
    assert one.ids[0].tolist() == [maelm.CLS, *A, maelm.SEP] and not one.remarks
    room = 24 - 3
    assert two.ids[0].tolist() == [maelm.CLS, *A, maelm.SEP, *B[:room - len(A)], maelm.SEP]
    assert two.ids[1].tolist() == [maelm.CLS, *B[:room - len(A)], maelm.SEP, *A, maelm.SEP]
    assert two.ids[2].tolist() == [maelm.CLS, *B[:room - room // 2], maelm.SEP, *B[:room // 2], maelm.SEP]
    assert two.remarks == ["3 of 3 inputs are cut off at 24 tokens"]


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
                        train.Place(0, 1, torch.device("cpu"), torch.float32), Path("unused"), [])


def test_evaluation_is_in_the_order_of_the_examples(pretrained):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0), kind.head()).eval()
    kind.decode = lambda logits, targets, padding: targets[:, None]
    outputs, moments = finetune.evaluate(model, encoded, job_of(pretrained, kind, encoded), batch_size=7)
    assert outputs[:, 0].tolist() == encoded.targets.tolist() and moments.count == sum(map(len, encoded.ids))


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


def test_dropout_is_on_in_training_and_off_in_evaluation(pretrained, finished):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0).eval(), kind.head())
    job = job_of(pretrained, kind, encoded)
    seen = []
    model.head[0].register_forward_hook(lambda module, *_: seen.append(module.training and model.encoder.training))
    finetune.train(model, job, finetune.TuneConfig(epochs=0.1, learning_rate=1e-3), 1)
    assert seen and all(seen) and model.head[0].p == 0.1
    tokens, padding, _ = finetune.collate(encoded, np.arange(8), maelm.PAD, torch.device("cpu"))
    for rate in (0.0, 0.1):  # the pre-training rate is replaced by that of fine-tuning
        encoder = finetune.load_pretrained(str(finished[0]), rate).fresh(0).train()
        assert torch.equal(*(encoder(tokens, torch.arange(tokens.shape[1])[None], padding) for _ in range(2))) == (rate == 0)
    seen.clear()
    finetune.evaluate(model, encoded, job)
    assert seen and not any(seen)


def test_the_grids_are_tables_5_and_6():
    for group, size, epochs, rates, sizes, warmup in (
            ("small", 768, (2, 3, 5, 10), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.1)),
            ("small", 1024, (2, 3, 5, 10), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.1)),
            ("large", 768, (2, 3, 5), (1e-5, 2e-5, 3e-5, 4e-5), (32,), (0.06,)),
            ("large", 1024, (2, 3, 5), (5e-6, 7e-6, 1e-5, 2e-5), (32,), (0.06,)),
            ("squad", 768, (2, 3), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.1)),
            ("squad", 1024, (2, 3), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.1))):
        found = {tuple(setting.values()) for setting in finetune.grid(group, size, {})}
        assert found == set(itertools.product(epochs, rates, sizes, warmup))
    assert {s["epochs"] for s in finetune.grid("small", 128, {"epochs": 7.0})} == {7.0}
    groups = {name: finetune.TASKS[name].group for name in (*finetune.GLUE, "squad2")}
    assert [n for n, g in groups.items() if g == "small"] == ["cola", "rte", "mrpc", "stsb"]
    assert [n for n, g in groups.items() if g == "large"] == ["mnli", "qqp", "qnli", "sst2"]
    tune = finetune.TuneConfig()
    assert (tune.seq_len, tune.adam_epsilon, tune.adam_beta1, tune.adam_beta2, tune.dropout, tune.weight_decay) == (
        512, 1e-6, 0.9, 0.98, 0.1, 0.01)


# ---- finetune.py: data ----------------------------------------------------------------------------------------
def write_glue(folder, count=12):
    """All eight tasks and SQuAD in the formats of their releases, a few rows each."""
    def rows(name, file, header, line):
        (folder / name).mkdir(parents=True, exist_ok=True)
        body = "".join("\t".join(map(str, line(i))) + "\n" for i in range(count))
        (folder / name / file).write_text(("\t".join(header) + "\n" if header else "") + body, encoding="utf-8")

    a, b, entailed = sentence, lambda i: sentence(i + 3), lambda i: ("entailment", "not_entailment")[i % 2]
    three = ("neutral", "entailment", "contradiction")
    for part in ("train", "dev"):
        rows("CoLA", f"{part}.tsv", None, lambda i: ("gj04", i % 2, "*", f'"{a(i)}'))
        rows("SST-2", f"{part}.tsv", ("sentence", "label"), lambda i: (a(i) + " ", i % 2))
        rows("MRPC", f"{part}.tsv", ("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"), lambda i: (i % 2, 1, 2, a(i), b(i)))
        rows("RTE", f"{part}.tsv", PAIRS, lambda i: (i, a(i), b(i), entailed(i)))
        rows("QNLI", f"{part}.tsv", ("index", "question", "sentence", "label"), lambda i: (i, a(i), b(i), entailed(i)))
        rows("QQP", f"{part}.tsv", ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), lambda i: (i, 1, 2, a(i), b(i), i % 2))
        rows("STS-B", f"{part}.tsv", ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"),
             lambda i: (i, "g", "f", 2012, 1, "none", "none", a(i), b(i), f"{i % 6:.3f}"))
    mnli = ("index", "promptID", "sentence1", "sentence2", "label1", "gold_label")
    for file in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        rows("MNLI", file, mnli, lambda i: (i, 7, a(i), b(i), "wrong", three[i % 3]))
    with open(folder / "QQP" / "train.tsv", "a") as file:
        file.write("99\t1\t2\tcut off\n")
    for part in ("train", "dev"):
        write_squad(folder / "SQuAD" / f"{part}-v2.0.json", count)
    return folder


PAIRS = ("index", "sentence1", "sentence2", "label")


def write_squad(path, count=12, change=lambda qas: qas):
    paragraphs = []
    for i in range(count):
        context, subject = sentence(i), SUBJECTS[i % 4]
        qas = [{"id": f"q{i}", "question": "who is it?", "is_impossible": False, "answers": [{"text": subject, "answer_start": 0}]},
               {"id": f"n{i}", "question": "what not?", "is_impossible": True, "answers": []}]
        paragraphs.append({"context": context, "qas": change(qas)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


def test_the_original_files_are_read_as_they_are(glue):
    labels = {"cola": "01", "sst2": "01", "mrpc": "01", "qqp": "01", "rte": finetune.ENTAILMENT, "qnli": finetune.ENTAILMENT,
              "mnli": ("neutral", "entailment", "contradiction"), "stsb": [f"{i}.000" for i in range(6)]}
    for name in finetune.GLUE:
        parts, remarks = finetune.read_task(name, str(glue), 0.01, 0, 0)
        assert list(parts) == ["train", "dev", "dev_mm"][:2 + (name == "mnli")] and "the official one" in remarks[0]
        for rows in parts.values():
            assert [e.label for e in rows] == [labels[name][i % len(labels[name])] for i in range(12)]
            assert [e.text for e in rows] == [f'"{sentence(i)}' if name == "cola" else sentence(i) for i in range(12)]
            assert [e.text2 for e in rows] == [None if name in ("cola", "sst2") else sentence(i + 3) for i in range(12)]
    parts, _ = finetune.read_task("squad2", str(glue), 0.01, 0, 0)
    assert len(parts["train"]) == 24 and parts["train"][1].answers == () and parts["dev"][4].answers == ((0, "my friend"),)


def test_official_counts_of_rows_are_not_remarked_on(glue, monkeypatch):
    monkeypatch.setitem(finetune.TASKS, "rte", replace(finetune.TASKS["rte"], rows=(12, 12)))
    finetune.read_task.cache_clear()
    assert finetune.read_task("rte", str(glue), 0.01, 0, 0)[1] == []
    parts, remarks = finetune.read_task("rte", str(glue), 0.01, 5, 3)
    assert [len(rows) for rows in parts.values()] == [5, 3] and remarks[0] == "train: 5 of 12 rows are used"


def test_docs_never_touches_the_pre_training_validation_part(monkeypatch):
    documents = [(("torch", "numpy", "tqdm")[i % 3], f"{sentence(i)} {i}") for i in range(6000)]
    monkeypatch.setattr(finetune, "read_docs", lambda progress: iter(documents))
    for share in (0.01, 0.3):
        parts = finetune.read_docs_parts(finetune.TASKS["docs"], share)
        assert [len(rows) for rows in parts.values()] == [200, 300]
        texts = {part: {e.text for e in rows} for part, rows in parts.items()}
        assert not texts["train"] & texts["dev"] and {e.label for e in parts["dev"]} == {"torch", "numpy"}
        assert not any(data.in_validation(t, share) for t in texts["train"] | texts["dev"])
        assert all((t, library) in {(t, lib) for lib, t in documents} for t, _, library in parts["dev"])


FAST = ["--epochs", "1", "--seeds", "2", "--batch-size", "4", "--precision", "fp32"]


def tune(finished, task, source, out, *flags):
    """Run finetune.py; returns result.json."""
    finetune.main(["--init", str(finished[0]), "--task", task, "--data", str(source), "--out", str(out), *FAST, *flags])
    return json.loads((out / "result.json").read_text())


def test_glue_is_eight_tasks_and_their_average(finished, glue, tmp_path):
    result = tune(finished, "glue", glue, tmp_path / "glue", "--seeds", "1")
    assert list(result["medians"]) == list(finetune.GLUE)
    assert result["average"] is None or result["average"] == pytest.approx(np.mean(list(result["medians"].values())))
    metrics = {name: json.loads((tmp_path / "glue" / f"{name}-run" / "result.json").read_text())["metrics"] for name in finetune.GLUE}
    assert set(metrics["mnli"]) == {"accuracy", "accuracy_mm"}
    assert {name: next(iter(m), "spearman") for name, m in metrics.items()} == {name: finetune.TASKS[name].metric for name in finetune.GLUE}


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
    assert rank.load_encoder(tmp_path / "run", torch.device("cpu"))[0].state_dict().keys() == after.keys()


def test_effective_ranks_are_those_of_the_hidden_states(pretrained):
    kind, encoded = encode_sentences(pretrained, some_pairs())
    model = finetune.Tuned(pretrained.fresh(0), kind.head())
    _, moments = finetune.evaluate(model, encoded, job_of(pretrained, kind, encoded), batch_size=8)
    with torch.no_grad():
        h = torch.cat([model.encoder(torch.from_numpy(ids)[None], torch.arange(len(ids))[None])[0] for ids in encoded.ids])
    assert finetune.effective_ranks(moments) == {"uncentered": rank.effective_rank(h), "centered": rank.effective_rank(h - h.mean(0))}


def test_one_seed_gives_one_result_and_random_weights_are_others(finished, glue, tmp_path):
    first, again = (tune(finished, "stsb", glue, tmp_path / name, "--learning-rate", "1e-3") for name in "ab")
    assert first == again and first["values"][0] != first["values"][1]
    lines = [finetune.read_runs(tmp_path / name) for name in "ab"]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert torch.equal(*(torch.load(tmp_path / n / "encoder.pt")["encoder"]["token_embedding.weight"] for n in "ab"))
    fresh = [finetune.load_pretrained(name, 0.1).fresh for name in (str(finished[0]), f"random:{finished[0]}")]
    weights = [[f(seed).state_dict()["token_embedding.weight"] for seed in (1, 2)] for f in fresh]
    assert torch.equal(*weights[0]) and not torch.equal(*weights[1]) and not torch.equal(weights[0][0], weights[1][0])


SWEEP = ["--sweep", "--epochs", "0.5", "--warmup-share", "0.06", "--batch-size", "4"]


def test_a_sweep_that_was_cut_off_continues_and_ends_as_one_that_was_not(finished, glue, tmp_path, capsys):
    whole = tune(finished, "rte", glue, tmp_path / "a", *SWEEP)
    assert len(whole["sweep"]) == 4 and {line["seed"] for line in whole["sweep"]} == {0} and whole["seeds"] == [1, 2]
    assert whole["setting"]["learning_rate"] == max(whole["sweep"], key=finetune.worth)["learning_rate"]
    assert whole["median"] == np.median(whole["values"])
    lines = (tmp_path / "a" / "sweep.jsonl").read_text().splitlines()
    assert len(lines) == 6
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "sweep.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    capsys.readouterr()
    cut = tune(finished, "rte", glue, tmp_path / "b", *SWEEP)
    assert strip(cut) == strip(whole) and capsys.readouterr().out.count(" s\n") == 4 + 4  # 4 runs, and the table of 4
    tune(finished, "rte", glue, tmp_path / "b", *SWEEP)
    assert len(finetune.read_runs(tmp_path / "b")) == 6


def strip(result):
    """result.json without times."""
    return result | {"sweep": [{k: v for k, v in line.items() if k != "seconds"} for line in result["sweep"]]}


def test_processes_share_a_sweep(finished, glue, tmp_path):
    command = [sys.executable, "finetune.py", "--init", str(finished[0]), "--task", "rte", "--data", str(glue), "--out",
               str(tmp_path / "run"), *FAST, *SWEEP]
    both = [subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    runs = finetune.read_runs(tmp_path / "run")
    assert len(runs) == len({(r["learning_rate"], r["seed"]) for r in runs}) == 6
    whole = tune(finished, "rte", glue, tmp_path / "alone", *SWEEP)
    assert strip(json.loads((tmp_path / "run" / "result.json").read_text())) == strip(whole)


def test_another_setup_in_the_same_folder_is_refused(finished, glue, tmp_path, capsys):
    tune(finished, "rte", glue, tmp_path / "run")
    before = (tmp_path / "run" / "sweep.jsonl").read_bytes()
    capsys.readouterr()
    assert "holds other runs: task='rte' there, 'cola' here" in fails(lambda: tune(finished, "cola", glue, tmp_path / "run"), capsys)
    assert (tmp_path / "run" / "sweep.jsonl").read_bytes() == before


def test_a_run_that_diverges_is_recorded_and_loses(finished, glue, tmp_path):
    result = tune(finished, "rte", glue, tmp_path / "run", "--learning-rate", "1e30", "--epochs", "3")
    assert result["values"] == [None, None] and result["median"] is None


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
    paths = [str(path) for path in train.checkpoints(finished[0])]
    finetune.main(["--figure3", *paths, "--task", "rte", "--data", str(glue), "--out", str(tmp_path / "f"), *FAST])
    points = json.loads((tmp_path / "f" / "figure3.json").read_text())
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
     "dev.tsv, record 1: no column `sentence2`; found: index, sentence1, label"),
    ("rte", [], lambda d: (d / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n"), "rte, part train in .*: empty"),
    ("rte", [], lambda d: (d / "RTE" / "train.tsv").unlink(), "no train.tsv there or in RTE/"),
    ("glue", [], lambda d: (d / "STS-B" / "dev.tsv").unlink(), "no dev.tsv there or in STS-B/"),
    ("stsb", [], lambda d: (d / "STS-B" / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tmuch\n"), "label 'much' of 'a' is not in"),
    ("squad2", [], lambda d: write_squad(d / "SQuAD" / "dev-v2.0.json", change=break_answer),
     "question q7: answer 'nobody' is not in its context, at character 3"),
    ("squad2", [], lambda d: (d / "SQuAD" / "train-v2.0.json").write_text("{}"), "not in the format of SQuAD: no 'data'"),
    ("custom", [], lambda d: (d / "train.csv").write_text("text,kind\na,b\n") and (d / "dev.csv").write_text("text,label\na,b\n"),
     "train.csv, record 1: no column `label`; found: text, kind"),
    ("custom", [], lambda d: [(d / f"{p}.jsonl").write_text(json.dumps({"text": "x", "label": p}) + "\n") for p in ("train", "dev")],
     "label 'dev' of 'x' is not in the task: train"),
    ("rte", ["--init", "no/such"], lambda d: None, "no/such: no such run folder"),
    ("rte", ["--epochs", "0"], lambda d: None, "epochs=0.0: use a positive number"),
    ("rte", ["--seeds", "0"], lambda d: None, "--seeds 0: use a positive number"),
    ("rte", ["--figure3", "missing.pt"], lambda d: None, "--figure3 missing.pt: needs checkpoints"),
    ("sst3", [], lambda d: None, "invalid choice: 'sst3'.*mnli.*squad2"),
])
def test_bad_input_is_named_in_one_line_before_any_run(task, flags, damage, message, finished, tmp_path, capsys):
    finetune.read_task.cache_clear()
    folder = write_glue(tmp_path / "data")
    damage(folder)
    error = fails(lambda: tune(finished, task, folder, tmp_path / "out", *flags), capsys)
    assert re.search(message, error), error
    assert not (tmp_path / "out" / "sweep.jsonl").exists()


# ---- bench/ ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def bench():
    """The benchmarks of this repository, imported only here: the grader needs none of them."""
    sys.path.insert(0, str(HERE / "bench"))
    import cpu
    import gpu
    return types.SimpleNamespace(cpu=cpu, gpu=gpu)


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


@pytest.mark.parametrize("script, files, sections", [
    ("cpu", {"cpu.json", "cost.png"}, ["where_time_goes", "distance_to_the_limit", "base_size", "cost", "compiling"]),
    ("gpu", {"gpu-tiny.json"}, ["training", "correctness", "kernels", "kernel_names", "curves", "compiled"])])
def test_every_section_of_a_benchmark_gives_its_table(script, files, sections, tmp_path):
    done = subprocess.run([sys.executable, f"bench/{script}.py", "--tiny", "--out", str(tmp_path), "--budget", "1e6"],
                          cwd=HERE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == files
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(found["sections"]) == sections
    for name, section in found["sections"].items():
        assert section.get("rows") and set(section) == {"rows", "seconds"}, (name, section)
        starts = {str(value).partition(":")[0] for row in section["rows"] for value in row.values()}
        assert not {"not available", "fails", "skipped"} & starts, name
        assert f"**{name}**" in done.stdout
    if script == "gpu":  # what is compared with the formula is the formula
        for row in found["sections"]["correctness"]["rows"]:
            limit = {"bfloat16": 2e-2, "float32": 2e-6}[row["dtype"]]
            assert max(row[key] or 0 for key in ("output", "q", "k", "v", "table")) < limit, row


def test_a_section_that_fails_or_comes_too_late_is_recorded_and_the_rest_goes_on(bench, tmp_path, capsys):
    def good():
        """Works."""
        return [{"a": 1.0, "b": "x"}]

    def bad():
        """Fails."""
        raise RuntimeError("no such kernel")
    bench.cpu.write_report([bad, good], (), tmp_path / "r.json", {}, budget=60)
    sections = json.loads((tmp_path / "r.json").read_text())["sections"]
    assert sections["bad"]["error"] == "RuntimeError: no such kernel" and sections["good"]["rows"] == [{"a": 1.0, "b": "x"}]
    assert "| 1 | x |" in capsys.readouterr().out
    bench.cpu.write_report([good], (), tmp_path / "r.json", {}, budget=0)
    assert "skipped" in json.loads((tmp_path / "r.json").read_text())["sections"]["good"]


def test_without_a_gpu_the_benchmark_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.gpu.main([])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ---- README.md, docs ------------------------------------------------------------------------------------------------
def commands_of(page):
    """Every python, torchrun and mkdir command in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (HERE / page).read_text(), re.S)
    commands = [part.partition("  #")[0].strip() for block in blocks for line in block.splitlines()
                for part in line.split("&&")]
    return [command for command in commands if re.match(r"(python|torchrun|mkdir) ", command)]


SHORTER = (" --max-steps 3 --warmup-steps 1 --eval-rows 8 --batch-size 8 --micro-batch-size 4 --encoder-layers 1 --encoder-dim 32 "
           "--encoder-heads 2 --cache cache")


PAGES = [str(path.relative_to(HERE)) for path in sorted([*HERE.glob("*.md"), *HERE.glob("docs/*.md")])]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_every_command_of_the_documentation_runs(page, tmp_path):
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in ("my_texts", "hub"):
        (tmp_path / folder).mkdir()
        write_corpus(tmp_path / folder / "text.txt", 10_000)
    shorter = SHORTER + ("" if page == "README.md" else " --data my_texts")
    python = shlex.quote(sys.executable)
    commands = commands_of(page)
    assert "python train.py" in commands and len(commands) > 5
    for command in commands:
        line = re.sub(r"hf:\S+", f"hf:{tmp_path / 'hub'}", command).replace("--nproc_per_node 8", "--nproc_per_node 2")
        line = re.sub("^python", python, re.sub("^torchrun", f"{python} -m torch.distributed.run --standalone", line))
        line += shorter * ("train.py" in line and "--estimate" not in line) + " --seeds 1 --epochs 0.1" * ("finetune.py" in line)
        done = subprocess.run(line, shell=True, cwd=tmp_path,
                              capture_output=True, text=True, timeout=900)
        assert done.returncode == ("--grade" in line), (command, done.stdout, done.stderr)  # the handed out file fails
        if command == "python train.py":
            assert "unigram entropy" in done.stdout and (page != "README.md" or done.stdout.count("[") >= 4)
    assert (tmp_path / "out/toy/loss.png").is_file() and (tmp_path / "out/toy-mlm/loss.png").is_file()


def test_the_readme_lists_every_ablation_and_preset():
    text = (HERE / "README.md").read_text()
    for name in [*maelm.ABLATIONS, *maelm.PRESETS]:
        assert f"`{name}`" in text, name
    assert "Differs from the paper" not in text and (HERE / "maelm.py").read_text().count("Differs from the paper") == 4


def test_the_example_at_the_head_of_maelm_is_what_it_prints():
    found = doctest.testmod(maelm)
    assert found.attempted == 6 and found.failed == 0


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
    (test_on_a_gpu_attention_is_fused_and_never_cudnns, "maelm", "sdpa_kernel([SDPBackend", "sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend"),
    (test_counted_flops_are_pytorchs, "maelm", "if self.cross else None", "if True else None"),
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
    (test_initial_weights_are_normal_with_the_stated_deviation, "maelm", "nn.init.normal_(p, std=config.init_std)",
     "nn.init.trunc_normal_(p, std=config.init_std, a=-0.04, b=0.04)"),
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
    (test_metrics_equal_scikit_learn_and_scipy, "finetune", "(counts - 1) / 2", "(counts - 1)"),
    (test_metrics_equal_scikit_learn_and_scipy, "finetune", "t, p = t - t.mean(0), p - p.mean(0)", "t, p = t - 0.5, p - 0.5"),
    (test_squad_scores_equal_an_independent_reading_of_the_rules, "finetune", r"\b(a|an|the)\b", r"(a|an|the)\b"),
    (test_squad_scores_equal_an_independent_reading_of_the_rules, "finetune", "Counter(p) & Counter(t)", "Counter(set(p)) & Counter(set(t))"),
    (test_squad_scores_equal_an_independent_reading_of_the_rules, "finetune", "return float(p == t)", "return 0.0"),
    (test_the_example_at_the_head_of_maelm_is_what_it_prints, "maelm", "removed = torch.zeros_like(special).scatter(1, chosen[:, shown:], True)",
     "removed = masked & False"),
    (test_squad_metrics_equal_every_threshold_tried, "finetune", "np.where(null > threshold,", "np.where(null < threshold,"),
    (test_squad_metrics_equal_every_threshold_tried, "finetune", "np.where(empty, 0.0, -1.0)", "np.zeros(len(empty))"),
    (test_squad_metrics_equal_every_threshold_tried, "finetune", "null[order[best - 1]]", "null[order[best % len(order)]]"),
    (test_the_grids_are_tables_5_and_6, "finetune", "if dim >= 1024", "if dim > 1024"),
    (test_every_epoch_is_a_permutation_in_batches_of_like_length, "finetune", "rows_of_step(seed, first + i, batch_size", "rows_of_step(seed, first, batch_size"),
    (test_every_epoch_is_a_permutation_in_batches_of_like_length, "finetune", 'drawn[np.argsort(length[drawn], kind="stable")]', "drawn"),
    (test_counted_flops_are_pytorchs, "train", "m if config.decoder_layers else predicted, m", "m, m"),
    (test_counted_flops_are_pytorchs, "train", "[length] * (layers - 1) + [last]", "[length] * layers"),
    (test_counted_flops_are_pytorchs, "train", "+ 2 * q * s * dim", "+ q * s * dim"),
    (test_counted_flops_are_pytorchs, "train", "[m] * config.decoder_cross", "[n] * config.decoder_cross"),
]
FIXTURE_MUTANTS = [  # the same for claims about the finished run or the files
    (test_tokens_know_their_characters_even_where_lower_case_is_longer, "(c.lower() for c in text) if tokenizer.uncased else text", "text"),
    (test_every_answer_of_whole_tokens_is_recovered_exactly, "np.minimum(starts + space[starts], ends)", "starts"),
    (test_every_answer_of_whole_tokens_is_recovered_exactly, 'np.searchsorted(ends, a, side="right")', "np.searchsorted(ends, a)"),
    (test_in_training_every_answer_is_recovered_exactly_and_elsewhere_none_changes_the_tokens, "b, len(q.context)]", "len(q.context)]"),
    (test_in_training_every_answer_is_recovered_exactly_and_elsewhere_none_changes_the_tokens, "if training and q.answers", "if q.answers"),
    (test_windows_cover_the_context_and_their_targets_are_the_answer, "max(0, len(context) - room) + stride, stride)", "max(1, len(context) - room), stride)"),
    (test_windows_cover_the_context_and_their_targets_are_the_answer, "last < offset + room", "last <= offset + room"),
    (test_the_best_spans_are_those_of_a_search_over_all, "(position >= targets[:, 2:])", "(position >= 1)"),
    (test_the_best_spans_are_those_of_a_search_over_all, "unfold(1, longest, 1)", "unfold(1, longest, 1).flip(2)"),
    (test_a_perfect_model_gets_100_percent, "shift = offset - passage", "shift = -passage"),
    (test_a_perfect_model_gets_100_percent, "null - [texts[0][1] for texts in best]", "[texts[0][1] for texts in best] - null"),
    (test_inputs_are_cls_a_sep_b_sep_and_the_longer_text_is_cut, "max(room // 2, room - len(a))", "room // 2"),
    (test_padded_and_unpadded_batches_give_the_same_logits, "[None], padding)", "[None], None)"),
    (test_evaluation_is_in_the_order_of_the_examples, "numpy()[np.argsort(order)]", "numpy()"),
    (test_dropout_is_on_in_training_and_off_in_evaluation, "    model.train()\n", ""),
    (test_evaluation_is_in_the_order_of_the_examples, "moments.add(h[~padding].float())", "moments.add(h.flatten(0, 1).float())"),
    (test_docs_never_touches_the_pre_training_validation_part, "and not in_validation(text, val_share)]", "]"),
    (test_the_original_files_are_read_as_they_are, 'names = header or next(rows, ())', "names = next(rows, ())"),
]


def load_mutant(folder, file, source, mistake):
    """The module `file` with one mistake in it, imported under another name."""
    text = (HERE / f"{file}.py").read_text()
    assert text.count(source) == 1, f"{source!r} must occur once in {file}.py"
    path = folder / f"{Path(file).stem}_mutant.py"
    path.write_text(text.replace(source, mistake))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL_MUTANTS = [*MUTANTS, *((claim, "finetune", source, mistake) for claim, source, mistake in FIXTURE_MUTANTS)]


@pytest.mark.parametrize("claim, file, source, mistake", ALL_MUTANTS, ids=[f"{m[0].__name__[5:45]}-{i}" for i, m in enumerate(ALL_MUTANTS)])
def test_the_claim_catches_the_mistake(claim, file, source, mistake, tmp_path, monkeypatch, request):
    """Each claim is a test, so pytest has seen it hold for the code as it is."""
    mutant = load_mutant(tmp_path, file, source, mistake)
    names = claim.__code__.co_varnames[:claim.__code__.co_argcount]
    given = {name: mutant.load_pretrained(str(request.getfixturevalue("finished")[0]), 0.1) if name == "pretrained" else
             request.getfixturevalue(name) for name in names}
    monkeypatch.setitem(globals(), Path(file).stem, mutant)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, KeyError, ZeroDivisionError)):
        claim(**given)


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


# ---- The classroom: python test_maelm.py --blank NAME ..., --grade FILE; see docs/teaching.md -------------------
def test_warm_up_rises_in_equal_steps_and_ends_at_the_peak():
    assert [train.learning_rate_factor(s, 4, 12) for s in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])


def test_after_warm_up_the_rate_falls_linearly_to_zero():
    factors = [train.learning_rate_factor(s, 4, 12) for s in range(4, 13)]
    assert factors == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert [train.learning_rate_factor(s, 0, 2) for s in range(2)] == pytest.approx([1, 0.5])


def test_rank_is_the_smallest_k_whose_values_sum_to_tau():
    values = torch.tensor([16.0, 9, 4, 1], dtype=torch.float64)
    assert [rank.tau_rank(values, tau) for tau in (0.5, 0.54, 0.8, 0.9, 0.97)] == [1, 2, 2, 3, 4]


def test_no_variance_has_rank_none():
    assert rank.tau_rank(torch.zeros(3, dtype=torch.float64), 0.9) == 0


def test_tau_must_be_a_share():
    for tau in (-0.1, 0, 1, 1.5):
        with pytest.raises(ValueError, match="tau"):
            rank.tau_rank(torch.ones(3, dtype=torch.float64), tau)


def test_a_gram_matrix_has_the_rank_of_its_matrix():
    for h in (torch.from_numpy(built("geometric")).double(), torch.randn(9, 9, generator=generator(0)).triu().double()):
        assert [rank.effective_rank(h.T @ h, tau) for tau in TAUS] == [rank.effective_rank(h, tau) for tau in TAUS]


def test_the_mean_is_not_subtracted():
    h = 10 + torch.randn(200, 8, generator=generator(0))
    assert (rank.effective_rank(h, 0.95), rank.effective_rank(h - h.mean(0), 0.95)) == (1, 8)


def test_rank_depends_on_the_spectrum_alone():
    h = torch.from_numpy(built("power")).double()
    rotation = torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64, generator=generator(0))).Q
    ranks = {tau: rank.effective_rank(h, tau) for tau in TAUS}
    assert len(set(ranks.values())) > 2
    for same_spectrum in (h @ rotation, 1e-3 * h, h.flip(0), torch.cat([h, h])):
        assert {tau: rank.effective_rank(same_spectrum, tau) for tau in TAUS} == ranks


def test_what_has_no_rank_is_refused():
    for h in (np.ones(5), np.full((5, 3), np.nan), np.ones((0, 3)), -np.eye(3)):
        with pytest.raises(ValueError):
            rank.effective_rank(h)


def test_matthews_of_two_labels_is_the_textbook_formula():
    true, guess = np.array([1] * 8 + [0] * 4), np.array([1] * 6 + [0] * 2 + [0] * 3 + [1])  # TP 6, FN 2, TN 3, FP 1
    assert finetune.matthews(guess, true) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5))
    assert finetune.matthews(1 - guess, true) == pytest.approx((2 * 1 - 3 * 6) / math.sqrt(5 * 8 * 4 * 7))


def test_matthews_is_one_for_equal_labels_and_zero_for_a_constant():
    true = np.array([0, 1, 2, 1, 0, 2, 2])
    assert finetune.matthews(true, true) == pytest.approx(1)
    assert [finetune.matthews(np.ones(7, int), true), finetune.matthews(true, np.ones(7, int))] == [0, 0]


def test_matthews_does_not_depend_on_the_names_of_the_labels():
    true, guess = np.random.default_rng(0).integers(3, size=(2, 50))
    for names in itertools.permutations((0, 1, 7)):
        renamed = finetune.matthews(np.array(names)[guess], np.array(names)[true])
        assert renamed == pytest.approx(finetune.matthews(true, guess))


def test_matthews_of_three_labels_is_gorodkins():
    true, guess = np.random.default_rng(1).integers(3, size=(2, 60))
    true[:30] = guess[:30]
    right, t, p = (true == guess).sum(), np.bincount(true), np.bincount(guess)
    scale = math.sqrt((60 ** 2 - t @ t) * (60 ** 2 - p @ p))
    assert finetune.matthews(guess, true) == pytest.approx((60 * right - t @ p) / scale)


def test_near_distances_have_buckets_of_their_own():
    r = torch.tensor([[-7, -2, -1, 0], [1, 2, 6, 7]])
    assert maelm.relative_bucket(r, 32, 128).tolist() == [[7, 2, 1, 0], [17, 18, 22, 23]]


def test_the_right_half_mirrors_the_left():
    r = torch.arange(1, 300)
    assert torch.equal(maelm.relative_bucket(r, 32, 128), 16 + maelm.relative_bucket(-r, 32, 128))


def test_all_far_distances_share_the_last_bucket():
    r = torch.tensor([128, 129, 1000, 10 ** 6])
    assert (maelm.relative_bucket(r, 32, 128) == 31).all() and (maelm.relative_bucket(-r, 32, 128) == 15).all()


def test_buckets_never_fall_with_distance_and_all_are_used():
    for buckets, farthest in ((32, 128), (128, 256), (4, 9)):
        found = maelm.relative_bucket(-torch.arange(farthest), buckets, farthest)
        assert found.dtype == torch.int64 and found.unique().tolist() == list(range(buckets // 2))
        assert (found.diff() >= 0).all()


def random_heads(*lengths, d=4):
    return [torch.randn(2, 3, length, d, generator=generator(i)) for i, length in enumerate(lengths)]


def test_equal_keys_get_equal_weights():
    q, k, v = random_heads(5, 7, 7)
    torch.testing.assert_close(maelm.attention(q, 0 * k, v), v.mean(2, keepdim=True).expand_as(q))


def test_a_key_hidden_by_the_bias_is_as_if_absent():
    q, k, v = random_heads(5, 7, 7)
    bias = torch.zeros(1, 1, 5, 7).index_fill(3, torch.tensor([2]), -torch.inf)
    rest = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(maelm.attention(q, k, v, bias), maelm.attention(q, k[:, :, rest], v[:, :, rest]))


def test_the_bias_is_of_query_then_key():
    q, k, v = random_heads(4, 4, 4)
    chosen = torch.tensor([2, 3, 1, 0])  # query i looks at key chosen[i] only
    bias = 1000 * F.one_hot(chosen).float().expand(1, 3, 4, 4)
    torch.testing.assert_close(maelm.attention(q, k, v, bias), v[:, :, chosen])


def test_logits_are_divided_by_the_root_of_the_head_size():
    for d in (4, 9):
        q, k, v = random_heads(5, 7, 7, d=d)
        theirs = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(maelm.attention(q, k, v), theirs, atol=1e-5, rtol=1e-5)


def test_attention_drops_weights_out():
    q, k = torch.zeros(2, 1, 1, 500, 4)
    out = maelm.attention(q, k, torch.ones(1, 1, 500, 4), None, 0.5)  # of 500 equal weights, half are doubled
    assert torch.allclose(out, out[..., :1]) and abs(out.mean() - 1) < 0.01 and 0.03 < out.std() < 0.06


def attention_layer(dropout=0.0):
    torch.manual_seed(0)
    layer = maelm.Attention(8, 2, dropout).eval()
    x, y = torch.randn(2, 3, 5, 8, generator=generator(0))
    return layer, x, torch.cat([y, x[:, :2]], dim=1)


def test_queries_are_from_x_and_keys_and_values_from_y():
    layer, x, y = attention_layer()
    q, (k, v) = layer.query(x), layer.key_value(y).chunk(2, dim=-1)
    heads = [(q[..., h] @ k[..., h].transpose(1, 2) / 2).softmax(-1) @ v[..., h] for h in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(layer(x, y), layer.output(torch.cat(heads, -1)), atol=1e-5, rtol=1e-5)


def test_each_head_has_a_bias_of_its_own():
    layer, x, y = attention_layer()
    chosen = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])  # head, query -> key
    v = layer.key_value(y).chunk(2, dim=-1)[1]
    expected = torch.cat([v[:, chosen[0], :4], v[:, chosen[1], 4:]], dim=-1)
    got = layer(x, y, 1000 * F.one_hot(chosen, 7).float()[None])
    torch.testing.assert_close(got, layer.output(expected), atol=1e-5, rtol=1e-4)


def test_attention_has_dropout_in_training_only():
    layer, x, y = attention_layer(dropout=0.5)
    assert torch.equal(layer(x, y), layer(x, y))
    assert not torch.allclose(layer.train()(x, y), layer(x, y))


def bias_table():
    bias = maelm.RelativeBias(tiny())
    with torch.no_grad():
        bias.table.weight.copy_(torch.arange(32.0)[:, None] + torch.arange(4) * 100)
    return bias


def test_relative_bias_is_of_query_then_key_in_every_row():
    queries, keys = torch.tensor([[0, 5], [9, 2]]), torch.tensor([[0, 1, 23], [2, 4, 9]])
    distances = torch.tensor([[[0, 1, 23], [-5, -4, 18]], [[-7, -5, 0], [0, 2, 7]]])
    expected = maelm.relative_bucket(distances, 32, 128)[:, None] + 100 * torch.arange(4)[None, :, None, None]
    assert torch.equal(bias_table()(queries, keys), expected.float())


def test_one_row_of_positions_is_enough():
    positions = torch.arange(24)[None]
    got = bias_table()(positions, positions)
    assert got.shape == (1, 4, 24, 24) and torch.equal(got[0, :, :-1, :-1], got[0, :, 1:, 1:])


def test_the_gradient_of_a_bias_counts_its_uses():
    bias, positions = bias_table(), torch.tensor([[0, 1, 3]])
    bias(positions, positions).sum().backward()
    used = {0: 3, 1: 1, 17: 1, 3: 1, 19: 1, 2: 1, 18: 1}
    assert bias.table.weight.grad.tolist() == [[used.get(b, 0)] * 4 for b in range(32)]


def decoder_input_case(dtype=torch.float32, **fields):
    model, tokens, corruption = model_and_batch(**fields)
    h = torch.randn(*corruption.kept.shape, 32, generator=generator(0)).to(dtype).requires_grad_()
    return model.encoder.token_embedding.weight, h, corruption, model.decoder_input(h, corruption)


def test_kept_positions_get_their_representation_back():
    _, h, corruption, full = decoder_input_case()
    assert full.shape == (6, 24, 32) and torch.equal(maelm.take(full, corruption.kept), h)


def test_every_gap_holds_the_mask_embedding():
    embeddings, _, corruption, full = decoder_input_case()
    assert (full[corruption.masked] == embeddings[maelm.MASK]).all()


def test_the_mask_embedding_learns_from_every_gap():
    embeddings, h, corruption, full = decoder_input_case()
    full.sum().backward()
    assert (embeddings.grad[maelm.MASK] == corruption.masked.sum()).all() and (h.grad == 1).all()


def test_the_decoder_input_has_the_precision_of_the_encoder():
    assert decoder_input_case(torch.bfloat16)[3].dtype == torch.bfloat16


def test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary():
    model, tokens, corruption = model_and_batch()
    for p in (model.head.bias, model.head.transform[2].weight, model.head.transform[2].bias):
        torch.nn.init.zeros_(p)
    assert model(tokens, corruption).item() == pytest.approx(math.log(300))


def test_only_the_masked_tokens_are_targets():
    model, tokens, corruption = model_and_batch()
    loss, other = model(tokens, corruption), tokens.roll(1, dims=0)
    assert torch.equal(model(torch.where(corruption.masked, tokens, other), corruption), loss)
    assert not torch.allclose(model(torch.where(corruption.masked, other, tokens), corruption), loss)


def test_a_uni_directional_decoder_predicts_all_tokens_but_the_first():
    model, tokens, corruption = model_and_batch(decoder_self="uni", decoder_cross=True)
    log_p = model.logits(tokens, corruption, torch.arange(1, 24).expand(6, -1)).log_softmax(-1)
    by_hand = -torch.stack([log_p[b, i - 1, tokens[b, i]] for b, i in itertools.product(range(6), range(1, 24))]).mean()
    torch.testing.assert_close(model(tokens, corruption), by_hand)


def test_the_encoder_is_its_parts_in_order():
    for norm in ("post", "pre"):
        model, _, (_, kept, tokens) = model_and_batch(norm=norm)
        e, bias = model.encoder, model.encoder.bias(kept, kept)
        h = e.norm(e.token_embedding(tokens) + e.position_embedding(kept))
        torch.testing.assert_close(e(tokens, kept), e.final_norm(e.blocks[1](e.blocks[0](h, bias), bias)))


def test_embeddings_have_dropout_in_training_only():
    model, tokens, _ = model_and_batch(dropout=0.5)
    calm, again, training = (model.encoder.train(on)(tokens, torch.arange(24)[None], all_layers=True)[0]
                             for on in (False, False, True))
    assert torch.equal(calm, again) and abs((training == 0).float().mean() - 0.5) < 0.05


class Task(NamedTuple):
    """A function that students write: where it is, how hard it is, its tests (one point each), and mistakes in it."""
    file: str
    level: str
    tests: tuple
    mistakes: tuple  # (source, mistake) pairs, as in MUTANTS; source occurs once in the function


TASKS = {  # function or Class.method: from easy to hard
    "learning_rate_factor": Task("train", "easy", (
        test_warm_up_rises_in_equal_steps_and_ends_at_the_peak, test_after_warm_up_the_rate_falls_linearly_to_zero,
        test_without_warm_up_the_first_step_has_the_peak_rate), (
        ("(step + 1) / warmup_steps", "step / warmup_steps"), ("/ (max_steps - warmup_steps)", "/ max_steps"),
        ("step < warmup_steps", "step <= warmup_steps"), ("(max_steps - step)", "(max_steps - step - 1)"))),
    "tau_rank": Task("rank", "easy", (
        test_rank_is_the_smallest_k_whose_values_sum_to_tau, test_equal_singular_values_count_exactly,
        test_no_variance_has_rank_none, test_tau_must_be_a_share), (
        ("values.cumsum(0)", "values.sqrt().cumsum(0)"), ("* values.sum()", "* values.sqrt().sum()"),
        (".sum()) + 1", ".sum())"),
        ("(tau - 1e-9)", "tau"), (" if values[0] > 0 else 0", ""), ("0 < tau < 1:", "0 <= tau <= 1:"))),
    "matthews": Task("finetune", "easy", (
        test_matthews_of_two_labels_is_the_textbook_formula,
        test_matthews_is_one_for_equal_labels_and_zero_for_a_constant,
        test_matthews_does_not_depend_on_the_names_of_the_labels, test_matthews_of_three_labels_is_gorodkins), (
        ("t - t.mean(0), p - p.mean(0)", "t - t.mean(0), p"),
        ("math.sqrt((t * t).sum() * (p * p).sum())", "(t * t).sum()"),
        (" if np.ptp(true) and np.ptp(predicted) else 0.0", ""), ("(t * p).sum() /", "abs((t * p).sum()) /"),
        ("np.eye(len(labels))[index.reshape(2, -1)]", "1.0 * index.reshape(2, -1)"))),
    "effective_rank": Task("rank", "medium", (
        test_rank_is_exact_on_built_spectra, test_a_gram_matrix_has_the_rank_of_its_matrix,
        test_the_mean_is_not_subtracted,
        test_rank_depends_on_the_spectrum_alone, test_what_has_no_rank_is_refused), (
        ("svdvals(x) ** 2", "svdvals(x)"), ("eigvalsh(x).flip(0)", "eigvalsh(x)"),
        ("svdvals(x)", "svdvals(x - x.mean(0))"),
        ("values.clamp(min=0)", "values.clamp(min=0) ** 2"), ("x.shape[1] or not", "x.shape[1] and not"),
        ("** 2, tau)", "** 2, 0.9)"), ("values[-1] < -1e-6", "values[-1] < -1e6"))),
    "relative_bucket": Task("maelm", "medium", (
        test_near_distances_have_buckets_of_their_own, test_the_right_half_mirrors_the_left,
        test_all_far_distances_share_the_last_bucket, test_buckets_never_fall_with_distance_and_all_are_used,
        test_relative_buckets_are_t5s), (
        ("(distance > 0)", "(distance < 0)"), ("(distance > 0)", "(distance >= 0)"),
        ("exact = half // 2", "exact = half // 4"),
        ("log.clamp(max=half - 1)", "log"), ("distance.abs()", "distance.clamp(min=0)"),
        (".double() / exact)", ".double())"))),
    "attention": Task("maelm", "medium", (
        test_equal_keys_get_equal_weights, test_a_key_hidden_by_the_bias_is_as_if_absent,
        test_the_bias_is_of_query_then_key,
        test_logits_are_divided_by_the_root_of_the_head_size, test_attention_drops_weights_out,
        test_attention_is_the_formula_in_float64_with_gradient_of_the_bias), (
        ("q * q.shape[-1] ** -0.5", "q"), ("** -0.5", "** -1"), ("logits + bias)", "logits + bias.transpose(-2, -1))"),
        ("softmax(dim=-1)", "softmax(dim=-2)"), ("dropout(weights, p) @ v", "weights @ v"),
        ("dropout(weights, p) @ v", "dropout(weights @ v, p)"))),
    "MAELM.decoder_input": Task("maelm", "medium", (
        test_kept_positions_get_their_representation_back, test_every_gap_holds_the_mask_embedding,
        test_the_mask_embedding_learns_from_every_gap, test_the_decoder_input_has_the_precision_of_the_encoder,
        test_decoder_input_is_the_two_case_formula), (
        ("(masked & self.config.decoder_reset)", "(masked & False)"),
        ("(masked & self.config.decoder_reset)", "masked"),
        ("weight[MASK]", "weight[SEP]"), ("weight[MASK]", "weight[MASK].detach()"), (".to(h.dtype)", ""),
        ("kept[:, :, None]", "torch.arange(kept.shape[1]).expand_as(kept)[:, :, None]"))),
    "MAELM.forward": Task("maelm", "medium", (
        test_loss_is_the_mean_negative_log_likelihood_over_masked_positions, test_only_the_masked_tokens_are_targets,
        test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary, test_mlm_is_the_textbook_mlm,
        test_a_uni_directional_decoder_predicts_all_tokens_but_the_first), (
        ("self.predicted(corruption.masked)", "torch.arange(tokens.shape[1]).expand_as(tokens)"),
        ("self.predicted(corruption.masked)", "corruption.kept"), (".flatten())", '.flatten(), reduction="sum")'),
        ("tokens.gather(1, at)", "tokens[:, :at.shape[1]]"),
        ("self.predicted(corruption.masked)", "corruption.masked.int().topk(self.config.masks_per_row(24)).indices"))),
    "RelativeBias.forward": Task("maelm", "hard", (
        test_relative_bias_is_a_function_of_key_minus_query, test_relative_bias_is_of_query_then_key_in_every_row,
        test_one_row_of_positions_is_enough, test_the_gradient_of_a_bias_counts_its_uses), (
        ("keys[:, None, :] - queries[:, :, None]", "queries[:, :, None] - keys[:, None, :]"),
        ("// 2  #", "// 2 + 1  #"),
        ("keys[:, None, :]", "keys[:1, None, :]"), ("self.table(self.bucket)", "self.table(self.bucket).detach()"),
        ("keys[:, None, :] - queries[:, :, None]",
         "torch.arange(keys.shape[1]) + 0 * keys[:, None] - torch.arange(queries.shape[1])[:, None]"))),
    "Attention.forward": Task("maelm", "hard", (
        test_queries_are_from_x_and_keys_and_values_from_y, test_each_head_has_a_bias_of_its_own,
        test_attention_has_dropout_in_training_only, test_a_layer_equals_pytorchs_own), (
        ("q, k, v = (", "q, v, k = ("), ("self.key_value(y)", "self.key_value(x)"), ("bias, self.p", "None, self.p"),
        ("self.p * self.training", "self.p"), ("self.p * self.training", "0.0"), ("self.output(z", "(z"),
        ("z.transpose(1, 2).flatten(2)", "z.reshape(*x.shape)"))),
    "corrupt": Task("maelm", "hard", (
        test_every_row_has_exactly_k_masks_and_no_special_token_among_them,
        test_kept_positions_are_the_rest_in_ascending_order,
        test_masks_are_uniform_over_real_tokens, test_corrupt_is_a_pure_function,
        test_delta_is_the_share_of_masks_that_the_encoder_reads,
        test_random_fill_is_a_real_token_and_mostly_not_the_true_one,
        test_bert_trick_is_80_10_10, test_a_row_with_too_few_real_tokens_is_refused,
        test_masked_tokens_cannot_reach_the_encoder), (
        ("noise.masked_fill(special, 2.0).topk", "noise.topk"), (".view(B, -1)", ".view(B, -1).flip(1)"),
        ("torch.rand(2, B, n, generator=generator, device=tokens.device)", "torch.rand(2, B, n)"),
        ("chosen[:, shown:]", "chosen[:, :shown]"),
        ("round(config.mask_in_encoder * k)", "int(config.mask_in_encoder * k)"),
        ("torch.randint(NUM_SPECIAL,", "torch.randint(0,"), ("random + unchanged", "random"),
        ("torch.where(masked, fill, tokens).gather", "tokens.gather"))),
    "Encoder.forward": Task("maelm", "hard", (
        test_the_encoder_is_its_parts_in_order, test_all_layers_are_the_embedding_output_and_every_layer,
        test_padding_changes_nothing, test_removing_equals_hiding,
        test_last_layer_at_masked_positions_equals_the_full_layer,
        test_embeddings_have_dropout_in_training_only), (
        (" + self.position_embedding(positions)", ""),
        ("embedding(positions)", "embedding(torch.arange(tokens.shape[1]))"),
        ("self.norm(h)", "h"), ("self.final_norm(", "("), ("self.p * self.training", "self.p"),
        ("self.p * self.training", "0.0"),
        ("return states if", "return states[1:] if"), ("bias = attention_bias(self.bias, positions, positions, padding)",
                                                       "bias = self.bias(positions, positions)"))),
}
MEMORY = 4 << 30  # bytes of data that a task's process may hold
HEADER = f"\n\n# ---- Tasks of other files {'-' * 86}\nimport math\n\nimport numpy as np\n"


def source_of(task):
    return (HERE / f"{TASKS[task].file}.py").read_text(encoding="utf-8")


def locate(statements, name):
    """The statements among which function or Class.method `name` is defined, and its place there, None if nowhere."""
    first, _, rest = name.partition(".")
    at = max((i for i, node in enumerate(statements) if getattr(node, "name", None) == first), default=None)
    return locate(statements[at].body, rest) if rest and at is not None else (statements, at)


def blanked(text, name):
    """`text` without the body of function `name`: its signature and docstring are the assignment."""
    statements, at = locate(ast.parse(text).body, name)
    docstring, lines = statements[at].body[0], text.splitlines()
    lines[docstring.end_lineno:statements[at].end_lineno] = [" " * docstring.col_offset + "raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def student_file(names, change=blanked):
    """maelm.py with these tasks blanked; those of other files are at its end."""
    text, others = (HERE / "maelm.py").read_text(encoding="utf-8"), ""
    for name in names:
        if TASKS[name].file == "maelm":
            text = change(text, name)
        else:
            other = change(source_of(name), name)
            statements, at = locate(ast.parse(other).body, name)
            others += f"\n\n{ast.get_source_segment(other, statements[at])}\n"
    return text + (HEADER + others if others else "")


def is_import(node):
    return isinstance(node, (ast.Import, ast.ImportFrom))


def defines(node):
    """The names that a statement of a module defines."""
    if is_import(node):
        return {(name.asname or name.name).partition(".")[0] for name in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {node.name} if hasattr(node, "name") else set()


def uses(nodes):
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def graft(name, student):
    """Our module with the student's function in it, and with the names it needs that only the student defines.

    Takes and returns syntax trees: nothing else of the student's file can matter to the task."""
    ours, maelms = ast.parse(source_of(name)), ast.parse((HERE / "maelm.py").read_text(encoding="utf-8"))
    (mine, at), (theirs, there) = locate(ours.body, name), locate(student.body, name)
    methods = {n.name for n in mine if isinstance(n, ast.FunctionDef)}
    helpers = [n for n in theirs if isinstance(n, ast.FunctionDef) and n.name not in methods] if "." in name else []
    mine[at:at + 1] = grafted = [theirs[there], *helpers]
    known = set().union(*(defines(n) for n in [*ours.body, *maelms.body] if n in ours.body or not is_import(n)))
    new, needed, used = [n for n in student.body if defines(n) - known], [], uses(grafted) | {"*"}
    while more := [n for n in new if n not in needed and defines(n) & used]:
        needed, used = needed + more, used | uses(more)
    top = locate(ours.body, name.partition(".")[0])[1]
    ours.body[top:top] = [n for n in new if n in needed]
    return ours


def results(name, student):
    """For each test of a task, run on the student's function: its name, and what went wrong or an empty string."""
    for test in TASKS[name].tests:
        wrong = ""
        try:
            module = sys.modules["student"] = types.ModuleType("student")
            module.__file__ = str(HERE / f"{TASKS[name].file}.py")
            exec(compile(graft(name, student), module.__file__, "exec"), vars(module))
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), TASKS[name].file, module)
                torch.manual_seed(0)
                test()
        except BaseException as error:  # SystemExit too
            frames, here = traceback.extract_tb(error.__traceback__), results.__code__.co_filename
            line = [frame.line for frame in frames if frame.filename == here][-1]  # for an assert without a message
            wrong = f"{type(error).__name__}: {(str(error).strip() or line).splitlines()[0]}"[:100]
        yield test.__name__.removeprefix("test_"), wrong


def run_tests(name, student, connection):
    """What a task's own process does: nothing that it prints, allocates or starts can reach the grader."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), stream)
    connection.send("started")
    for result in results(name, student):
        connection.send(result)


def score(name, student, seconds):
    """Points of one task as a dict: passed, total, status, and messages of the failed tests."""
    total, found, status = len(TASKS[name].tests), [], ""
    statements, at = locate(student.body, name)
    body = [] if at is None else statements[at].body[bool(ast.get_docstring(statements[at])):]
    if all(re.match(r"raise NotImplementedError|pass$|\.\.\.$", ast.unparse(node)) for node in body):
        return dict(passed=0, total=total, status="not in the file" if at is None else "not attempted", messages=[])
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(name, student, theirs))
    process.start()
    theirs.close()
    try:
        mine.recv()
        end = time.monotonic() + seconds
        while len(found) < total and not status:
            status = "" if mine.poll(max(0, end - time.monotonic())) else "time limit"
            found += [] if status else [mine.recv()]
    except EOFError:
        status = "the process died"
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    messages = [f"{test}: {wrong}" for test, wrong in found if wrong]
    passed = len(found) - len(messages)
    messages += [f"{TASKS[name].tests[len(found)].__name__.removeprefix('test_')}: {status}"] if status else []
    status = status or ("full marks" if passed == total else "failed")
    return dict(passed=passed, total=total, status=status, messages=messages)


def read_student(path):
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise data.UserError(f"{path}: not a Python file: {error}") from None


def tasks_named(names):
    """Full names of tasks; a method or a class alone will do where only one task has it."""
    found = []
    for name in names:
        fitting = [task for task in TASKS if name in ("all", task, *task.split("."))]
        if len(fitting) != 1 and name != "all":
            raise data.UserError(f"{name!r} is not the name of one task: use all, or of {', '.join(TASKS)}")
        found += fitting
    return list(dict.fromkeys(found))


def main(argv=None):
    parser = data.Parser(prog="test_maelm.py", description="For classes: see docs/teaching.md.", allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="NAME", help="print maelm.py without their bodies; or all")
    what.add_argument("--grade", metavar="FILE", help="test each task that FILE holds; exit code 0 = full marks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks, or all, also where FILE lacks them")
    parser.add_argument("--time-limit", type=float, default=5.0, metavar="SECONDS", help="for each task [5]")
    parser.add_argument("--json", action="store_true", help="print {task: {passed, total, status, messages}}")
    options = parser.parse_args(argv)
    with data.clear_errors(parser.prog):
        if options.blank:
            return print(student_file(tasks_named(options.blank)), end="")
        student, only, points = read_student(options.grade), tasks_named(options.only or []), {}
        held = [name for name in TASKS if TASKS[name].file == "maelm" or locate(student.body, name)[1] is not None]
        for name in only or held:
            points[name] = score(name, student, options.time_limit)
            if not options.json:
                passed, total, status, messages = points[name].values()
                print(" ".join([name, f"{passed}/{total}", status, *messages[:1]])[:120], flush=True)
        if options.json:
            print(json.dumps(points, indent=1))
        sys.exit(any(one["passed"] < one["total"] for one in points.values()))


def blank_but(name):
    """The file of a student who solved one task, as we do, and left all others blank."""
    return student_file(TASKS, change=lambda text, task: text if task == name else blanked(text, task))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", TASKS)
def test_a_task_stands_alone_and_its_own_tests_catch_each_mistake(name):
    text = blank_but(name)
    statements, at = locate(ast.parse(text).body, name)
    function = ast.get_source_segment(text, statements[at])
    assert not [wrong for _, wrong in results(name, ast.parse(text)) if wrong]
    assert len(TASKS[name].tests) >= 3 and len(TASKS[name].mistakes) >= 4
    for source, mistake in TASKS[name].mistakes:
        assert function.count(source) == 1, f"{source!r} must occur once in {name}"
        student = ast.parse(text.replace(function, function.replace(source, mistake)))
        caught = next((wrong for _, wrong in results(name, student) if wrong), "")
        assert caught and not caught.startswith(("NameError", "SyntaxError")), (mistake, caught)


def test_a_blank_is_signature_docstring_and_nothing_else(capsys):
    main(["--blank", "all"])
    text = capsys.readouterr().out
    exec(compile(text, "maelm.py", "exec"), {"__name__": "maelm"})  # the student's file can be imported
    for name in TASKS:
        (ours, i), (theirs, j) = (locate(ast.parse(t).body, name) for t in (source_of(name), text))
        docstring, body = theirs[j].body
        assert ast.dump(theirs[j].args) == ast.dump(ours[i].args)
        assert ast.get_docstring(theirs[j]) == ast.get_docstring(ours[i])
        assert body.lineno == docstring.end_lineno + 1 and ast.unparse(body) == "raise NotImplementedError"
    main(["--blank", "corrupt", "Encoder"])
    assert capsys.readouterr().out == blanked(blanked((HERE / "maelm.py").read_text(), "corrupt"), "Encoder.forward")


def test_the_instructors_page_lists_every_task_with_its_level_and_points():
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (\d+) \|", (HERE / "docs/teaching.md").read_text(), re.M)
    assert rows == [(name, task.level, str(len(task.tests))) for name, task in TASKS.items()]


def test_an_untouched_file_is_not_attempted(tmp_path, capsys):
    (tmp_path / "maelm.py").write_text(student_file(TASKS))
    with pytest.raises(SystemExit) as end:
        main(["--grade", str(tmp_path / "maelm.py")])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1 and lines == [f"{name} 0/{len(TASKS[name].tests)} not attempted" for name in TASKS]


def grade(path, *flags):
    done = subprocess.run([sys.executable, HERE / "test_maelm.py", "--grade", path, "--json", *flags],
                          capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_reference_has_full_marks(tmp_path):
    (tmp_path / "solved.py").write_text(student_file(TASKS, change=lambda text, name: text))
    code, points, _ = grade(tmp_path / "solved.py", "--time-limit", "60")
    assert list(points) == list(TASKS) and {one["status"] for one in points.values()} == {"full marks"} and code == 0


HOSTILE = [  # (task, body, message)
    ("learning_rate_factor", "while True: print('x' * 1000)", "ends_at_the_peak: time limit"),
    ("tau_rank", "raise SystemExit(0)", "SystemExit: 0"),
    ("matthews", "return matthews(predicted, true)", "RecursionError"),
    ("relative_bucket", "return torch.ones(1 << 36)", "allocate"),
    ("attention", "import os; os._exit(0)", "the process died"),
    ("MAELM.decoder_input", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "the process died"),
    ("MAELM.forward", "import subprocess, sys; subprocess.run(['sleep', '1000'])", "time limit"),
]


def test_nothing_that_a_student_writes_can_break_the_grader(tmp_path):
    text = "raise RuntimeError('the file is read, not run')\n" + student_file(TASKS)
    for name, body, _ in HOSTILE:
        statements, at = locate(ast.parse(text).body, name)
        node, lines = statements[at].body[1], text.splitlines()
        lines[node.lineno - 1] = " " * node.col_offset + body
        text = "\n".join(lines)
    (tmp_path / "hostile.py").write_text(text)
    code, points, errors = grade(tmp_path / "hostile.py", "--time-limit", "3")
    assert code == 1 and errors == "" and list(points) == list(TASKS)
    for name, _, message in HOSTILE:
        assert points[name]["passed"] == 0 and message in points[name]["messages"][0], (name, points[name])
    assert points["corrupt"]["status"] == "not attempted"


def test_helpers_imports_and_methods_of_the_student_come_along():
    text = blank_but("relative_bucket").replace('''from dataclasses import''', '''import bisect as search
from dataclasses import''')
    statements, at = locate(ast.parse(text).body, "relative_bucket")
    text = text.replace(ast.get_source_segment(text, statements[at]), """
LIMIT = 10 ** 9


def one(r, half, exact, farthest):
    starts = [exact ** (half - exact - i) * farthest ** i for i in range(half - exact)]
    size = abs(r) if abs(r) < exact else exact - 1 + search.bisect(starts, min(LIMIT, abs(r)) ** (half - exact))
    return size + half * (r > 0)


def relative_bucket(distance, num_buckets, max_distance):
  half = num_buckets // 2
  return torch.tensor([one(r, half, half // 2, max_distance) for r in distance.flatten().tolist()]).view(distance.shape)


def unused(x=corrupt(None, None, None)):
    pass
""")
    assert not [wrong for _, wrong in results("relative_bucket", ast.parse(text)) if wrong]
    text = blank_but("MAELM.forward").replace("    def forward(self, tokens: Tensor, corruption: Corruption)", """
    def true_tokens(self, tokens, at):
        return tokens.gather(1, at).flatten()

    def forward(self, tokens: Tensor, corruption: Corruption)""")
    assert "tokens.gather(1, at).flatten())" in text
    text = text.replace("tokens.gather(1, at).flatten())", "self.true_tokens(tokens, at))")
    assert not [wrong for _, wrong in results("MAELM.forward", ast.parse(text)) if wrong]


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), (b"def f(:\n", "not a Python file: invalid syntax"),
    (b"\xff\xfe\x00", "not a Python file: 'utf-8'"), (b"x = '\x00'", "not a Python file")])
def test_a_file_that_cannot_be_graded_is_named_in_one_line(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "student.py").write_bytes(content)
    line = fails(lambda: main(["--grade", str(tmp_path / "student.py")]), capsys)
    assert message in line and "student.py" in line


@pytest.mark.parametrize("flags, message", [
    ([], "required"), (["--blank", "corupt"], "'corupt' is not the name of one task: use all, or of "),
    (["--blank", "forward"], "'forward' is not"), (["--grade", __file__, "--only", "x"], "'x' is not the name")])
def test_a_bad_command_of_the_kit_gets_one_line(flags, message, capsys):
    assert message in fails(lambda: main(flags), capsys)


if __name__ == "__main__":
    main()
