"""hf: of all programs from end to end, against a server on 127.0.0.1 that answers as the Hugging Face Hub does."""
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pandas

from support.files import read_json
from tests.common import QUICK, ROOT, sentence, write_corpus
from tests.test_hub import write_hub_model

PROGRAM = """
import json, sys, time
import finetune, rank, train
from support import convert, documents

out, quick = sys.argv[1], [*sys.argv[2:], "--vocab-size", "320"]
cache = ["--cache", f"{out}/cache"]
print(len([*documents.documents(documents.sources("hf:user/texts"))]))
train.main(["--data", "hf:user/texts", "--out", f"{out}/run", "--tokenizer", "hf:user/bert", *cache, *quick])
convert.main(["import", "hf:user/bert", f"{out}/bert"])
rank.main(["hf:user/bert", "--data", "hf:user/texts", "--val-share", "1", "--out", f"{out}/rank"])
finetune.main(["--init", f"{out}/bert", "--task", "stsb", "--seeds", "1", "--epochs", "1", "--out", f"{out}/tuned"])
finetune.main(["--init", f"{out}/tuned", "--predict", f"{out}/../hub/nyu-mll/glue/test.parquet"])
time.sleep = lambda seconds: None  # between attempts
for command in (lambda: train.main(["--data", "hf:user/broken", *cache, *quick]),
                lambda: finetune.main(["--init", f"{out}/bert", "--task", "rte", "--out", f"{out}/rte"]),
                lambda: convert.main(["import", "hf:user/none", f"{out}/none"])):
    try:
        command()
    except SystemExit as end:
        print("ended with", end.code)
"""


class Handler(BaseHTTPRequestHandler):
    """Serves root/USER/NAME as a model and as a data set. The connection is reset for files called reset.txt."""
    protocol_version = "HTTP/1.1"
    root = None

    def reply(self, code, content, **headers):
        """Send an answer."""
        self.send_response_only(code)  # without a log
        for name, value in {"X-Repo-Commit": "0" * 40, "Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        """Answer any request: for api/USER/NAME/..., or for USER/NAME/resolve/REVISION/FILE."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        parts = [part for part in parts if part not in ("datasets", "models")]
        if parts[0] == "api":
            return self.answer(parts[1:], body)
        file = self.root.joinpath(*parts[:2], *parts[4:])
        if file.name == "reset.txt" and self.command == "GET":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif file.is_file():
            self.reply(200, file.read_bytes(), ETag=f'"{file.stat().st_size}"')
        else:
            self.reply(404, b"", X_Error_Code="EntryNotFound")

    do_HEAD = do_POST = do_GET

    def answer(self, parts, body):
        """Answer a question about a repository."""
        folder = self.root.joinpath(*parts[:2])
        if len(parts) < 2 or not folder.is_dir():
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        files = [{"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size,
                  "oid": str(path.stat().st_size)} for path in sorted(folder.rglob("*")) if path.is_file()]
        found = {"id": "/".join(parts[:2]), "sha": "0" * 40}
        if "tree" in parts:
            found = files
        elif "paths-info" in parts:
            found = [file for file in files if file["path"] in body]
        self.reply(200, json.dumps(found).encode(), Content_Type="application/json")


def test_hf_names_work_in_every_program_and_a_reset_connection_is_one_line(tmp_path):
    glue = tmp_path / "hub/nyu-mll/glue"
    for folder in ("hub/user/texts", "hub/user/broken", glue):
        (tmp_path / folder).mkdir(parents=True)
    write_corpus(tmp_path / "hub/user/texts/a.txt")
    write_corpus(tmp_path / "hub/user/broken/reset.txt")
    write_hub_model(tmp_path / "hub/user/bert")
    table = pandas.DataFrame({"sentence1": map(sentence, range(12)), "sentence2": map(sentence, range(3, 15)),
                              "label": [3.2000000476837, 0.0, 5.0] * 4, "idx": range(100, 112)})
    parts = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "validation", "test")]
    for part in parts:
        table.to_parquet(glue / part["path"])
    configs = json.dumps([{"config_name": "stsb", "data_files": parts}])
    (glue / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    Handler.root = tmp_path / "hub"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0",
                                    "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "out"), *QUICK], cwd=tmp_path, text=True,
                              env=environment, capture_output=True, timeout=300)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("400\n") and done.stdout.count("ended with 2") == 3
    errors = [line for line in done.stderr.splitlines() if line.startswith(("train.py:", "finetune.py:", "support."))]
    assert len(errors) == 3 and "Server disconnected" in errors[0]
    assert read_json(tmp_path / "out/bert/config.json")["init"] == "hf:user/bert"
    lines = (tmp_path / "out/tuned/predict-test/STS-B.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(100, 112))]
    labels = [json.loads(line)["label"] for line in (tmp_path / "out/tuned/predictions.jsonl").read_text().splitlines()]
    assert labels == [3.2, 0.0, 5.0] * 4
