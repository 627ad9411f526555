"""Claims about `hf:` names in all programs. The data sets are local folders, read by the datasets library."""
import json
from types import SimpleNamespace

import datasets
import pandas
import pytest
from huggingface_hub.errors import HTTPError

import finetune
import rank
import train
from support.text.documents import documents, sources
from tests.common import arguments, fails, sentence, write_corpus
from tests.test_hub import write_hub_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder hub/ whose subfolder USER/NAME replaces that data set of the Hub."""
    for function in (datasets.load_dataset, datasets.load_dataset_builder):
        def load(name, *arguments, read=function, **options):
            return read(str(tmp_path / "hub" / name), *arguments, cache_dir=str(tmp_path / "cache"), **options)
        monkeypatch.setattr(datasets, function.__name__, load)
    return tmp_path / "hub"


def test_hf_names_work_in_every_program(hub, tmp_path, monkeypatch):
    texts, glue = hub / "user/texts", hub / "nyu-mll/glue"
    for folder in (texts, glue):
        folder.mkdir(parents=True)
    write_corpus(texts / "a.txt")
    write_hub_model(tmp_path / "user/bert")
    monkeypatch.chdir(tmp_path)  # transformers looks for user/bert here first
    table = pandas.DataFrame({"sentence1": map(sentence, range(12)), "sentence2": map(sentence, range(3, 15)),
                              "label": [3.2000000476837, 0.0, 5.0] * 4, "idx": range(100, 112)})
    parts = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "validation", "test")]
    for part in parts:
        table.to_parquet(glue / part["path"])
    configs = json.dumps([{"config_name": "stsb", "data_files": parts}])
    (glue / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")

    assert len(list(documents(sources("hf:user/texts")))) == 400
    tuned = tmp_path / "tuned"
    train.main(arguments(tmp_path / "text", tmp_path / "run", "--data", "hf:user/texts"))
    rank.main(["hf:user/bert", "--data", "hf:user/texts", "--val-share", "1", "--out", str(tmp_path / "rank")])
    finetune.main(f"--init {tmp_path}/run --task stsb --seeds 1 --epochs 1 --out {tuned}".split())
    labels = [json.loads(line)["label"] for line in (tuned / "predictions.jsonl").read_text().splitlines()]
    assert labels == [3.2, 0.0, 5.0] * 4


def test_a_lost_connection_gives_a_one_line_error(monkeypatch, tmp_path, capsys):
    def load(*names, **options):
        yield {"text": "the cat"}
        raise HTTPError("Server disconnected")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *names: SimpleNamespace(config=None))
    command = arguments(tmp_path / "text", tmp_path / "run", "--data", "hf:user/texts")
    assert "Server disconnected" in fails(lambda: train.main(command), capsys)
