"""Claims about rank.py: measurements, models, and output."""
import re
import shutil

import numpy as np
import torch

import maelm
import rank
from conftest import generator, model_and_batch
from support import subjects
from support.checkpoints import Pretrained, checkpoints
from support.program import read_json, write_json
from tests.common import fails, little_documents, sentence
from tests.test_homework import TAUS
from tests.test_hub import write_hub_model

TABLES = torch.randn(3, 300, 8, generator=generator(0)) + 1
POSITIONS = torch.randn(20, 8, generator=generator(1))


def svd_ranks(h, centered):
    """The ranks at TAUS of h (n, d) by the paper's formula in float64."""
    h = h.astype(np.float64)
    if centered:
        h = h - h.mean(0)
    squares = np.linalg.svd(h, compute_uv=False) ** 2
    shares = np.cumsum(squares) / squares.sum()
    return [int(np.argmax(shares >= tau)) + 1 for tau in TAUS]


def test_equal_rows_have_rank_1():
    random = np.random.default_rng(0)
    rounding = 1 + 1e-7 * random.standard_normal((500, 16))
    moments = rank.Moments()
    moments.add(torch.from_numpy((random.standard_normal(16) * rounding).astype(np.float32)))
    assert [rank.tau_rank(moments.spectrum(centered), 0.9) for centered in (False, True)] == [1, 0]


def test_ranks_need_ten_finite_vectors_per_dimension():
    model, tokens, _ = model_and_batch()  # of 32 dimensions
    batch = None, tokens, tokens < 0, None
    assert rank.encoder_ranks(model.encoder, 2 * [batch]) is None and rank.encoder_ranks(model.encoder, 3 * [batch])
    model.encoder.norm.bias.data.fill_(torch.nan)
    assert rank.encoder_ranks(model.encoder, 3 * [batch]) is None


def made_up(tokens):
    """The states of a made-up encoder: tokens (B, 20) -> three (B, 20, 8)."""
    return [table[tokens] + POSITIONS for table in TABLES]


def measure(seed, tau=0.9, size=7):
    """Sequences (40, 20), the masked sequences that the encoder read, and the encoder's entry in rank.json."""
    rows = torch.randint(maelm.NUM_SPECIAL, 300, (40, 20), generator=generator(3))
    rows[:, 0] = maelm.CLS
    rows[::2, 11] = maelm.SEP
    read = []

    def encode(tokens):
        read.append(tokens)
        return made_up(tokens)

    subject = subjects.Subject("made up", encode, rows, "rows", maelm.MASK, [0, 1, 2, 3], True, rows.device)
    options = rank.RankOptions(batch_size=size, tau=tau, seed=seed, controls=True)
    found = rank.model_ranks(subject, rank.measure(subject, options), tau)
    _, *batches = read  # the first is one sequence, read to count the layers
    masked, unmasked, *controls = [torch.cat(batches[start::4]) for start in range(4)]
    assert torch.equal(unmasked, rows)
    return rows, masked, controls, found


def test_curves_hold_the_states_they_name_with_15_percent_of_real_tokens_masked():
    for number, tau in enumerate(TAUS):
        rows, masked, (random, one), found = measure(0, tau)
        at = masked == maelm.MASK
        everywhere = torch.ones_like(at)
        curves = {"with_mask": (masked, everywhere), "without_mask": (rows, everywhere), "mask_only": (masked, at),
                  "with_random": (random, everywhere), "token_only": (one, at)}
        assert found["centered"].keys() == curves.keys()
        for curve, (tokens, chosen) in curves.items():
            assert found["n"][curve] == chosen.sum()
            for centering, centered in rank.CENTERINGS.items():
                ranks = [svd_ranks(h[chosen].numpy(), centered)[number] for h in made_up(tokens)]
                assert found[centering][curve] == ranks
    assert (at.sum(1) == 3).all() and rows[at].min() >= maelm.NUM_SPECIAL
    assert torch.equal(masked[~at], rows[~at]) and not torch.equal(masked, measure(1)[1])
    _, again, _, results = measure(0, tau, size=40)
    assert torch.equal(masked, again) and found == results  # for any batch size
    assert torch.equal(random[~at], rows[~at]) and random[at].min() >= 4 and len(random[at].unique()) > 80
    assert one[at].unique().tolist() == [int(rows[rows >= 4].mode().values)] and torch.equal(one[~at], rows[~at])


