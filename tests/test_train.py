"""Claims about pre-training: train.py, support/run.py, support/optim.py, support/fill_mask.py."""
import math
import shutil
import sys
import time
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch

import train
from conftest import generator, model_and_batch, random_tokens, tiny
from maelm import MAELM, NUM_SPECIAL, Config, Corruption, Decoder, Encoder, Head, apply_masks, draw_masks
from support import fill_mask, optim
from support.checkpoints import load_checkpoint, load_model
from support.corpus import indices_of_step
from support.model import flops
from support.run import Run
from support.worker import Worker
from tests.common import ROOT, fails, last_checkpoint, make_config, read_log, short_run, write_corpus

CPU = torch.device("cpu")
TINY = tiny()


# ---- Runs -----------------------------------------------------------------------------------------------------------
def test_training_learns_the_little_language(text, tmp_path, capsys):
    flags = """--max-steps 200 --batch-size 16 --micro-batch-size 16 --encoder-dim 64 --dropout 0 --log-interval 50
               --eval-interval 200 --checkpoint-interval 200 --muon-weight-decay 0.01""".split()
    out = short_run(text, tmp_path / "run", *flags)
    log = read_log(out)
    assert log[-1]["val_loss"] < 0.5 * log[0]["unigram_entropy"]
    capsys.readouterr()
    fill_mask.main([str(out), "my friend likes [MASK] bread [MASK], number 12."])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[MASK] 1: some 0.") and second.startswith("[MASK] 2: today 0.")


# ---- Batches and evaluation -----------------------------------------------------------------------------------------
def batch(rank, world, size=4, step=7, **given):
    """The micro-batches of at most `size` sequences that a process has in a step of 24 sequences."""
    flags = dict(mask_in_encoder=0.5, encoder_fill="random", batch_size=24, micro_batch_size=size) | given
    config, recipe = train.make_settings(asdict(TINY) | flags)
    trainer = train.Trainer(config, recipe, Worker(0, 1, CPU, torch.float32))
    trainer.worker = Worker(rank, world, CPU, torch.float32)
    return trainer.batches(random_tokens(200).numpy(), step)


def joined(batches):
    """The sequences, masks and corrupted texts of some micro-batches, each as one tensor."""
    return [torch.cat(parts) for parts in zip(*[(tokens, *corruption) for tokens, corruption in batches])]


def test_sequences_and_masks_depend_on_seed_and_step_alone():
    whole = joined(batch(0, 1))
    assert torch.equal(whole[0], random_tokens(200)[indices_of_step(0, 7, 24, 200)])
    for world, size, largest in ((1, 24, 24), (1, 5, 5), (2, 4, 4), (3, 100, 8), (6, 3, 3), (24, 1, 1)):
        parts = [batch(rank, world, size) for rank in range(world)]
        sizes = [len(tokens) for part in parts for tokens, _ in part]
        assert max(sizes) == largest and len(sizes) == world * math.ceil(24 / world / size)
        assert all(map(torch.equal, joined(sum(parts, [])), whole))
    given = dict(), dict(step=8), dict(seed=1)
    for parts in zip(*[joined(batch(0, 1, **each)) for each in given]):  # of sequences and of each field of the masks
        assert len({str(part.tolist()) for part in parts}) == 3
    few = whole[0][:3], Corruption(*[part[:3] for part in whole[1:]])
    assert [len(Worker(rank, 6, CPU, torch.float32).micro_batches(*few, 4)) for rank in (0, 5)] == [1, 0]


def test_validation_masks_single_tokens_at_the_papers_rate_in_every_run():
    tokens = random_tokens(20)
    masked = draw_masks(tokens >= NUM_SPECIAL, 4, generator(0))  # 15% of 24
    for fields in (dict(mask_rate=0.5), dict(decoder="uni+cross"), dict(mask_in_encoder=1.0, dropout=0.5)):
        model, _, _ = model_and_batch(**fields)
        log_p = model.logits(apply_masks(tokens, masked, model.config, generator(0))).log_softmax(-1)  # (20, 4, V)
        true = tokens.gather(1, masked)
        expected = -log_p.gather(2, true[:, :, None]).mean().item(), (log_p.argmax(-1) == true).double().mean().item()
        for size in (20, 3):
            recipe = train.Recipe(micro_batch_size=size)
            trainer = train.Trainer(model.config, recipe, Worker(0, 1, CPU, torch.float32))
            trainer.model = model
            assert trainer.validate(tokens.numpy()) == pytest.approx(expected) and model.training


