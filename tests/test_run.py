"""Claims about run.py: the machine a run is on, the folder it leaves, the encoder it ends with."""
import dataclasses
import errno
import io
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
import files
import maelm
import rank
import run
import train
from conftest import (HERE, QUICK, catches, fails, let_use, one_place, rank_json, run_with_wrong_version, same, sentence,
                      short_run, svd_ranks, tiny, write_hub_model, wrong_versions)


# ---- Checkpoints ----------------------------------------------------------------------------------------------------
def flipped(raw, bit):
    """These bytes with one bit flipped."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


DAMAGES = {"cut off": lambda raw: raw[:len(raw) // 2], "a flipped bit": lambda raw: flipped(raw, 72_000), "empty": lambda raw: b"",
           "text": lambda raw: b"no checkpoint"}


def copy_of(finished, folder):
    """A copy of the finished run in `folder`, and a function that tells all that is in it but its lock."""
    shutil.copytree(finished[0], folder)
    return folder, lambda: {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@catches("run.load_checkpoint", "path.replace(f\"{path}.damaged\")", "pass", damage="cut off")
@pytest.mark.parametrize("damage", DAMAGES, ids=DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_passed_over(corpus, finished, tmp_path, monkeypatch, capsys, damage):
    let_use(train, run, monkeypatch)
    out, _ = copy_of(finished, tmp_path / "run")
    newest = out / "step_0000006.pt"
    damaged = DAMAGES[damage](newest.read_bytes())
    newest.write_bytes(damaged)
    assert same(short_run(corpus, out), finished[1])
    error = capsys.readouterr().err
    assert re.search(r"step_0000006.pt: damaged.*continuing from the one before$", error.strip()) and error.count("\n") == 1
    assert "step_0000006.pt.damaged" in {path.name for path in out.iterdir()}
    assert (out / "step_0000006.pt.damaged").read_bytes() == damaged


@catches("run.load_checkpoint", "if not mend:", "if False:")
def test_who_only_reads_a_run_is_told_of_a_damaged_checkpoint_and_gets_no_older_one(finished, tmp_path, capsys):
    out, content = copy_of(finished, tmp_path / "run")
    newest = out / "step_0000006.pt"
    newest.write_bytes(DAMAGES["a flipped bit"](newest.read_bytes()))
    before = content()
    with pytest.raises(files.UserError, match="step_0000006.pt: damaged.*name an earlier checkpoint"):
        run.load_encoder(out)
    assert content() == before and run.load_encoder(out / "step_0000003.pt")


@catches("run.load_checkpoint", "if damaged:", "if False:")
def test_a_run_never_starts_again_where_no_checkpoint_is_whole(corpus, finished, tmp_path, monkeypatch, capsys):
    let_use(train, run, monkeypatch)
    out, content = copy_of(finished, tmp_path / "run")
    for path in run.checkpoints(out):
        path.write_bytes(path.read_bytes()[:-1000])
    before = content()
    for _ in range(2):  # the second time only files with other names are left
        with pytest.raises(SystemExit) as exit:
            short_run(corpus, out)
        assert exit.value.code == 2
        line, = capsys.readouterr().err.splitlines()
        assert "no whole checkpoint, but damaged ones: step_0000003.pt.damaged, step_0000006.pt.damaged" in line
    assert content() == {name + ".damaged" * name.startswith("step"): raw for name, raw in before.items()}


@catches("run.read_tensors", 'if "PytorchStreamReader" not in str(error):', "if False:", error=torch.OutOfMemoryError("CUDA out of memory"))
@catches("run.read_tensors", "except DAMAGE as error", "except (*DAMAGE, MemoryError) as error", error=MemoryError())
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: device busy"), MemoryError()],
                         ids=repr)
def test_out_of_memory_at_loading_is_no_damage_and_touches_no_file(corpus, finished, tmp_path, monkeypatch, error):
    let_use(train, run, monkeypatch)
    out, content = copy_of(finished, tmp_path / "run")
    before = content()

    def load(*arguments, **options):
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(BaseException) as raised:
        short_run(corpus, out, "--max-steps", "6")
    assert raised.value is error and content() == before


@catches("run.check_zip", "part.compress_type or part.external_attr", "part.compress_type")
@catches("run.check_zip", "if wrong:", "if False:")
def test_no_flipped_bit_of_a_checkpoint_gives_another_result(tmp_path):
    path = tmp_path / "small.pt"
    state = {"step": 3, "model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}, "optimizers": [{"seen": torch.zeros(2)}]}
    run.write_tensors(path, state)
    raw = path.read_bytes()
    # Every bit of the list of contents at the end, and some of each part.
    bits = [*range(8 * raw.index(b"PK\1\2"), 8 * len(raw), 3), *range(0, 8 * len(raw), 29)]
    folder_bits = [8 * (match.start() + 38) + 4 for match in re.finditer(b"PK\1\2", raw)]  # "this part is a folder"
    found = 0
    for bit in bits + folder_bits:
        path.write_bytes(flipped(raw, bit))
        try:
            read = run.read_tensors(path)
        except files.UserError as error:
            assert str(path) in str(error)
            found += 1
        else:
            assert str(read) == str(state), bit
    assert found > len(bits) // 10


class Malicious:
    def __reduce__(self):
        return print, ("this ran code",)


@catches("run.with_weights", "check_weights(path, make(config), state[name])", "pass", content={"model": {"x": torch.zeros(1)}, "config": {}})
@catches("run.read_tensors", "weights_only=True", "weights_only=False", content={"model": Malicious()})
@pytest.mark.parametrize("content", [
    {"model": Malicious()}, [1, 2], {}, {"model": {}, "config": {"layers": 3}}, {"model": {}, "config": {"vocab_size": -1}},
    {"model": {"x": 3}, "config": {}}, {"model": [], "config": {}}, {"model": {}, "config": 7}, {"model": {}, "config": {"vocab_size": "x"}}])
def test_a_foreign_checkpoint_gets_one_line_and_runs_no_code(corpus, finished, tmp_path, monkeypatch, capsys, content):
    let_use(train, run, monkeypatch)
    out, now = copy_of(finished, tmp_path / "run")
    path = out / "step_0000006.pt"
    torch.save(content, path)
    before = now()
    for command in (lambda: short_run(corpus, out), lambda: train.main(["--fill-mask", "a [MASK]", "--init", str(path)]),
                    lambda: train.main(["--fill-mask", "a [MASK]", "--init", str(out)])):
        assert f"train.py: {out}" in fails(command, capsys)
    assert now() == before


@catches("run.checkpoints", "step_of(path) is not None and ", "")
def test_a_users_own_copies_are_neither_loaded_nor_deleted(corpus, finished, tmp_path, monkeypatch):
    let_use(train, run, monkeypatch)
    out = tmp_path / "run"
    short_run(corpus, out, "--stop-at", "3", "--keep-checkpoints", "1")
    mine = {"step_best.pt", "step_00000003.pt", "step_3.pt", "step_0000003_copy.pt"}
    for name in mine:
        (out / name).write_bytes(b"mine")
    train.main(["--data", str(corpus[1]), "--out", str(out), *QUICK, "--keep-checkpoints", "1", "--checkpoint-interval", "1"])
    assert {path.name for path in out.glob("*.pt*")} == mine | {"step_0000006.pt"}
    assert all((out / name).read_bytes() == b"mine" for name in mine)
    assert same(torch.load(out / "step_0000006.pt", weights_only=True), finished[1])


def saved(out, step, keep, weight=0.0):
    """Save a checkpoint of a tiny model after so many steps; returns the steps that are there then."""
    model = maelm.MAELM(tiny())
    torch.nn.init.constant_(model.head.bias, weight)
    run.save_checkpoint(out, step, model, [], 1.0, {}, keep)
    return [int(path.stem[5:]) for path in run.checkpoints(out)]


@catches("run.save_checkpoint", "max(0, len(older) + 1 - keep)", "len(older) + 1 - keep")
@catches("run.save_checkpoint", "len(older) + 1 - keep", "len(older) - keep")
@catches("run.save_checkpoint", "other.name < path.name", "True")
@catches("run.save_checkpoint", "if keep > 0:", "if True:")
def test_the_oldest_checkpoints_are_removed_but_never_the_one_just_written(tmp_path):
    assert [saved(tmp_path, step, 3) for step in (1, 2, 3, 4)] == [[1], [1, 2], [1, 2, 3], [2, 3, 4]]
    assert saved(tmp_path, 5, 5) == [2, 3, 4, 5] and saved(tmp_path, 6, 0) == [2, 3, 4, 5, 6]
    assert saved(tmp_path, 1, 1) == [1, 2, 3, 4, 5, 6] and saved(tmp_path, 7, 1) == [7]


@catches("run.save_checkpoint", "if not weight.isfinite().all():", "if False:", bad=float("nan"))
@catches("run.save_checkpoint", "weight.isfinite().all()", "weight.isnan().any().logical_not()", bad=float("inf"))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, bad):
    saved(tmp_path, 1, 1)
    before = (tmp_path / "step_0000001.pt").read_bytes()
    with pytest.raises(files.UserError, match="step 2: weights are not finite, head.bias to begin with"):
        saved(tmp_path, 2, 1, bad)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("step_0000001.pt", before)]


class FullDisk(io.FileIO):
    """A file on a disk that has room for so many more bytes."""
    room = 20_000

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@catches("run.write_tensors", "if isinstance(error.__context__, OSError):", "if False:", room=20_000)
@pytest.mark.parametrize("room", [0, 20_000, 300_000])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_whole(corpus, finished, tmp_path, monkeypatch, capsys, room):
    let_use(train, run, monkeypatch)
    out = tmp_path / "run"
    short_run(corpus, out, "--stop-at", "3")
    capsys.readouterr()
    monkeypatch.setattr(FullDisk, "room", room)
    monkeypatch.setattr(run, "open", FullDisk, raising=False)
    with pytest.raises(SystemExit) as exit:
        short_run(corpus, out)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "step_0000006.pt: No space left on device; free some" in error
    monkeypatch.undo()
    assert [path.name for path in out.iterdir() if path.name.endswith((".pt", ".tmp"))] == ["step_0000003.pt"]
    assert same(short_run(corpus, out), finished[1])


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
        assert run.load_checkpoint(out)["step"] == int(saved[-1].stem[5:])
        assert run.read_log(out)


# ---- Run folders and flags ------------------------------------------------------------------------------------------
def test_another_run_is_refused_with_the_fields_that_differ(corpus, finished, capsys):
    error = fails(lambda: short_run(corpus, finished[0], "--mask-rate", "0.3", "--seed", "2"), capsys)
    assert "mask_rate=0.15 there, 0.3 here; seed=0 there, 2 here" in error


@catches("files.compare_runs", "there.get(name) != value", "name not in there")
def test_a_folder_of_other_settings_is_refused_in_the_same_words_by_every_program(corpus, finished, tmp_path, monkeypatch, capsys):
    import finetune
    for program in (data, finetune, train):
        let_use(program, files, monkeypatch)
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
    meta = files.read_json(folder / "meta.json")  # the run's own validation rows are too few: lend it the others
    whole = tmp_path / "shards"
    shutil.copytree(folder, whole)
    files.write_json(whole / "meta.json", meta | {"val": meta["train"]})
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


@catches("run.open_hub", "torch.manual_seed(0)", "pass")
def test_what_a_checkpoint_of_the_hub_lacks_is_drawn_alike_by_every_process(tmp_path):
    """RoBERTa's pooler is in no checkpoint of MLM; finetune.py tells by the weights whether a command continues."""
    write_hub_model(tmp_path)
    found = []
    for seed in (1, 2):  # as two processes have
        torch.manual_seed(seed)
        found.append(run.open_hub(f"hf:{tmp_path}").model.state_dict())
    assert any("pooler" in name for name in found[0])
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    run.open_hub(f"hf:{tmp_path}")
    assert torch.rand(1) == expected  # nothing else is seeded by it


