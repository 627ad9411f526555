"""hf: of all programs from end to end, against tests/hub.py."""
import json
import os
import subprocess
import sys

import pandas

from support.run_folder import read_json
from tests.common import QUICK, ROOT, sentence, write_corpus
from tests.hub import serve
from tests.test_hub import write_hub_model

PROGRAM = """
import json, sys, time
import finetune, rank, train
from support import convert, corpus

out, quick = sys.argv[1], sys.argv[2:]
cache = ["--cache", f"{out}/cache"]
print(len([*corpus.documents(corpus.sources("hf:user/texts"))]))
quick += ["--vocab-size", "320"]
train.main(["--data", "hf:user/texts", "--out", f"{out}/run", "--tokenizer", "hf:user/bert", *cache, *quick])
convert.main(["import", "hf:user/bert", f"{out}/bert"])
rank.main(["hf:user/bert", "--data", "hf:user/texts", "--val-share", "1", "--out", f"{out}/rank"])
finetune.main(["--init", f"{out}/bert", "--task", "stsb", "--seeds", "1", "--epochs", "1", "--out", f"{out}/tuned"])
finetune.main(["--init", f"{out}/tuned", "--predict", "hf:"])
time.sleep = lambda seconds: None  # between attempts
for command in (lambda: train.main(["--data", "hf:user/broken", *cache, *quick]),
                lambda: finetune.main(["--init", f"{out}/bert", "--task", "rte", "--out", f"{out}/rte"]),
                lambda: convert.main(["import", "hf:user/none", f"{out}/none"])):
    try:
        command()
    except SystemExit as end:
        print("ended with", end.code)
"""


def test_hf_names_work_in_every_program_and_a_reset_connection_is_one_line(tmp_path):
    for name in ("texts", "broken"):
        (tmp_path / "hub/user" / name).mkdir(parents=True)
    write_corpus(tmp_path / "hub/user/texts/a.txt")
    write_corpus(tmp_path / "hub/user/broken/reset.txt")
    write_hub_model(tmp_path / "hub/user/bert")
    glue = tmp_path / "hub/nyu-mll/glue"
    glue.mkdir(parents=True)
    table = pandas.DataFrame({"sentence1": map(sentence, range(12)), "sentence2": map(sentence, range(3, 15)),
                              "label": [3.2000000476837, 0.0, 5.0] * 4, "idx": range(100, 112)})
    parts = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "validation", "test")]
    for part in parts:
        table.to_parquet(glue / part["path"])
    configs = json.dumps([{"config_name": "stsb", "data_files": parts}])
    (glue / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with serve(tmp_path / "hub") as (address, handler):
        handler.broken = ("reset.txt",)
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
                                    "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "out"), *QUICK], cwd=tmp_path, text=True,
                              env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("400\n") and done.stdout.count("ended with 2") == 3
    errors = [line for line in done.stderr.splitlines() if line.startswith(("train.py:", "finetune.py:", "support."))]
    assert len(errors) == 3 and "Server disconnected" in errors[0]
    assert read_json(tmp_path / "out/bert/config.json")["init"] == "hf:user/bert"
    lines = (tmp_path / "out/tuned/predict-test/STS-B.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(100, 112))]
    labels = [json.loads(line)["label"] for line in (tmp_path / "out/tuned/predictions.jsonl").read_text().splitlines()]
    assert labels == [3.2, 0.0, 5.0] * 4