# ---- Continued pre-training -----------------------------------------------------------------------------------------
def test_init_gives_settings_tokenizer_and_weights_but_flags_win(finished, tmp_path, capsys):
    other = write_corpus(tmp_path / "other.txt", 300)
    flags = ["--init", str(finished), "--data", str(other), "--cache", "cache", "--max-steps"]
    train.main([*flags, "12", "--stop-at", "2"])
    out = tmp_path / "out/run-more"
    first, last = last_checkpoint(finished), last_checkpoint(out)
    expected = first["settings"] | dict(init=str(finished), data=str(other), cache="cache", max_steps=12, stop_at=2,
                                        warmup_steps=4, seed=1)
    assert last["config"] == first["config"] and last["settings"] == expected and last["id"] != first["id"]
    assert last["tokenizer"] == first["tokenizer"] and last["corpus"].startswith("other.txt-300-")
    assert read_log(out)[1]["val_loss"] < 0.97 * read_log(finished)[1]["val_loss"]  # at step 0
    shutil.rmtree(tmp_path / "cache")  # made again, with the same tokenizer
    flags[1] = "gone"  # the first run has moved
    assert "gone: no run folder" in fails(lambda: train.main([*flags, "12", "--out", str(out)]), capsys)
    flags[1] = str(shutil.copytree(finished, tmp_path / "moved"))
    train.main([*flags, "12", "--out", str(out)])
    last = last_checkpoint(out)
    assert (last["step"], last["preset"], last["ablation"]) == (12, "toy", "mae-lm")
    assert "began with other weights" in fails(lambda: train.main(["--init", str(out), "--out", str(out)]), capsys)


def test_warm_up_keeps_its_share_of_the_steps():
    found = [train.parse(["--max-steps", *steps])[1].warmup_steps for steps in (["38", "--warmup-steps", "9"], ["300"])]
    assert found == [9, 16]  # 300 of 1,900 steps have 15.8 of 100 steps of warm-up


def test_a_step_follows_precision_dropout_and_the_clock(text, tmp_path, monkeypatch, capsys):
    """Six steps of two micro-batches. Whoever reads the clock moves it on by a minute; saving takes a thousand."""
    minutes, forwards = [0], []

    def clock(passed=1):
        minutes[0] += passed
        return 60.0 * minutes[0]

    def forward(model, tokens, corruption):
        rates = [{part.p for part in half.modules() if hasattr(part, "p")} for half in (model.encoder, model.decoder)]
        is_bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if not tokens.is_meta:  # which only count FLOPs
            forwards.append((model.training, is_bf16, rates, torch.initial_seed()))
        return real_forward(model, tokens, corruption)

    real_forward, save = MAELM.forward, Run.save
    monkeypatch.setattr(MAELM, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Run, "save", lambda *given: (clock(1000), save(*given)))
    out = short_run(text, tmp_path / "run", "--log-interval", 3, "--precision", "bf16")
    assert len({seed for *_, seed in forwards}) == 12 == len(forwards)  # each micro-batch has dropout of its own
    assert all(forward[:3] == (True, True, [{0.1}, {0.0}]) for forward in forwards)
    for line in [line for line in read_log(out) if "loss" in line]:
        assert line["tokens_per_second"] == 3 * 8 * 24 / 60 and line["seconds"] == 20 * line["step"]
    printed = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in load_model(out)[0].parameters())
    assert "1.0 min left" in printed and f"{count:,} parameters" in printed


# ---- Optimizers -----------------------------------------------------------------------------------------------------
def test_muon_in_bf16_is_pytorchs_muon():  # needs torch 2.9 or later, which has Muon
    torch.manual_seed(0)
    ours = [torch.randn(shape, requires_grad=True) for shape in ((8, 8), (32, 8), (8, 8), (8, 32), (16, 8))]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours[:4]]
    theirs += [half.detach().clone().requires_grad_() for half in ours[4].chunk(2)]  # two matrices of their own
    groups = [{"params": ours[:4], "parts": 1}, {"params": ours[4:], "parts": 2}]
    optimizers = optim.Muon(groups, 0.02, 0.1, torch.bfloat16), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    for _ in range(3):
        for mine in ours:
            mine.grad = torch.randn(mine.shape)
        for other, gradient in zip(theirs, [*[mine.grad for mine in ours[:4]], *ours[4].grad.chunk(2)]):
            other.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    found = [*ours[:4], *ours[4].chunk(2)]
    torch.testing.assert_close(found, theirs, atol=1e-4, rtol=0)  # a step changes a number by about 0.02


def test_matrices_of_layers_go_to_muon_and_keys_are_not_joined_with_values():
    recipe = train.Recipe(optimizer="muon", weight_decay=0.02, muon_weight_decay=0.3)
    model = MAELM(TINY)
    adamw, muon = train.make_optimizers(model, recipe, torch.float32)
    single, double = muon.param_groups
    assert (single["parts"], double["parts"]) == (1, 2) and single["weight_decay"] == double["weight_decay"] == 0.3
    assert adamw.param_groups[0]["weight_decay"] == 0.02
    for name, parameter in model.named_parameters():
        group = adamw.param_groups[0]
        if parameter.ndim == 2 and "blocks" in name:
            group = double if "key_value" in name else single
        assert any(parameter is one for one in group["params"]), name


