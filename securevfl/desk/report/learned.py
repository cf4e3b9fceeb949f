"""Pictures of a model's use of links, each with its interpretation."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from securevfl.core import files
from securevfl.desk.report.plots import BLUE, GREY, ORANGE, SIZE, new_axes, svg
from securevfl.runtime.run_folder import EXPLANATION

_PANEL: Final = (2.7, 2.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One picture of a report."""

    svg: str
    caption: str
    """Content of the picture and its interpretation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Pictures of one party's model."""

    title: str
    notes: list[str] = field(default_factory=list)
    """Remarks on missing pictures."""
    pictures: list[Picture] = field(default_factory=list)


def section_of(folder: Path, *, title: str, without: Collection[str] = ()) -> Section:
    """Return the pictures of ``explanation.json`` in a folder.

    Args:
        folder: The run's, for the primary, or a secondary's in it.
        title: Heading of the section.
        without: Parts of the file that are not drawn.

    Raises:
        ConfigError: If the file is damaged.
    """
    explanation = files.read_json(folder / EXPLANATION)
    section = Section(title=title, notes=list(explanation.get("notes", [])))
    drawn = {
        "weight": _similarity_model,
        "merge_importance": _merge_gate,
        "mask": _masks,
        "attention": _attention,
        "alignment": _alignment,
    }
    section.pictures.extend(
        draw(explanation) for name, draw in drawn.items() if name in set(explanation) - set(without)
    )
    return section


def _similarity_model(explanation: Mapping[str, Any]) -> Picture:
    """[FedSim] appendix F.5: the weight of a similarity."""
    figure, axes = new_axes(
        "similarity model: weight of a link", "similarity (deviations from the mean)", "weight"
    )
    axes.plot(explanation["similarity"], explanation["weight"], color=BLUE)
    return Picture(
        svg=svg(figure),
        caption="How much a link counts by how near it is. Look for a curve that rises: near links "
        "count more. A level one says that nearness taught the model nothing.",
    )


def _merge_gate(explanation: Mapping[str, Any]) -> Picture:
    """[FedSim] appendix F.5, figure 10: which places of the sorted links matter."""
    figure, axes = new_axes(
        "merge gate: mean absolute integrated gradient",
        "place after sorting, most similar first",
        "output of a pair",
    )
    places = list(zip(*explanation["merge_importance"], strict=True))
    cells = axes.pcolormesh(places, cmap="Blues", vmin=0)
    outputs = range(len(places))
    axes.set_yticks([row + 0.5 for row in outputs], [str(row + 1) for row in outputs])
    figure.colorbar(cells, ax=axes).ax.tick_params(labelsize=8)
    axes.grid(visible=False)
    return Picture(
        svg=svg(figure),
        caption="How far each place of the sorted links moves the output, over the last test "
        "batch. Look for colour on the left: the model reads near links. Colour everywhere says "
        "that far ones are read too, so a larger K may help.",
    )


