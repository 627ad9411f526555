"""Claims about rank.py: what is measured, the theory, the command. The effective rank itself: test_maelm.py."""
import csv
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import files
import maelm
import rank
from conftest import (HERE, TAUS, built, catches, fails, generator, moments_of, one_place, rank_json,
                      run_with_wrong_version, short_run, svd_ranks, wrong_versions)


# ---- Other measures, and what has none ------------------------------------------------------------------------------
@catches("rank.rankme", "p = sigma / sigma.sum()", "p = values / values.sum()")
@catches("rank.Moments.mean_cosine", "(self.units @ self.units - self.count) / pairs",
         "self.units @ self.units / self.count ** 2")
def test_other_measures_follow_their_definitions():
    h = built("geometric", n=300, d=12)
    moments, sigma = moments_of(h, 100), np.linalg.svd(h.astype(np.float64), compute_uv=False)
    values, p = moments.spectrum(False), sigma / sigma.sum()
    assert np.isclose(rank.rankme(values), np.exp(-(p * np.log(p)).sum()), rtol=1e-4)
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i, j in itertools.permutations(range(300), 2)]
    assert np.isclose(moments.mean_cosine(), np.mean(cosines), atol=1e-5)
    flat = torch.ones(9, dtype=torch.float64)
    assert np.isclose(rank.rankme(flat), 9) and np.isfinite(rank.rankme(0 * flat))


@pytest.mark.parametrize("h, tau, message", [
    (np.ones((5, 3)), 0, "use 0 < tau < 1"), (np.ones((5, 3)), 1.0, "tau=1.0"), (np.ones((5, 3)), float("nan"), "tau=nan"),
    (np.full((5, 3), np.nan), 0.9, "NaN"), (np.ones(5), 0.9, r"\(5,\)"), (-np.eye(3), 0.9, "eigenvalue -1 < 0")])
def test_effective_rank_refuses_what_has_no_answer(h, tau, message):
    with pytest.raises(ValueError, match=message):
        rank.effective_rank(h, tau)


@catches("rank.identity_share", "within / (N - G) / (total / (N - 1))", "within / total")
@catches("rank.identity_share", "h = h - h.mean(0)", "h = h + 0")
def test_identity_share_is_that_of_an_analysis_of_variance():
    tokens = torch.randint(20, (400,), generator=generator(0))
    table = torch.randn(20, 6, generator=generator(1)) + 5
    noise = torch.randn(400, 6, generator=generator(2))
    assert rank.identity_share(table[tokens], tokens) == pytest.approx(1)  # the token says all
    assert abs(rank.identity_share(noise + 5, tokens)) < 0.03  # it says nothing, whatever chance would explain
    h = (table[tokens] + 0.5 * noise).numpy().astype(np.float64)
    within = sum(len(h[tokens == v]) * h[tokens == v].var(0).sum() for v in range(20))
    expected = 1 - within / 380 / (400 * h.var(0).sum() / 399)
    assert rank.identity_share(torch.from_numpy(h), tokens) == pytest.approx(expected)
    assert rank.identity_share(noise, torch.arange(400)) is None and rank.identity_share(0 * noise, tokens) is None


# ---- What is measured -----------------------------------------------------------------------------------------------
def small_subject(dim=8, layers=2, B=40, n=20, norm="post"):
    """A maelm encoder with large random weights, on rows with special tokens in them, as rank.py sees it."""
    config = maelm.Config(vocab_size=300, seq_len=n, encoder_layers=layers, encoder_dim=dim, encoder_heads=2, dropout=0.0,
                          norm=norm)
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
    return rank.read_options(["small", *flags])[1]


@catches("rank.add_states", "subject.encode(torch.from_numpy(tokens))", "subject.encode(torch.from_numpy(tokens))[1:]")
@catches("rank.stream", "if config.specials else ~special", "if True else ~special")
@catches("rank.stream", '"mask_only": masked}', '"mask_only": counted}')
@catches("rank.stream", 'subject, tokens, {"without_mask"', 'subject, replaced, {"without_mask"')
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


