"""Claims about the lecture's notebook, course/lecture.ipynb."""
import json

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import rank
from course import lecture
from maelm import Attention
from support.program import read_json
from tests.common import ROOT, write_corpus

NOTEBOOK = ROOT / "course" / "lecture.ipynb"


def pictures(notebook):
    """The number of pictures that the cells of a notebook show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_lecture_draws_what_rank_measures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = pictures(notebook)
    text = write_corpus(tmp_path / "text.txt", 1000)
    cells = {cell.id: cell for cell in notebook.cells}
    cells["settings"].source += f"\nTEXT, SHARE, STEPS = {str(text)!r}, 1.0, 20"
    cells["flops"].source = cells["flops"].source.replace("0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9", "0.5")  # faster
    notebook.cells.append(nbformat.v4.new_code_cell("import json\nprint(json.dumps(found))"))
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    found = json.loads(notebook.cells[-1].outputs[0].text)
    assert pictures(notebook) == committed == 19

    models = [str(ROOT / "models" / name) for name in ("mae-lm", "mlm")]
    rank.main([*models, "--data", str(text), "--val-share=1", "--out", str(tmp_path / "rank")])
    measured = read_json(tmp_path / "rank" / "rank.json")["models"]
    assert list(found.values()) == list(measured.values())


def test_measures_of_the_lecture_are_their_formulas():
    torch.manual_seed(0)
    layer, x = Attention(8, 1, 0.0).double(), torch.randn(1, 20, 8, dtype=torch.float64)
    for part in (layer.query, layer.key_value, layer.output):
        torch.nn.init.zeros_(part.bias)
    qk, vo = lecture.single_head(layer)
    torch.testing.assert_close((x @ qk @ x.mT).softmax(-1) @ x @ vo, layer(x))
    text, rows = x[0], torch.randn(30, 8, dtype=torch.float64)
    _, _, directions = torch.linalg.svd(text)
    outside = rows - rows @ directions[:3].T @ directions[:3]
    share = (outside.norm() / rows.norm()) ** 2
    assert lecture.share_outside(rows.T @ rows, text.T @ text, 3) == pytest.approx(share.item())
    assert lecture.residual(text + 1) == pytest.approx(((text - text.mean(0)).norm() / (text + 1).norm()).item())
