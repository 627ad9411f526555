"""Command lines: flags from dataclasses, paths, and checks of values."""
import argparse
import inspect
import os
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from support.program.errors import UserError, give_up, is_first


# ---- 1. Flags -----------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Reports an invalid command line in one line, with exit code 2. Until parse_args is called, -h is ignored."""
    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        give_up(self.prog, message, silent=not is_first())

    def parse_args(self, argv=None) -> argparse.Namespace:
        # Added last, because the help for some flags depends on a value that parse_known_args finds first.
        self.add_argument("-h", "--help", action="help", help="show this help")
        flags, unknown = self.parse_known_args(argv)
        for action in self._actions:
            empty = getattr(flags, action.dest, None) == "" and action.default != ""  # --init "$RUN" without a RUN
            if action.option_strings and empty:
                self.error(f"{action.option_strings[0]}: the value is empty")
        if unknown:
            valid = sorted(flag for flag in self._option_string_actions if not flag.startswith("--no-"))
            self.error(f"unknown flag {unknown[0]}; the flags are {' '.join(valid)}")
        return flags


def path_of(text: str) -> Path:
    """A path on the command line; ~ is the home folder, as in a shell."""
    return Path(os.path.expanduser(text))


def short_name(model: str) -> str:
    """The name of a model in the name of a folder: toy for out/toy, toy-step_0001900 for its checkpoint, random-toy."""
    prefix = "random-" if model.startswith("random:") else ""
    path = path_of(model.removeprefix("random:").removeprefix("hf:")).resolve()
    return prefix + (f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name)


def add_flags(parser: argparse.ArgumentParser, part: type, values: dict):
    """Add a flag for every field of a dataclass. Its help joins the field's comment and its value in `values`."""
    comments = {}
    with suppress(OSError):  # under a profiler, which hides the source, -h lacks the comments
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(part), re.MULTILINE))
    group = parser.add_argument_group(part.__name__)
    for field in fields(part):
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.default)
        shown = "" if value == "" else f" [{value}]"
        text = f"{comments.get(field.name, '')}{shown}".replace("%", "%%")  # argparse formats with %
        if field.type is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given is absent from the result, so that the value of the preset applies.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text.strip(), **how)


# ---- 2. Values ----------------------------------------------------------------------------------------------
def fields_of(part: type, values: dict) -> dict:
    """The entries of `values` (given flags, for example) whose names are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(part) if field.name in values}


def require(settings, *checks: tuple[str, bool, str]):
    """Raises UserError for the first check (field, whether its value is allowed, advice) that fails."""
    for field, holds, advice in checks:
        if not holds:
            raise UserError(f"{field}={getattr(settings, field)!r}: use {advice}")
