"""Records of data files (.txt, .csv, .jsonl, .parquet) and of data sets on the Hub."""
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.cli import UserError, root_cause


def read_records(loader: str, files: Iterable[str], name: str, **options) -> Iterator[dict]:
    """The records that `datasets` reads from files, or of the Hub's `name` without files. UserError if it cannot."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    datasets.disable_progress_bars()
    options = {"split": "train", "streaming": True} | options
    path, _, config = name.removeprefix("hf:").partition(":")
    if loader == "hub" and Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
    try:
        if loader == "hub":
            if hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by"):
                options["sample_by"] = "paragraph"  # text files, as those on this machine
            yield from datasets.load_dataset(path, config or None, **options)
        else:
            yield from datasets.load_dataset(loader, data_files=list(files), **options)
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, HTTPError,
            datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error
