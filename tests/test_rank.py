"""Claims about rank.py and course/theory.py: what is measured, for which models, and what the command writes."""
import subprocess
import sys

import pytest
import torch

import maelm
import rank
from conftest import TAUS, generator, svd_ranks
from course import theory
from support.files import read_json
from support.run import Place, checkpoints, load_encoder
from tests.common import ROOT, fails, little_documents
from tests.test_hub import write_hub_model

ONE = Place(0, 1, torch.device("cpu"), torch.float32)
TABLES = torch.randn(3, 300, 8, generator=generator(0)) + 1
POSITIONS = torch.randn(20, 8, generator=generator(1))


def made_up(tokens):
    """The states of a made-up encoder: tokens (B, 20) -> three (B, 20, 8)."""
    return [table[tokens] + POSITIONS for table in TABLES]


def measure(seed):
    """Rows (40, 20), the masked ones that the encoder read, and its part of rank.json."""
    rows = torch.randint(maelm.NUM_SPECIAL, 300, (40, 20), generator=generator(3))
    rows[:, 0] = maelm.CLS
    rows[::2, 11] = maelm.SEP
    read = []

    def encode(tokens):
        read.append(tokens)
        return made_up(tokens)

    subject = rank.Subject("made up", encode, rows.numpy(), "rows", 8, 20, maelm.MASK, [0, 1, 2, 3])
    found = rank.analyse(subject, rank.RankConfig(batch_size=7, tau=TAUS, seed=seed), ONE)
    assert torch.equal(torch.cat(read[1::2]), rows)
    return rows, torch.cat(read[::2]), found


def test_curves_hold_the_states_they_name():
    rows, masked, found = measure(0)
    at = masked == maelm.MASK
    everywhere = torch.ones_like(at)
    curves = {"with_mask": (masked, everywhere), "without_mask": (rows, everywhere), "mask_only": (masked, at)}
    for curve, (tokens, chosen) in curves.items():
        assert found["n"][curve] == chosen.sum()
        for layer, h in zip(found["layers"], made_up(tokens), strict=True):
            for centering, centered in rank.CENTERINGS.items():
                ranks, _ = svd_ranks(h[chosen].numpy(), centered)
                assert list(layer[centering][curve].values()) == ranks


def test_masks_are_15_percent_of_real_tokens():
    rows, masked, _ = measure(0)
    at = masked == maelm.MASK
    assert (at.sum(1) == 3).all() and rows[at].min() >= maelm.NUM_SPECIAL
    assert torch.equal(masked[~at], rows[~at]) and not torch.equal(masked, measure(1)[1])


def rank_json(out, *arguments):
    """Run rank.py; returns the models of rank.json."""
    rank.main([*map(str, arguments), "--out", str(out)])
    return read_json(out / "rank.json")["models"]


def test_the_command_writes_ranks_and_a_figure(text, finished, tmp_path):
    names = [str(path) for path in (finished, *checkpoints(finished))]
    models = rank_json(tmp_path, *names, "--data", text, "--val-share", 1, "--tau", 0.9, 0.5)
    assert list(models) == names and (tmp_path / "rank.png").is_file()
    folder, first, last = models.values()
    assert folder == last and folder["layers"] != first["layers"]  # a folder is its newest checkpoint
    ranks = folder["layers"][2]["centered"]["mask_only"]
    assert 1 <= ranks["0.5"] <= ranks["0.9"] <= folder["d"] == 32


def test_a_run_is_measured_on_its_validation_text(finished):
    subject = rank.run_subject(str(finished), rank.RankConfig(), ONE)
    encoder, tokenizer, _ = load_encoder(finished)
    document = next(text for text in little_documents() if rank.in_validation(text, 0.1))
    tokens = torch.from_numpy(subject.rows[[0, 1, 2]])
    assert tokenizer.decode(tokens[:, 1:].flatten()).startswith(document.lower())
    states = encoder(tokens, torch.arange(24)[None], all_layers=True)
    assert all(map(torch.equal, subject.encode(tokens), states))


def test_a_hub_encoder_keeps_its_frame(text, tmp_path):
    model, tokenizer = write_hub_model(tmp_path)
    config = rank.RankConfig(data=str(text), val_share=1.0)
    subject = rank.hub_subject(f"hf:{tmp_path}", config, ONE)
    tokens = torch.from_numpy(subject.rows[:3])
    for row in tokens.tolist():
        assert row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id
    assert tokenizer.decode(tokens[:, 1:-1].flatten()).startswith(little_documents()[0] + "</s>")
    torch.testing.assert_close(subject.encode(tokens)[-1], model.base_model(tokens).last_hidden_state)
    assert rank.analyse(subject, config, ONE)["n"]["mask_only"] == 4 * len(subject.rows)


def test_two_processes_find_the_ranks_of_one(text, finished, tmp_path):
    flags = [finished, "--data", text, "--val-share", 1, "--tau", *TAUS]
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 rank.py".split()]
    command = [*torchrun, *map(str, flags), "--out", str(tmp_path / "two")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    assert read_json(tmp_path / "two" / "rank.json")["models"] == rank_json(tmp_path / "one", *flags)


@pytest.mark.parametrize("flags, message", [
    (". ./", "name each model once"), (". no/such", "no/such: no such run folder"),
    ("hf:no/such", "transformers cannot load it"), (". --tau 1.5", "tau="),
    (f". --seed {2 ** 63}", "seed=92233")])
def test_a_bad_command_gets_one_line(flags, message, capsys):
    assert message in fails(lambda: rank.main(flags.split()), capsys)


def test_too_few_tokens_are_refused(text, finished, capsys):
    command = [str(finished), "--data", str(text), "--tokens", "1000"]
    assert "fewer than 10 d = 320" in fails(lambda: rank.main(command), capsys)


def test_theorem_2_2_holds_where_u_exists():
    random = generator(0)
    real, qk, vo, mix = [torch.randn(n, 6, dtype=torch.float64, generator=random) for n in (12, 6, 6, 4)]
    U = (mix @ real.T).softmax(1)  # (4, 12)
    for size in (0.5, 0.3, 0.1):
        near = real.mean(0) + size * (real - real.mean(0))
        sides = theory.both_sides(near, U @ near, 0.05 * qk, vo)
        assert sides["eq3"] < 1e-9 and sides["spread"] < 1.256
        assert 0 < sides["left"] <= sides["right"]


def test_pure_attention_collapses_and_skips_prevent_it():
    first, second, third, *_, last = theory.collapse(skip=False)
    assert first > second > third > 1e9 * last
    assert theory.collapse(skip=True)[-1] > 0.05


def test_the_theory_of_a_run_has_each_layer(finished, capsys):
    theory.main([str(finished)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.strip()[:1].isdigit()] == ["0", "1", "2"]
