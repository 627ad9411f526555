"""Fixtures of the tests: a corpus and a finished run; short runs draw no figures."""
import matplotlib.figure
import pytest

from support import run
from tests.common import short_run, write_corpus


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 400 documents of the little language."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """The folder of a short, uninterrupted run. It has a figure. Tests must not change it."""
    return short_run(text, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, tmp_path, monkeypatch):
    """Each test has its own folder and a new home, and draws no figures of short runs, which would take longer."""
    for variable in ("HOME", "USERPROFILE"):  # on Windows, the second one
        monkeypatch.setenv(variable, str(tmp_path_factory.getbasetemp()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "draw_loss", lambda out: None)


@pytest.fixture
def figures(monkeypatch):
    """A list that receives the figures that programs draw, in place of files."""
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path, **options: (
        drawn.append(figure), path.touch()))
    return drawn


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The transformers module, with a temporary folder as its cache of model code: one per process."""
    import transformers
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        yield transformers
