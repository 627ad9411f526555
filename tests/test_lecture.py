"""The notebook of the lecture runs in a Jupyter kernel, and what it computes is what rank.py computes."""
import json

import nbformat
from nbclient import NotebookClient

import rank
from support.files import read_json
from tests.common import ROOT, write_corpus

NOTEBOOK = ROOT / "course" / "lecture.ipynb"


def pictures(notebook):
    """The number of pictures that the cells of a notebook show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_lecture_draws_what_rank_measures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = pictures(notebook)
    text, setup = write_corpus(tmp_path / "text.txt", 1000), notebook.cells[1]
    setup.source += f"\nTEXT, SHARE, STEPS, OUT = {str(text)!r}, 1.0, 20, Path({str(tmp_path / 'lecture')!r})"
    notebook.cells.append(nbformat.v4.new_code_cell("import json\nprint(json.dumps(found))"))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    found = json.loads(notebook.cells[-1].outputs[0].text)
    assert pictures(notebook) == committed == 11

    out = tmp_path / "rank"
    rank.main(["models/mae-lm", "models/mlm", "--data", str(text), "--val-share", "1", "--out", str(out)])
    measured = read_json(out / "rank.json")["models"]
    assert list(found.values()) == list(measured.values())
