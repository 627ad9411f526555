"""Claims of the paper and of the README, as tests. Each important claim is also shown to catch wrong code: MUTANTS
lists small mistakes in the source, and the last test of a section runs a claim against each of them.

    pytest                          # all of it, a few minutes on two cores
"""
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
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
    import shutil
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
    import shutil
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
    import shutil
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
     "draw().masked_fill(special, 2.0).topk", "draw().topk"),
    (test_every_row_has_exactly_k_masks_and_no_special_token_among_them, "maelm",
     "draw().masked_fill(special, 2.0).topk(k, largest=False).indices",
     "torch.randint(1, n - 1, (B, k), generator=generator)"),
    (test_masks_are_uniform_over_real_tokens, "maelm", "draw().masked_fill(special, 2.0).topk(k, largest=False)",
     "(draw() * torch.linspace(1, 2, n)).masked_fill(special, 2.0).topk(k, largest=False)"),
    (test_kept_positions_are_the_rest_in_ascending_order, "maelm", "kept = (~removed).nonzero()[:, 1].view(B, -1)",
     "kept = (~removed).nonzero()[:, 1].view(B, -1).flip(1)"),
    (test_corrupt_is_a_pure_function, "maelm", "return torch.rand(B, n, generator=generator, device=tokens.device)",
     "return torch.rand(B, n)"),
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
