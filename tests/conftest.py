"""Fixtures of the tests: a corpus, a finished run; threads, network and figures are off."""
import os

os.environ["OMP_NUM_THREADS"] = "1"  # also of processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402
from tests.common import short_run, write_corpus  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 400 documents of the little language."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """The folder of a short run that nothing interrupted. It has a figure. Do not change it."""
    return short_run(text, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(autouse=True)
def no_figure(monkeypatch):
    """Short runs draw no figure: that takes longer than they."""
    monkeypatch.setattr(train, "draw_loss", lambda out: None)
