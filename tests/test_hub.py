"""Claims about Hugging Face: an export gives the results of our model, and all programs read models and data sets."""
import json
import re
import threading
import urllib.request
from dataclasses import asdict
from http.server import HTTPServer

import datasets
import pandas
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save

import finetune
import maelm
import rank
import train
from conftest import generator, model_and_batch, tiny
from maelm import CLS, MASK, NUM_SPECIAL, PAD, SEP
from support import export
from support.checkpoints import Pretrained, load_model, write_checkpoint
from support.classification import Classification
from support.examples import Example, Labels
from support.fill_mask import logits_at
from support.heads import ClassifierHead, SpanHead
from support.program import json_lines, read_lines
from support.text import Text, documents
from support.tokenizer import SPECIALS, Tokenizer
from tests.common import QUICK, ROOT, arguments, fails, little_documents, sentence, write_corpus
from tests.test_corpus import ODD

N, V = 160, 320  # N is larger than rel_pos_max_distance
MLM = dict(mask_in_encoder=1.0, decoder_layers=0)
TRUST = dict(trust_remote_code=True)
ODD_TEXTS = [*ODD, "\n\n\t  x  ", "The cat's 12,345", "漢字 ı ﬁ½", "\u200b\u0301e", "</a> <x>"]


def write_run(folder, uncased=False, **fields):
    """Write a run folder with random weights; returns its model."""
    model, _, _ = model_and_batch(**dict(vocab_size=V, seq_len=N, norm="pre") | fields)
    tokenizer = Tokenizer.train(little_documents(50), V, uncased)
    write_checkpoint(folder / "step_0000007.pt", {"config": asdict(model.config), "settings": {}, "step": 7,
                                                  "tokenizer": tokenizer.to_json(), "model": model.state_dict()})
    return model


def exported(folder, **fields):
    """Write a run folder and export it; returns its model and the folder of the export."""
    model = write_run(folder / "run", **fields)
    export.main([str(folder / "run"), str(folder / "hub")])
    return model, folder / "hub"


def write_hub_model(folder, seq_len=24):  # needs transformers 5, whose tokenizers take vocab and merges
    """Write a random RoBERTa whose byte-level BPE has different ids from ours; returns model and tokenizer."""
    import transformers
    learned = json.loads(Tokenizer.train(little_documents(50), V, False).model.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    shuffled = sorted(set(learned["vocab"]) - set(SPECIALS))
    names = ["<s>", "<pad>", "</s>", "<unk>", *shuffled, "madeupword0000", "<mask>"]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = transformers.RobertaTokenizer(vocab=ids, merges=merges, model_max_length=seq_len)
    tokenizer.save_pretrained(folder)
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, type_vocab_size=1,
        vocab_size=len(names), max_position_embeddings=seq_len + 2, layer_norm_eps=1e-5)).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model, tokenizer


