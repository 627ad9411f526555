"""What the tests share: a small model, a small corpus, a short run, and wrong versions of the code."""
import ast
import importlib.util
import inspect
import json
import os
import sys
import types
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

import classroom  # noqa: E402
import maelm  # noqa: E402
import rank  # noqa: E402
import run  # noqa: E402
import train  # noqa: E402

HERE = Path(__file__).resolve().parent


# ---- Whose code is tested -------------------------------------------------------------------------------------------
def pytest_addoption(parser):
    """The flag by which a student's code is tested, not ours."""
    parser.addoption("--student", metavar="FILE", help="run the tests of the tasks in FILE (or a folder) on its code")


def pytest_configure(config):
    """Let the tests of a student's tasks run on the student's code. A folder that --handout made is a student's."""
    path = config.getoption("--student") or (classroom.ANSWERS.exists() and HERE)
    there = any(isinstance(plugin, classroom.StudentTests) for plugin in config.pluginmanager.get_plugins())
    if path and not there:
        try:
            config.pluginmanager.register(classroom.StudentTests(path))
        except (classroom.UserError, OSError) as error:
            raise pytest.UsageError(str(error)) from None


def pytest_terminal_summary(terminalreporter, config):
    """Who stands in another folder may believe that its files are tested."""
    if Path.cwd() != HERE and not config.getoption("--student"):
        terminalreporter.write_line(f"tested: {HERE}, and no other files; those of a student: pytest --student=FILE")


# ---- A small model and a batch --------------------------------------------------------------------------------------
TINY = dict(vocab_size=300, seq_len=24, encoder_layers=2, encoder_dim=32, encoder_heads=4, dropout=0.0, mask_rate=0.25,
            decoder_layers=2, init_std=0.2)


def tiny(**fields):
    """A small Config with these fields."""
    return maelm.Config(**{**TINY, **fields})


def random_tokens(B=6, n=24, vocab_size=300):
    """Rows that start with [CLS], end with [SEP], and hold real tokens between."""
    tokens = torch.randint(maelm.NUM_SPECIAL, vocab_size, (B, n), generator=generator(7))
    tokens[:, 0], tokens[:, -1] = maelm.CLS, maelm.SEP
    return tokens


def generator(seed):
    """A random generator with this seed."""
    return torch.Generator().manual_seed(seed)


def model_and_batch(**fields):
    """A small model in evaluation mode, tokens (6, 24) and their corruption."""
    config = tiny(**fields)
    torch.manual_seed(0)
    model = maelm.MAELM(config).eval()
    for parameter in model.parameters():  # no parameter may hide at its neutral start
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = random_tokens()
    return model, tokens, maelm.corrupt(tokens, config, generator(1))


# ---- A small corpus, a short run ------------------------------------------------------------------------------------
SUBJECTS = "the cat", "a dog", "my friend", "Anna"
VERBS = "sees", "likes", "finds", "has"
OBJECTS = "a tree", "some bread"