def test_the_command_writes_ranks_and_draws_them(text, finished, figures, tmp_path, capsys):
    names = [str(path) for path in (finished, *checkpoints(finished))]
    command = [*names, *f"--data {text} --val-share 1 --tau 0.5 --out {tmp_path}".split()]
    rank.main(command)
    printed = capsys.readouterr().out
    models = read_json(tmp_path / "rank.json")["models"]
    assert list(models) == names
    folder, first, last = models.values()
    assert folder == last and folder["centered"] != first["centered"]  # a folder stands for its newest checkpoint
    rows = re.findall(r"^(\d) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", printed, re.MULTILINE)
    tables = [[entry[centering][curve] for centering in rank.CENTERINGS for curve in entry["centered"]]
              for entry in models.values()]
    assert [[int(cell) for cell in row[1:]] for row in rows] == [[*row] for table in tables for row in zip(*table)]
    left, right = figures[0].axes
    lines = [[line.get_ydata().tolist() for line in axis.get_lines()] for axis in (left, right)]
    assert lines[0][:2] == [folder["uncentered"][curve] for curve in ("with_mask", "without_mask")]
    assert lines[1] == [entry["uncentered"]["mask_only"] for entry in models.values()]
    assert [line.get_label() for line in right.get_lines()] == [f"[MASK] vectors: {name}" for name in names]
    assert "tau=0.5 there, 0.6 here" in fails(lambda: rank.main([*command, "--tau", "0.6"]), capsys)


def test_ranks_and_scores_are_drawn_over_the_steps_of_a_run(text, finished, figures, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for step in (6, 3):
        result = {"task": "rte", "frozen": "", "median": 50.0 + step, "pretraining_step": step}
        write_json(tmp_path / f"rte-{step}/result.json", result | {"init": f"{run}/step_000000{step}.pt"})
    rank.main(f"{run} --steps --data {text} --val-share 1 --out {tmp_path}/rank".split())
    models = read_json(tmp_path / "rank/rank.json")["models"]
    left, right = [{line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
                   for axis in figures[0].axes]
    assert left == {name: [[entry["step"], entry[name]["without_mask"][-1]] for entry in models.values()]
                    for name in rank.CENTERINGS}
    assert [entry["step"] for entry in models.values()] == [3, 6] and right == {"rte": [[3, 53], [6, 56]]}


def test_a_text_is_sampled_evenly_and_as_the_run_held_it_out(finished, tmp_path):
    for name, first in (("a.txt", 0), ("b.txt", 2000)):
        (tmp_path / name).write_text("\n\n".join(sentence(i) for i in range(first, first + 2000)))
    data = dict(data=f"{tmp_path}/a.txt+{tmp_path}/b.txt")
    found = [subjects.subject_of_run(str(finished), data | share, tokens, "cpu") for share, tokens in (
        ({}, 10 ** 6), (dict(val_share=0.1), 10 ** 6), (dict(val_share=1.0), 10 ** 6), (dict(val_share=1.0), 84))]
    decode = Pretrained(str(finished)).tokenizer.decode
    texts = [decode(subject.rows.flatten()) for subject in found]
    assert texts[0] == texts[1] and len(texts[2]) > len(texts[0])  # the run held out a tenth
    numbers = [int(number) for number in re.findall(r"number (\d+)", texts[3])]
    assert len(numbers) < 200 and min(numbers) < 400 and max(numbers) > 3600
    own = subjects.subject_of_run(str(finished), dict(val_share=1.0), 10 ** 6, "cpu")  # also without data
    assert len(own.rows) > 5 * len(subjects.subject_of_run(str(finished), {}, 10 ** 6, "cpu").rows)


def test_a_hub_encoder_reads_its_own_special_tokens(text, tmp_path):
    model, tokenizer = write_hub_model(tmp_path)
    subject = subjects.subject_of_hub(f"hf:{tmp_path}", dict(data=str(text), val_share=1.0), 10 ** 6, 512, "cpu")
    tokens = subject.rows[:3]
    for row in tokens.tolist():
        assert row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id
    assert tokenizer.decode(tokens[:, 1:-1].flatten()).startswith(little_documents()[0] + "</s>")
    assert subject.reads_mask
    assert rank.measure(subject, rank.RankOptions())["mask_only"][0].count == 4 * len(subject.rows)