def texts():
    """Padded texts (3, N) int64 with [MASK] at positions 5, 12, ..., and (3, N) bool, False at padding."""
    tokens = torch.randint(NUM_SPECIAL, V, (3, N), generator=generator(3))
    tokens[:, 0] = CLS
    tokens[:, 5::7] = MASK
    real = torch.arange(N) < torch.tensor([[N], [N // 2], [8]])
    return torch.where(real, tokens, PAD), real


def assert_close(found, wanted):
    """Fails unless two tensors are equal up to 1e-5 of the largest number."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# ---- Export ---------------------------------------------------------------------------------------------------------
HEADLESS = [dict(decoder="uni+cross"), dict(encoder_fill="random", mask_in_encoder=1.0)]
WITH_HEAD = [dict(dropout=0.1), dict(mask_in_encoder=0.5, aligned_positions=False), dict(mask_in_encoder=0.6),
             dict(mask_in_encoder=1.0, decoder_reset=True, decoder_dim=16),
             dict(norm="post", rel_pos_buckets=64, **MLM), dict(norm="post", rel_pos_buckets=0, **MLM)]


@pytest.mark.parametrize("fields", HEADLESS + WITH_HEAD)
@torch.no_grad()
def test_an_exported_encoder_gives_our_states(fields, hub, tmp_path):
    model, folder = exported(tmp_path, **fields)
    tokens, real = texts()
    wanted = model.encoder.hidden_states(tokens, torch.arange(N)[None], ~real)
    encoder = hub.AutoModel.from_pretrained(folder, **TRUST)
    found = encoder(tokens, real.long(), output_hidden_states=True).hidden_states
    for a, b in zip(found, wanted, strict=True):
        assert_close(a[real], b[real])
    if fields in WITH_HEAD:
        at = torch.arange(5, N, 7)[None]
        theirs = hub.AutoModelForMaskedLM.from_pretrained(folder, **TRUST)
        assert theirs.config.architectures == [type(theirs).__name__]
        found = theirs(tokens[:1]).logits[:, at[0]]
        assert_close(found, logits_at(model, tokens[:1], at))


@pytest.mark.parametrize("uncased", [False, True])
def test_an_exported_tokenizer_gives_our_ids(uncased, hub, tmp_path):
    _, folder = exported(tmp_path, uncased=uncased)
    ours = load_model(tmp_path / "run")[1]
    theirs = hub.AutoTokenizer.from_pretrained(folder, **TRUST)
    for text in [*ODD_TEXTS, *little_documents(20)]:
        assert theirs(text)["input_ids"] == [CLS, *ours.encode(text), SEP], text
    assert theirs("a", "b")["input_ids"] == [CLS, *ours.encode("a"), SEP, *ours.encode("b"), SEP]
    pair = "a dog " * N, "the cat sees " * N  # of which the longer one is cut first
    kind = Classification(ours, tiny(seq_len=N), finetune.TuneConfig(), Labels((), ("x",)))
    assert kind.encode([Example(*pair, "x")]).ids[0].tolist() == theirs(*pair, truncation=True)["input_ids"]
    assert theirs("the [MASK] sat")["input_ids"] == [CLS, *ours.encode("the"), MASK, *ours.encode(" sat"), SEP]


def test_python_of_the_page_runs(hub, tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    export.main(["run", "exported/toy"])
    model, _ = load_model(tmp_path / "run")
    head = ClassifierHead(32, 2, 0.0)
    finetune.Tuned(model.encoder, head).save(tmp_path / "encoder.pt", Pretrained("run"), task="docs", labels=["a", "b"],
                                             scale=1.0, longest=N)
    export.main(["encoder.pt", "exported/docs"])
    pandas.DataFrame({"id": range(3), "text": little_documents(3)}).to_csv("new.csv", index=False)
    main = train.main
    monkeypatch.setattr(train, "main", lambda flags: main([*QUICK, "--cache=cache", *flags]))
    (tmp_path / "my_texts").mkdir()
    write_corpus(tmp_path / "my_texts/a.txt")
    servers = []
    monkeypatch.setattr(HTTPServer, "serve_forever", lambda server: servers.append(server))
    monkeypatch.syspath_prepend(ROOT)  # as pip install -e . does
    page = (ROOT / "docs/transformers.md").read_text(encoding="utf-8").replace("8000", "0")  # any port that is free
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names := {})
    assert len(names["weights"]) == 2 and names["nats"]
    assert [*pandas.read_csv("labels.csv")] == ["id", "text", "label"]
    with servers[0] as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with urllib.request.urlopen(f"http://localhost:{server.server_port}", b"a text") as answer:
            assert json.load(answer)[0].keys() == {"label", "score"}
        thread.join()
    assert {field for line in names["log"] for field in line} <= {"step", *re.findall(r"`(\w+)`", page)}


@pytest.mark.parametrize("task, labels, units", [
    ("rte", ["so", "no", "yes"], dict(scale=1.0)), ("stsb", [], dict(scale=5.0, center=-3.0)),
    ("squad2", [], dict(scale=1.0))])
@torch.no_grad()
def test_a_fine_tuned_model_gives_the_same_logits(task, labels, units, hub, tmp_path):
    model = write_run(tmp_path / "run")
    head = SpanHead(32) if task == "squad2" else ClassifierHead(32, max(1, len(labels)), 0.0)
    tuned = finetune.Tuned(model.encoder, head).eval()
    pretrained = Pretrained(str(tmp_path / "run"))
    tuned.save(tmp_path / "run" / "encoder.pt", pretrained, task=task, labels=labels, longest=N, **units)
    export.main([str(tmp_path / "run"), str(tmp_path / "hub")])
    tokens, real = texts()
    inputs = dict(input_ids=tokens, attention_mask=real.long())
    wanted = tuned(tokens, ~real)
    if task == "squad2":
        first, last = torch.tensor([[3, 2, 1], [9, 4, 5]])
        theirs = hub.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "hub", **TRUST)
        found = theirs(**inputs, start_positions=first, end_positions=last)
        logits = torch.stack([found.start_logits, found.end_logits], dim=2)
        assert_close(found.loss, F.cross_entropy(logits, torch.stack([first, last], dim=1)))
        return assert_close(logits[real], wanted[real])
    at = torch.tensor([1, 0, 2]) if labels else torch.tensor([4.5, 1.0, 0.0])
    theirs = hub.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", **TRUST)
    found = theirs(**inputs, labels=at)
    if not labels:
        wanted = units["scale"] * wanted + units["center"]
    assert_close(found.logits, wanted)
    assert_close(found.loss, F.cross_entropy(wanted, at) if labels else F.mse_loss(wanted[:, 0], at))
    assert theirs.config.id2label == dict(enumerate(labels or ["number"]))
    tokenizer = hub.AutoTokenizer.from_pretrained(tmp_path / "hub")
    assert MASK not in tokenizer("a [MASK]")["input_ids"] and tokenizer.model_max_length == N
    score = hub.pipeline("text-classification", theirs, tokenizer=tokenizer)("a word")[0]["score"]
    logits = theirs(**tokenizer("a word", return_tensors="pt")).logits[0]
    assert_close(torch.tensor(score), logits.softmax(0).max() if labels else logits[0])


def test_an_export_that_exists_or_would_compute_something_else_is_refused(hub, tmp_path, monkeypatch, capsys):
    exported(tmp_path)
    assert "already exists" in fails(lambda: exported(tmp_path), capsys)
    logits = maelm.Head.forward
    monkeypatch.setattr(maelm.Head, "forward", lambda self, *given: 1.5 * logits(self, *given))
    assert "transformers computes other results" in fails(lambda: exported(tmp_path / "other"), capsys)


@pytest.mark.parametrize("fields", [dict(), dict(aligned_positions=False), dict(rel_pos_buckets=0)])
@pytest.mark.parametrize("task", ["MaskedLM", "SequenceClassification", "QuestionAnswering"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(task, fields, hub, tmp_path):
    _, folder = exported(tmp_path, **fields)
    auto = getattr(hub, f"AutoModelFor{task}")
    model = auto.from_pretrained(folder, **TRUST)
    text = texts()[0][1:2, :N // 2]
    wanted = model(text)[0]
    padded, mask = F.pad(text, (9, 0), value=PAD), F.pad(torch.ones_like(text), (9, 0))
    assert_close(model(padded, mask)[0][:, -wanted.shape[1]:], wanted)


@torch.no_grad()
def test_an_exported_mlm_has_a_loss_and_takes_new_tokens(hub, tmp_path):
    _, folder = exported(tmp_path)
    model = hub.AutoModelForMaskedLM.from_pretrained(folder, **TRUST)
    text, _ = texts()
    before = model(text).logits
    model.resize_token_embeddings(V + 3)
    labels = torch.where(text == MASK, 7, -100)
    found = model(text, labels=labels)
    assert_close(found.logits[:, :, :V], before)
    assert_close(found.loss, F.cross_entropy(found.logits.flatten(0, 1), labels.flatten()))
    model.save_pretrained(tmp_path / "copy")
    again = hub.AutoModelForMaskedLM.from_pretrained(tmp_path / "copy", **TRUST)
    assert_close(again(text).logits, found.logits)


# ---- Models and data sets of the Hub --------------------------------------------------------------------------------
def test_a_missing_encoder_is_not_measured(hub, tmp_path, capsys):
    model, _ = write_hub_model(tmp_path / "hub")
    renamed = {f"x.{name}": weight.clone() for name, weight in model.state_dict().items()}
    (tmp_path / "hub/model.safetensors").write_bytes(save(renamed))
    assert "whose weights are all there" in fails(lambda: rank.main([f"hf:{tmp_path}/hub", "--out=out"]), capsys)


def test_hf_names_work_in_every_program(tmp_path, monkeypatch):
    real = datasets.load_dataset

    def load(name, *arguments, **options):
        """A folder hub/USER/NAME replaces that data set of the Hub."""
        name = name if name in ("text", "json", "parquet") else str(tmp_path / "hub" / name)
        return real(name, *arguments, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    texts, glue = tmp_path / "hub/user/texts", tmp_path / "hub/nyu-mll/glue"
    for folder in (texts, glue):
        folder.mkdir(parents=True)
    (texts / "a.jsonl").write_text(json_lines({"text": text} for text in little_documents()))
    table = pandas.DataFrame({"sentence1": map(sentence, range(12)), "sentence2": map(sentence, range(3, 15)),
                              "label": [3.200000047683716, 0.0, 5.0] * 4, "idx": range(100, 112)})
    parts = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "validation", "test")]
    for part in parts:
        table.to_parquet(glue / part["path"])
    configs = json.dumps([{"config_name": name, "data_files": parts} for name in ("other", "stsb")])
    (glue / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")

    assert len(list(documents(Text(data="hf:user/texts")))) == 400
    tuned = tmp_path / "tuned"
    train.main(arguments(tmp_path / "text", tmp_path / "run", "--data", "hf:user/texts"))
    finetune.main(f"--init {tmp_path}/run --task stsb --seeds 1 --epochs 1 --out {tuned}".split())
    labels = [line["label"] for line in read_lines(tuned / "seed1/predictions.jsonl")]
    assert labels == [3.2, 0.0, 5.0] * 4