@catches("rank.draw_masks", "return masked & ~special", "return np.roll(masked, 1, axis=1)")
@catches("rank.draw_masks", "mix(indices.astype(np.uint64)", "mix(np.arange(len(indices)).astype(np.uint64)")
def test_masks_are_fifteen_percent_of_real_tokens_and_a_function_of_seed_and_row():
    special = np.isin(small_subject().rows, [0, 1, 2, 3])
    masked = rank.draw_masks(special, np.arange(40), 0)
    assert (masked.sum(1) == 3).all() and not (masked & special).any()
    assert np.array_equal(rank.draw_masks(special[5:9], np.arange(5, 9), 0), masked[5:9])
    assert not np.array_equal(rank.draw_masks(special, np.arange(40), 1), masked)
    share = rank.draw_masks(np.zeros((20_000, 20), bool), np.arange(20_000), 0).mean(0)
    assert abs(share - 0.15).max() < 5 * (0.15 * 0.85 / 20_000) ** 0.5


def analysed(subject, *flags):
    """A model's part of rank.json."""
    return rank.as_json(rank.analyse(subject, options_of(*flags), one_place())[0])


def integers(found):
    """All ranks of a model's part of rank.json."""
    return [{c: {k: [e[str(t)] for t in TAUS if str(t) in e] for k, e in curves.items()} for c, curves in layer.items()}
            for layer in found["layers"]]


def test_ranks_do_not_depend_on_batches_and_converge_to_the_whole():
    subject = small_subject()
    results = [analysed(subject, "--batch-size", size, "--tau", *map(str, TAUS)) for size in ("1", "9", "64")]
    assert all(json.dumps(integers(result)) == json.dumps(integers(results[0])) for result in results)
    last = results[0]["layers"][-1]
    assert results[0]["convergence"][-1] == {"n": 800, **{c: last[c]["without_mask"]["0.5"] for c in rank.CENTERINGS}}


@catches("rank.bootstrap", "combine(blocks, draw.tolist())", "combine(blocks, [min(1, k) for k in draw.tolist()])")
def test_intervals_are_those_of_resampled_text_and_need_no_second_run():
    subject, flags = small_subject(dim=16, B=100), ["--bootstrap", "40", "--seed", "3", "--tau", *map(str, TAUS)]
    found = analysed(subject, *flags)
    _, parts, _ = rank.measure(subject, options_of(*flags), one_place())
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


# ---- Section 2 and Appendix A: Lemma 2.1, Theorem 2.2 ---------------------------------------------------------------
@catches("rank.attention_only", "if skip:", "if not skip:")
def test_pure_attention_collapses_double_exponentially_and_skip_connections_prevent_it():
    for seed in range(3):
        logs = np.log10(rank.collapse(seed=seed))
        assert (np.diff(logs) < 0).all() and logs[-1] < -50
        assert abs(logs[4] / logs[3] - 3) < 0.3 and abs(logs[5] / logs[4] - 3) < 0.15, logs
        assert rank.collapse(seed=seed, skip=True)[-1] > 0.05


@catches("rank.attention_only", "torch.where(F.abs().amax(1) < 1, tiny, large)", "0 * F[0]")
@catches("rank.attention_only", "R @ qk.T @ h", "R @ qk @ h")
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


@catches("rank.attention_only", "torch.expm1(F - scale[:, None])", "(torch.exp(F - scale[:, None]) - 1)")
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


@catches("rank.single_head", "query.T @ key / len(query) ** 0.5", "query @ key.T / len(query) ** 0.5")
@catches("rank.both_sides", "+ 1 / n", "")
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


@catches("rank.lemma_2_1", 'rank["P"] <= d - rank["E"]', 'rank["P"] <= rank["E"]')
@catches("rank.lemma_2_1", "int(torch.linalg.matrix_rank(matrix))", "effective_rank(matrix, tau)")
def test_the_premise_of_lemma_2_1_is_judged_by_both_ranks():
    """E has full numerical rank 8, of which 3 dimensions hold nearly all: there is room for P of rank 2 in one sense."""
    subject = small_subject()
    with torch.no_grad():
        subject.encoder.token_embedding.weight[:, 3:] *= 1e-3
        subject.encoder.position_embedding.weight[:, 2:] = 0
    moments = rank.stream(subject, np.arange(40), options_of(), one_place())
    printed = " ".join(" ".join(rank.lemma_2_1(subject, moments, 0.9)).split())
    assert "by numerical rank 2 <= 8 - 8 does not hold" in printed and "by rank_0.9 2 <= 8 - 3 holds" in printed