def sentence(i):
    """The i-th sentence of a little language, with all its words in a few patterns."""
    parts = [words[i // step % len(words)] for words, step in ((SUBJECTS, 1), (VERBS, 4), (OBJECTS, 16))]
    return " ".join(parts) + f" {'today' if i % 3 else 'at last'}, number {i}."


def write_corpus(path, documents=400):
    """Write a text file of so many documents, each of two sentences."""
    path.write_text("\n\n".join(sentence(i) + " " + sentence(7 * i) for i in range(documents)))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small text file, and the folder that data.py prepare makes of it."""
    import data  # the right one, even while a wrong version has its place
    folder = tmp_path_factory.mktemp("corpus")
    text = write_corpus(folder / "text.txt")
    data.main(["prepare", "--data", str(text), "--out", str(folder / "shards"), "--vocab-size", "320",
               "--seq-len", "24", "--val-share", "0.1"])
    return text, folder / "shards"


MODEL = ["--vocab-size", "320", "--seq-len", "24", "--encoder-layers", "2", "--encoder-dim", "32",
         "--encoder-heads", "2"]
QUICK = [*MODEL, "--dropout", "0.1", "--precision", "fp32", "--batch-size", "8", "--micro-batch-size", "4",
         "--max-steps", "6", "--warmup-steps", "2", "--eval-interval", "3", "--eval-rows", "16", "--log-interval", "1",
         "--checkpoint-interval", "3", "--keep-checkpoints", "0"]


def last_checkpoint(out):
    """What the newest checkpoint of a run folder holds."""
    return torch.load(sorted(out.glob("step_*.pt"))[-1], weights_only=True)


def short_run(corpus, out, *flags):
    """A short run of train.py on the prepared corpus; returns its last checkpoint."""
    train.main(["--data", str(corpus[1]), "--out", str(out), *QUICK, *flags])
    return last_checkpoint(out)


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """The run folder and last checkpoint of a short run that nothing interrupted."""
    import train  # the right one, even while a wrong version has its place
    out = tmp_path_factory.mktemp("finished") / "run"
    train.main(["--data", str(corpus[1]), "--out", str(out), *QUICK])
    return out, last_checkpoint(out)


def same(a, b):
    """Whether two checkpoints hold bitwise the same weights and optimizer states."""
    pairs = zip(torch.utils._pytree.tree_leaves((a["model"], a["optimizers"])),
                torch.utils._pytree.tree_leaves((b["model"], b["optimizers"])))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def fails(command, capsys):
    """Run a command that must end with exit code 2 and one line; returns that line."""
    with pytest.raises(SystemExit) as exit:
        command()
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == "" and len(captured.err.strip().splitlines()) == 1, captured
    return captured.err


def one_place():
    """The processor, alone, in float32."""
    return run.Place(0, 1, torch.device("cpu"), torch.float32)


# ---- Models of transformers ------------------------------------------------------------------------------------------
def write_hub_model(folder, kind="roberta", layers=2, dim=32, heads=2, seq_len=24, **settings):
    """A random RoBERTa or MPNet, with a byte-level BPE of the little language in RoBERTa's order: special tokens, the
    others by no order of ours, words that no text has, <mask>."""
    import tokenizers
    import transformers
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=310, initial_alphabet=learner.pre_tokenizer.alphabet(),
                                             show_progress=False)
    learner.train_from_iterator(map(sentence, range(200)), trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    shuffled = sorted(learner.get_vocab(), key=lambda token: hash_of(token))
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *shuffled, "madeupword0000", "madeupword0001", "<mask>"]
    tokenizer = transformers.RobertaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
                                              model_max_length=seq_len)
    tokenizer.save_pretrained(folder)
    settings = dict(vocab_size=len(tokens), hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads,
                    intermediate_size=4 * dim, max_position_embeddings=seq_len + 2, layer_norm_eps=1e-5, pad_token_id=1,
                    bos_token_id=0, eos_token_id=2) | settings
    if kind == "roberta":
        model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(type_vocab_size=1, **settings))
    else:
        model = transformers.MPNetForMaskedLM(transformers.MPNetConfig(**settings))
    randomize(model, 0.2)
    model.save_pretrained(folder)
    return model.eval(), tokenizer


def hash_of(text):
    """A number that is a function of a text."""
    return zlib.crc32(text.encode())


def randomize(model, std):
    """Draw all parameters anew: none may hide at its neutral start."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


# ---- Files of the tasks of fine-tuning -------------------------------------------------------------------------------
PAIRS = ("index", "sentence1", "sentence2", "label")


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
        rows("MRPC", f"{part}.tsv", ("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
             lambda i: (i % 2, 1, 2, a(i), b(i)))
        rows("RTE", f"{part}.tsv", PAIRS, lambda i: (i, a(i), b(i), entailed(i)))
        rows("QNLI", f"{part}.tsv", ("index", "question", "sentence", "label"), lambda i: (i, a(i), b(i), entailed(i)))
        rows("QQP", f"{part}.tsv", ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
             lambda i: (i, 1, 2, a(i), b(i), i % 2))
        rows("STS-B", f"{part}.tsv", ("index", "genre", "filename", "year", "old_index", "source1", "source2",
                                    "sentence1", "sentence2", "score"),
             lambda i: (i, "g", "f", 2012, 1, "none", "none", a(i), b(i), f"{i % 6:.3f}"))
    mnli = ("index", "promptID", "sentence1", "sentence2", "label1", "gold_label")
    for file in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        rows("MNLI", file, mnli, lambda i: (i, 7, a(i), b(i), "wrong", three[i % 3]))
    with open(folder / "QQP" / "train.tsv", "a") as file:
        file.write("99\t1\t2\tcut off\n")
    for part in ("train", "dev"):
        write_squad(folder / "SQuAD" / f"{part}-v2.0.json", count)
    return folder


def write_squad(path, count=12, change=lambda qas: qas):
    """Write a SQuAD file: one answerable and one unanswerable question for each of `count` paragraphs."""
    paragraphs = []
    for i in range(count):
        context, subject = sentence(i), SUBJECTS[i % 4]
        qas = [{"id": f"q{i}", "question": "who is it?", "is_impossible": False,
                "answers": [{"text": subject, "answer_start": 0}]},
               {"id": f"n{i}", "question": "what not?", "is_impossible": True, "answers": []}]
        paragraphs.append({"context": context, "qas": change(qas)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    """A folder with small files of all tasks."""
    return write_glue(tmp_path_factory.mktemp("glue"))


# ---- Matrices of known rank -----------------------------------------------------------------------------------------
TAUS = (0.5, 0.8, 0.9, 0.95, 0.99)


def built(kind, n=2000, d=48):
    """(n, d) float32 with a known kind of spectrum, rotated, and in all but one case a mean row that is not small."""
    random = np.random.default_rng(len(kind))
    scale = {"geometric": 0.8 ** np.arange(d), "power": 1 / np.arange(1, d + 1),
             "two-step": np.where(np.arange(d) < 7, 9, 0.3), "rogue": 0.9 ** np.arange(d)}[kind]
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
    """rank.Moments of h (n, d), added in parts of these sizes."""
    moments = rank.Moments(h.shape[1])
    for part in torch.from_numpy(h).split(sizes):
        moments.add(part)
    return moments


def rank_json(out, *arguments):
    """Run rank.py; returns rank.json."""
    rank.main([*map(str, arguments), "--out", str(out)])
    return json.loads((out / "rank.json").read_text())


# ---- bench/ ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def bench():
    """The benchmarks of this repository, imported only here: the grader needs none of them."""
    sys.path.insert(0, str(HERE / "bench"))
    import cpu
    import gpu
    return types.SimpleNamespace(cpu=cpu, gpu=gpu)


# ---- Properties with drawn examples ---------------------------------------------------------------------------------
SEVERAL = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
                   phases=[Phase.generate],
                   suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])


def flipped(raw, bit):
    """The bytes with one bit, of a number as large as you like, flipped."""
    changed = bytearray(raw)
    changed[bit // 8 % len(raw)] ^= 1 << bit % 8
    return bytes(changed)


# ---- Wrong versions -------------------------------------------------------------------------------------------------
class Wrong(NamedTuple):
    """A wrong version of our code: in the function or class `place`, `mistake` stands for `source`."""
    place: str  # file.function, file.Class or file.Class.method
    source: str  # occurs once in it
    mistake: str
    arguments: dict  # of the claim, where it is parametrized


def catches(place, source, mistake, **arguments):
    """Decorator: the claim below fails for this wrong version. Its fields are those of Wrong."""
    def attach(claim):
        earlier = getattr(claim, "wrong_versions", [])  # of the decorators below this one
        claim.wrong_versions = [Wrong(place, source, mistake, arguments), *earlier]
        return claim
    return attach


def wrong_versions(names):
    """The parameters of a test file's last test: each claim among `names` with each of its wrong versions."""
    found = []
    for name, claim in names.items():
        for number, wrong in enumerate(getattr(claim, "wrong_versions", [])):
            found.append(pytest.param(claim, wrong, id=f"{name[5:45]}-{number}"))
    return found


def text_with(wrong):
    """The text of the file that a wrong version is of, with its mistake."""
    file, *path = wrong.place.split(".")
    path_of_file = next(folder / f"{file}.py" for folder in (HERE, HERE / "bench") if (folder / f"{file}.py").is_file())
    text = path_of_file.read_text(encoding="utf-8")
    node = ast.parse(text)
    for name in path:
        node = next(inner for inner in node.body if getattr(inner, "name", "") == name)
    function = ast.get_source_segment(text, node)
    assert function.count(wrong.source) == 1, f"{wrong.source!r} must occur once in {wrong.place}"
    assert text.count(function) == 1
    return text.replace(function, function.replace(wrong.source, wrong.mistake))


def put_in_place(patch, claim, file, module):
    """Let a claim, and the helpers above, see `module` where they say `file`."""
    if hasattr(claim, "hypothesis"):  # a property with drawn examples: the claim is inside
        claim = claim.hypothesis.inner_test
    for names in (claim.__globals__, globals()):
        patch.setitem(names, file, module)


def let_use(user, module, monkeypatch):
    """Let a program use the `module` that a claim sees, which may be a wrong version, for the names it imported."""
    for name, value in list(vars(user).items()):
        if getattr(value, "__module__", None) == module.__name__.removesuffix("_wrong") and hasattr(module, name):
            monkeypatch.setattr(user, name, getattr(module, name))


def run_with_wrong_version(claim, wrong, request, monkeypatch):
    """The claim must fail. It is a test itself, so pytest has seen it hold for the code as it is."""
    file = wrong.place.partition(".")[0]
    folder = request.getfixturevalue("tmp_path_factory").mktemp("wrong")
    path = folder / f"{file}_wrong.py"
    path.write_text(text_with(wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    monkeypatch.syspath_prepend(folder)  # where processes that the claim starts find it
    spec.loader.exec_module(module)
    put_in_place(monkeypatch, claim, file, module)
    given = dict(wrong.arguments)
    for name in inspect.signature(claim).parameters:
        if name not in given:
            given[name] = request.getfixturevalue(name)  # one that is made for each test sees the wrong version, too
    torch.manual_seed(0)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError,
                        pytest.fail.Exception)):  # but no NameError: a mistake, not a slip
        claim(**given)
