"""Figure 1: its curves, as a table and as a picture."""
from pathlib import Path
from typing import NamedTuple

from support.program import figure


class Curve(NamedTuple):
    """Which of an encoder's vectors are measured, and how they are shown."""
    text: str  # the name of the text that the encoder reads; rank.texts_for makes it
    masked_only: bool  # whether only the vectors at masked positions count
    panel: int
    style: str
    label: str  # in the figure
    column: str  # in the table


CURVES = {
    "with_mask": Curve("masked", False, 0, "o-", "input with [MASK]", "with"),
    "without_mask": Curve("unmasked", False, 0, "s--", "input without [MASK]", "without"),
    "mask_only": Curve("masked", True, 1, "^-", "[MASK] vectors", "[MASK]"),
    "with_random": Curve("random", False, 0, "x:", "input with random tokens", "random"),  # controls
    "token_only": Curve("one token", True, 1, "x:", "vectors at one ordinary token", "token"),
}


def table(name: str, entry: dict, tau: float) -> str:
    """An entry of rank.json as text: the ranks by layer, centering and curve."""
    import pandas  # here, because it is slow
    n = entry["n"]
    ranks = entry["uncentered"]
    columns = {(title, CURVES[curve].column): values for centering, title in
               (("uncentered", "uncentered (formula)"), ("centered", "centered (variance)"))
               for curve, values in entry[centering].items()}
    lines = [f"{name}: rank_{tau} of {n['without_mask']:,} tokens ({n['mask_only']:,} [MASK]), d = {entry['d']}, text "
             f"{entry['text']}", pandas.DataFrame(columns).rename_axis("layer").to_string()]
    if "with_random" in ranks:
        last = {curve: values[-1] for curve, values in ranks.items()}
        added, control = [last[curve] - last["without_mask"] for curve in ("with_mask", "with_random")]
        special = max(0, 1 - last["token_only"] / last["mask_only"])
        lines.append(f"last layer, uncentered: [MASK] in the text adds {added:+d}, random tokens {control:+d}; "
                     f"of the rank at [MASK], {special:.0%} is special to [MASK]")
    if not entry["trained_on_mask"]:
        lines.append("its encoder never read [MASK] in training, so it does not know this token")
    return "\n".join(lines)


def draw(entries: dict[str, dict], tau: float, path: Path):
    """Draw the uncentered ranks by layer: (a) of all tokens of a text, (b) of the vectors at [MASK] or at a control."""
    with figure(path, panels=2) as axes:
        for number, (name, entry) in enumerate(entries.items()):
            for curve, ranks in entry["uncentered"].items():
                look = CURVES[curve]
                label = f"{look.label}: {name}"
                axes[look.panel].plot(ranks, look.style, color=f"C{number}", label=label)
        for axis, title in zip(axes, ("(a) all tokens", "(b) [MASK] tokens")):
            axis.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, tau = {tau}", title=title)
            axis.set_ylim(bottom=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below all curves