def test_a_hub_model_without_mask_token_is_refused(words, tmp_path, capsys):
    hub_folder(tmp_path / "model", *HUB["bert"], mask=False)
    error = fails(lambda: rank.main([f"hf:{tmp_path / 'model'}", "--data", str(words), "--val-share", "1"]), capsys)
    assert "has no mask token" in error


def test_without_transformers_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(lambda: rank.main(["hf:roberta-base"]), capsys)


# ---- The machine ----------------------------------------------------------------------------------------------------
def pretend(monkeypatch, cuda=False, mps=False):
    """Let PyTorch say that there are GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@catches("run.best_device", "there[\"mps\"] and not small", "there[\"mps\"]")
@catches("run.best_device", "os.environ.get(\"LOCAL_RANK\", 0)", "0")
def test_auto_takes_the_best_device_and_leaves_a_small_model_to_the_cpu_of_an_apple_laptop(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    for cuda, mps, small, expected in ((True, False, True, "cuda:3"), (False, True, False, "mps"),
                                       (False, True, True, "cpu"), (False, False, False, "cpu")):
        pretend(monkeypatch, cuda, mps)
        assert str(run.best_device("auto", small)) == expected
    pretend(monkeypatch, mps=True)
    assert run.best_device("cpu", False).type == "cpu" and run.best_device("mps", True).type == "mps"


@catches("run.best_device", "if not there[name]:", "if False:")
def test_a_device_that_is_not_there_is_refused(monkeypatch):
    pretend(monkeypatch)
    for name in ("cuda", "mps"):
        with pytest.raises(files.UserError, match=f"--device {name}: this machine"):
            run.best_device(name, small=False)


@catches("run.Place.sum", "if self.world == 1:", "if False:")
@catches("run.Place.max", "if self.world == 1:", "if False:")
def test_a_process_alone_adds_up_without_its_device():
    """An Apple GPU has no float64; an NVIDIA GPU would be waited for."""
    alone = run.Place(0, 1, torch.device("meta"), torch.float32)  # whose tensors have no values
    assert alone.sum(1.5, torch.tensor(2.0)) == [1.5, 2.0] and alone.max(15) == 15


@catches("run.has_bf16", "including_emulation=False", "")
def test_bf16_that_a_gpu_only_emulates_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not run.has_bf16(torch.device("cuda"))


@catches("run.choose_place", "torch.backends.cuda.enable_cudnn_sdp(False)", "pass")
def test_cudnns_attention_is_turned_off(monkeypatch):
    """It may read a mask as another dtype, and has returned NaN gradients for padded lengths."""
    pretend(monkeypatch, cuda=True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert run.choose_place("fp32").device.type == "cuda"
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_float32_matmul_precision(before)


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