# ---- Costs, presets, flags ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset, ablation, mask_rate, expected", [
    ("base", "mae-lm", 0.15, 338_826_571_776), ("base", "mlm", 0.15, 289_493_876_736),
    ("toy", "mae-lm", 0.5, 228_065_280), ("small", "mae-lm", 0.5, 7_870_611_456)])  # as in bench/results
def test_a_step_on_a_sequence_has_this_many_flops(preset, ablation, mask_rate, expected):
    assert flops(make_config(preset, ablation, mask_rate=mask_rate)) == expected


def test_wandb_gets_every_number_of_the_log(text, tmp_path, monkeypatch):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    out = short_run(text, tmp_path / "run", "--wandb", "project")
    assert [call.args[0] for call in wandb.init.return_value.log.call_args_list] == read_log(out)
    first = wandb.init.call_args.kwargs["id"]
    wandb.init.side_effect = OSError("no network")
    short_run(text, out, "--wandb", "project", "--max-steps", 7)  # goes on, as the same run there
    assert wandb.init.call_args.kwargs["id"] == first and last_checkpoint(out)["step"] == 7


EVERY_PRESET = dict(  # from Table 4 and section 4.1
    batch_size=2048, warmup_steps=10_000, seq_len=512, adam_epsilon=1e-6, adam_beta1=0.9, adam_beta2=0.98, dropout=0.1,
    weight_decay=0.01, decoder_layers=4, mask_rate=0.15, norm="post", decoder_relative=False, init_std=0.02,
    optimizer="adamw", position_init="normal")
VARIED = """max_steps learning_rate clip_norm encoder_heads rel_pos_buckets rel_pos_max_distance vocab_size
            uncased""".split()


@pytest.mark.parametrize("preset, values, encoder, total", [
    ("base", (125_000, 5e-4, 2.0, 12, 32, 128, 32768, True), 110_616_960, 139_988_098),
    ("base++", (2_000_000, 2e-4, 2.0, 12, 64, 128, 64000, False), 134_603_520, 164_005_890),
    ("large++", (1_000_000, 1e-4, 1.0, 16, 128, 256, 64000, False), 368_375_808, 420_402_690)])
def test_presets_hold_table_4_and_have_the_parameters_of_the_official_models(preset, values, encoder, total):
    config, recipe = train.make_settings(train.PRESETS[preset])
    fields = asdict(config) | asdict(recipe)
    assert fields == fields | EVERY_PRESET | dict(zip(VARIED, values, strict=True))
    with torch.device("meta"):
        parts = Encoder(config), Decoder(config), Head(config)
    counts = [torch.nn.utils.parameters_to_vector(part.parameters()).numel() for part in parts]
    assert counts[0] == encoder - 2 * config.encoder_dim  # but for two rows of the vocabulary
    assert sum(counts) == total - 2 * (config.encoder_dim + 1)


@pytest.mark.parametrize("preset, expected", [
    ("toy", (64, 1900, 100, 6e-3, 2e-2, 0.1, 0.1, 2.0, 0.0, 0.06)),
    ("small", (256, 20_000, 1000, 2e-3, 2e-2, 0.01, 0.1, 2.0, 0.1, 0.03))])
def test_small_presets_have_the_settings_of_the_recorded_runs(preset, expected):
    config, recipe = train.make_settings(train.PRESETS[preset])
    assert expected == (recipe.batch_size, recipe.max_steps, recipe.warmup_steps, recipe.learning_rate,
                        recipe.muon_learning_rate, recipe.weight_decay, recipe.muon_weight_decay, recipe.clip_norm,
                        config.dropout, config.init_std)


def test_models_of_the_repository_have_the_settings_of_laptop():
    trained = load_checkpoint(ROOT / "models/mae-lm")
    settings = asdict(trained["config"]) | trained["settings"]
    different = {name for name, value in train.PRESETS["laptop"].items() if settings[name] != value}
    assert different == {"checkpoint_interval"}  # another one decides no weights


def test_flags_override_ablations_which_override_presets():
    config, recipe, *_ = train.parse("--preset base++ --ablation enc-mask --rel-pos-buckets 8 --seed 3".split())
    assert config == Config(vocab_size=64000, rel_pos_buckets=8, mask_in_encoder=1.0)
    assert (recipe.learning_rate, recipe.seed, recipe.batch_size) == (2e-4, 3, 2048)