def _masks(explanation: Mapping[str, Any]) -> Picture:
    """[FeT] Figure 3: the mask over key space."""
    shown, dimension = explanation["mask"], explanation["key_dim"]
    values = [value for picture in shown for value in picture["mask"]]
    low, high = min(values), max(values)
    figure, panels = _panels(
        len(shown), "dynamic mask of made-up links around a row (star)", wide=dimension > 1
    )
    colours = ScalarMappable(Normalize(low, high), "coolwarm")
    for axes, picture in zip(panels, shown, strict=True):
        if dimension == 1:
            places, mask = zip(
                *sorted(zip(picture["links"], picture["mask"], strict=True)), strict=True
            )
            axes.plot([place[0] for place in places], mask, color=BLUE)
            axes.plot(picture["row"][0], low, "*", color=ORANGE, markersize=10)
            axes.set_xlabel("key (scaled)", fontsize=8)
            axes.set_ylim(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
        else:
            x, y = zip(*picture["links"], strict=True)
            axes.scatter(x, y, c=colours.to_rgba(picture["mask"]), s=14, rasterized=True)
            axes.plot(*picture["row"][:2], "*", color="black", markersize=10)
            axes.set_xlabel("first key (scaled)", fontsize=8)
    panels[0].set_ylabel("mask" if dimension == 1 else "second key (scaled)", fontsize=8)
    if dimension > 1:
        figure.colorbar(colours, ax=list(panels)).ax.tick_params(labelsize=8)
    others = (
        ""
        if dimension <= 2
        else f" Keys have {dimension} dimensions: the first two are varied, and the others stay at "
        "the row's."
    )
    return Picture(
        svg=svg(figure),
        caption="The FeT paper's Figure 3 (section 5.1, Dynamic Masking): what the learned mask "
        "adds to a link's attention scores, by where the link's key lies. Unlike the paper's, rows "
        "and links are made up, so that no record is shown: rows lie at the mean of this party's "
        "neighbourhoods and one deviation to either side, links reach as far as the median row's."
        f"{others} Look for high values around the star and low ones far from it: the model has "
        "learned to leave far records out; and for differences between the panels: the focus moves "
        "with the place. One level all over says that the mask weighs nothing.",
    )


def _attention(explanation: Mapping[str, Any]) -> Picture:
    """Attention over links: [FeT] figure 2, the decoder's or an encoder's attention."""
    shares: list[list[float]] = explanation["attention"]
    links = len(shares[0])
    ranks = range(1, links + 1)
    figure, axes = new_axes("attention by rank of the link", "rank, nearest link first", "share")
    for number, share in enumerate(shares):
        axes.plot(
            ranks,
            share,
            marker=".",
            color=BLUE,
            alpha=1 / (number + 1),
            label=f"block {number + 1}",
        )
    if "mask_by_rank" in explanation:
        axes.plot(ranks, explanation["mask_by_rank"], color=ORANGE, label="mask and ranks alone")
    axes.axhline(1 / links, color=GREY, linestyle="--", label="all alike")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    secondary = "key_dim" in explanation
    whose = (
        "What share of its links' attention to one another goes to the link of each rank, in the "
        "mean over up to 128 rows and all heads, block by block of this party's encoder"
        if secondary
        else "What share of the decoder's attention goes to each position of the average, in the "
        "mean over the last test batch and all heads. Position j averages the secondaries' "
        "representations at their j-th nearest links"
    )
    return Picture(
        svg=svg(figure),
        caption=f"{whose} (the FeT paper's Figure 2 shows where it stands in the network). Look "
        "for a line that falls: near links count, far ones are left out, and a smaller K would do. "
        "A line at the dashes says that ranks made no difference to the model, or that noise hides "
        "it.",
    )


def _alignment(explanation: Mapping[str, Any]) -> Picture:
    """[FeT] Figure 4: distances of keys and of their encodings."""
    alignment = explanation["alignment"]
    shown: Sequence[Mapping[str, Any]] = alignment["pictures"]
    # The first and the last are a party's own, between them are comparisons with others.
    shown = [*shown[:-1][:3], shown[-1]]
    figure, panels = _panels(len(shown), "distance of encodings over distance of keys", wide=True)
    for axes, picture in zip(panels, shown, strict=True):
        axes.scatter(
            alignment["key_distance"],
            picture["encoding_distance"],
            s=4,
            color=BLUE,
            alpha=0.6,
            rasterized=True,
        )
        known = picture["correlation"]
        text = "undefined" if known is None else f"{known:+.2f}"
        axes.set_title(f"{_in_lines(picture['name'])}\ncorrelation {text}", fontsize=8, loc="left")
        axes.set_xlabel("distance of two keys", fontsize=8)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("distance of their encodings", fontsize=8)
    return Picture(
        svg=svg(figure),
        caption="The FeT paper's Figure 4 (section 5.1, Positional Encoding Averaging), around the "
        "first average of the encodings (of a resumed run, the first since). Each dot is two "
        "made-up keys, the first encoded by one party, the second by the same or by another. Look "
        "for dots that rise together within a party: near keys have near encodings. Between two "
        "parties, dots in a cloud, with a correlation near 0, are encodings that do not understand "
        "one another; after the average all have the same. Encodings that start equal "
        '(positions_start = "shared") drift apart only a little before it.',
    )


def _panels(count: int, title: str, *, wide: bool) -> tuple[Figure, Any]:
    width = _PANEL[0] * count if wide else SIZE[0]
    figure = Figure(figsize=(max(SIZE[0], width), _PANEL[1]), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(1, count, sharey=False, squeeze=False)[0]
    for axes in panels:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, panels


def _in_lines(text: str) -> str:
    """Return a panel's title in short lines; a dollar would start a formula."""
    return "\n".join(textwrap.wrap(text.replace("$", r"\$"), width=34))