# ---- The command ----------------------------------------------------------------------------------------------------
def test_the_command_writes_what_the_contract_says(corpus, finished, tmp_path, capsys):
    text, folder = corpus
    mlm = tmp_path / "mlm"
    short_run(corpus, mlm, "--ablation", "mlm", "--max-steps", "2")
    found = rank_json(tmp_path / "rank", finished[0], mlm, "--data", text, "--val-share", 1, "--tau", 0.9, 0.5, "--bootstrap", 3,
                      "--theory", "--collapse")
    assert {p.name for p in (tmp_path / "rank").iterdir() if p.name != ".lock"} == {"rank.json", "rank.csv", "rank.png", "collapse.png"}
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
    printed = capsys.readouterr().out
    for piece in ("as Table 3", "Eq.(3) error", "are a token unknown to it", "convergence", "attention only"):
        assert piece in printed, piece


def test_two_processes_give_the_ranks_of_one(corpus, finished, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
import conftest, rank
analyse_all = rank.analyse_all

def first_known_ranks(models, config, place):
    found = []
    for kind in ("geometric", "power", "two-step", "rogue"):
        for sizes in (2000, 77):
            rows = [conftest.built(kind)[:300], conftest.built(kind)[300:]][place.rank]
            moments = conftest.moments_of(rows, sizes).over_processes(place)
            ranks = [[rank.tau_rank(moments.spectrum(c), tau) for tau in conftest.TAUS] for c in (False, True)]
            found.append([kind, moments.count, *ranks])
    if place.rank == 0:
        json.dump(found, open({str(tmp_path / "found.json")!r}, "w"))
    analyse_all(models, config, place)

rank.analyse_all = first_known_ranks
rank.main(sys.argv[1:])
""")
    flags = [str(finished[0]), "--data", str(corpus[0]), "--val-share", "1", "--tau", *map(str, TAUS), "--bootstrap", "2",
             "--tokens", "20000"]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), *flags,
                    "--out", str(tmp_path / "two")], cwd=HERE, check=True, capture_output=True, timeout=240)
    for kind, count, *ranks in json.loads((tmp_path / "found.json").read_text()):
        assert count == 2000 and ranks == [svd_ranks(built(kind), centered)[0] for centered in (False, True)], kind
    one, two = rank_json(tmp_path / "one", *flags), files.read_json(tmp_path / "two" / "rank.json")
    (one,), (two,) = one["models"].values(), two["models"].values()
    assert one["n"] == two["n"] and one["convergence"] == two["convergence"]
    assert integers(one) == integers(two)


@pytest.mark.parametrize("flags, message", [
    ([], "MODEL: name a run folder or hf:NAME"), (["a", "a"], "name each model once"), (["a", "--tau", "1.5"], "use 0 < tau < 1"),
    (["a", "--tokens", "0"], "tokens=0: use a positive number"), (["a", "--val-share", "2"], "0 < share <= 1"),
    (["a", "--plot", "both"], "plot='both': use uncentered or centered"), (["a", "--seed", "-1"], "seed=-1: use 0"),
    (["hf:a", "--theory"], "--theory: for run folders of train.py only"), (["no/such/run"], "no/such/run: no such run folder"),
    ([".", "no/such/run"], "no/such/run: no such run folder"), (["hf:no/such/folder"], "hf:no/such/folder: transformers cannot load it")])
def test_a_bad_rank_command_gets_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in fails(lambda: rank.main(flags), capsys)


def rank_fails(command, capsys):
    """Run a command that must end with exit code 2 and one line, after it has said what it reads; returns the line."""
    with pytest.raises(SystemExit) as exit:
        rank.main(command)
    captured = capsys.readouterr()
    assert exit.value.code == 2 and len(captured.err.splitlines()) == 1, captured
    assert captured.out == "" or re.fullmatch(r"reads .*text.txt: 1 files, [0-9,]+ bytes\n", captured.out)
    return captured.err


def test_too_few_tokens_are_refused(corpus, finished, tmp_path, capsys):
    command = [str(finished[0]), "--out", str(tmp_path / "out")]
    for flags in ([], ["--data", str(corpus[0]), "--val-share", "1", "--tokens", "1000"]):
        error = rank_fails([*command, *flags], capsys)
        assert "fewer than 10 d = 320" in error and "Raise --tokens" in error and not (tmp_path / "out").exists()
    command += ["--data", str(corpus[0]), "--val-share", "1e-6"]
    assert "less than a row of 24" in rank_fails(command, capsys)


@pytest.mark.parametrize("maker", ["train.py", "data.py prepare"])
@catches("rank.main", 'refuse_other_kind(config.out, "ranks")', "pass", maker="train.py")
def test_the_folder_of_another_program_is_refused_before_the_first_model(maker, corpus, finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished[0] if maker == "train.py" else corpus[1], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(rank, "analyse_all", None)
    capsys.readouterr()
    for flags in ([str(finished[0])], ["--collapse"]):
        assert f"was made by {maker}" in fails(lambda flags=flags: rank.main([*flags, "--out", str(out)]), capsys)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_ranks_replace_ranks(corpus, finished, tmp_path):
    flags = [finished[0], "--data", corpus[0], "--val-share", 1]
    first, again = rank_json(tmp_path / "out", *flags, "--tau", 0.5), rank_json(tmp_path / "out", *flags)
    assert first["tau"] == [0.5] and again["tau"] == [0.9]


def test_a_bad_model_is_named_in_one_line(corpus, finished, tmp_path, capsys, monkeypatch):
    """One flipped bit anywhere in a checkpoint, a part of one, other files: never ranks of other weights."""
    monkeypatch.chdir(tmp_path)  # short names have room in a legend
    path, out = Path("step_0000006.pt"), Path("out")
    shutil.copy(finished[0] / "tokenizer.json", tmp_path)
    whole = (finished[0] / path.name).read_bytes()
    random = np.random.default_rng(0)
    places = random.integers(len(whole), size=30)
    contents = [whole[:len(whole) // 2], whole[:-1], b"", b"no checkpoint"]
    for place, bit in zip(places, random.integers(8, size=30)):
        contents.append(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1:])
    flags = ["--data", str(corpus[0]), "--val-share", "1", "--tokens", "8000", "--out"]
    rank.main([str(finished[0] / path.name), *flags, "right"])
    right, = files.read_json(Path("right") / "rank.json")["models"].values()
    refused = 0
    for content in contents:
        path.write_bytes(content)
        capsys.readouterr()
        try:
            rank.main([str(path), *flags, str(out)])
        except SystemExit as exit:
            error = capsys.readouterr().err
            assert exit.code == 2 and len(error.splitlines()) == 1 and str(path) in error
            refused += 1
        else:  # the bit is in a date or a number that nobody reads
            found, = files.read_json(out / "rank.json")["models"].values()
            assert found == right
    assert refused > len(contents) - 10
    torch.save({"model": {"a": torch.zeros(2)}}, path)
    assert str(path) in fails(lambda: rank.main([str(path), *flags, str(out)]), capsys)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_one_line_and_its_code(number, corpus, finished, tmp_path):
    command = [sys.executable, "rank.py", str(finished[0]), "--data", str(corpus[0]), "--val-share", "1", "--bootstrap", "100000",
               "--batch-size", "1", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(6)  # until it measures; should the machine be slow, until it imports, where Python itself speaks
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 128 + number and error == "rank.py: interrupted; the same command continues\n"
    assert not (tmp_path / "out" / "rank.json").exists()


@catches("rank.add_mean_square", "fx.float().square()", "inputs[0].float().square()")
def test_anatomy_is_what_sub_layers_add_to_the_residual_stream():
    """In a pre-LN model the difference of two states is what the sub-layers between them have written."""
    subject = small_subject(layers=3, norm="pre")
    for block in subject.encoder.blocks:  # one sub-layer alone writes
        block.self_attention.f.output.weight.data.zero_()
        block.self_attention.f.output.bias.data.zero_()
    layers = rank.anatomy(subject, rank.RankConfig(batch_size=8))
    states = subject.encode(torch.from_numpy(subject.rows))
    for layer in (1, 2):  # the last one ends with a LayerNorm
        written = (states[layer] - states[layer - 1]).square().mean().item()
        assert layers[layer]["ffn"] == pytest.approx(written, rel=1e-4) and layers[layer]["attention"] == 0
    tokens = torch.from_numpy(subject.rows).flatten()
    for layer, found in enumerate(layers):
        assert found["identity"] == pytest.approx(rank.identity_share(states[layer].flatten(0, 1), tokens), rel=1e-4)
    assert layers[0]["ffn"] is None and len(layers) == 4


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
