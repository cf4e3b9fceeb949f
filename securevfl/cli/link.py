"""What the command ``link`` does: linkage alone, and how good it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from securevfl.cli.run import run_folder_for
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.memory import keep_freed_memory
from securevfl.lab.entry_points import link
from securevfl.runtime.shown_progress import RunProgress


def run_link(
    path: Path, *, out: Path | None, data_root: Path | None, estimate: bool, as_json: bool
) -> None:
    """Link a federation's tables in this process and print how good the links are."""
    keep_freed_memory()
    config = read_federation(path, only_linkage=True)
    folder = run_folder_for(config, out)
    with RunProgress(metric="recall") as progress:
        study = link(
            config,
            out=folder,
            data_root=data_root or path.parent,
            estimate=estimate,
            observe=progress,
        )
    # Loaded here: plots take most of a second to load.
    from securevfl.report.plots import similarities_plot

    files.write_text(folder / "similarities.svg", similarities_plot(study.curves), for_others=True)
    if as_json:
        print(json.dumps(study.figures))
    else:
        _print(Console(), study.figures, folder)


def _print(console: Console, figures: Mapping[str, Any], folder: Path) -> None:
    for name, found in figures["secondaries"].items():
        title = f"{name}: {found['rows']} rows, {found['records']} records, K = "
        table = Table(title=f"{title}{found['links_per_row']}", title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for label, value in _rows(found, figures["max_distance"]):
            table.add_row(escape(label), escape(value))
        console.print(table)
    console.print(
        f"rows that keep a link at every secondary: {figures['rows_linked_everywhere']} of "
        f"{figures['rows']}",
        highlight=False,
    )
    for role, sentences in figures["reveals"].items():
        console.print(f"a {role} learns: {'; '.join(sentences)}", highlight=False)
    if figures["peak_memory_bytes"] is not None:
        megabytes = figures["peak_memory_bytes"] / 1e6
        console.print(f"peak memory: {megabytes:,.0f} MB", highlight=False)
    console.print(f"lists and plot: {folder}", soft_wrap=True)


def _rows(found: Mapping[str, Any], limit: float | None) -> list[tuple[str, str]]:
    unit, linked = found["distance_unit"], found["rows"] - found["rows_without_links"]
    rows = [
        ("rows that keep a link", f"{linked} of {found['rows']}{_within(limit, unit)}"),
        ("recall@1", _share(found["recall_at_1"])),
        ("recall@K", _share(found["recall_at_k"])),
        ("pairs completeness", _share(found["pairs_completeness"])),
        ("reduction ratio", _share(found["reduction_ratio"])),
        (f"distance of the first link ({unit})", _spread(found["first_distance_quantiles"])),
        (f"distance of the last link ({unit})", _spread(found["last_distance_quantiles"])),
        ("rows with ties", str(found["tied_rows"])),
        ("rows with fewer than K links", str(found["rows_short"])),
        ("rows without a link", str(found["rows_without_links"])),
        ("records linked at all", str(found["records_used"])),
        ("rows of the ten most used records", ", ".join(map(str, found["most_used"]))),
        ("seconds", f"{found['seconds']:.2f}{' (kept from before)' if found['cached'] else ''}"),
    ]
    if found["similarities"] is not None:
        similar = found["similarities"]
        rows.append(("similarities: sigma_0", f"{similar['sigma_0']:.6g} {unit}"))
        rows.append(("similarities: sigma", f"{similar['sigma']:.4g}"))
        tau = similar["tau"]
        rows.append(("similarities: tau", similar["tau_note"] if tau is None else f"{tau:.4e}"))
        if similar["epsilon_at_least"] is not None:
            epsilon = f"at least {similar['epsilon_at_least']:.3g}: no promise"
            rows.append(("similarities: epsilon, as DP", epsilon))
    if "blocking" in found:
        lost = found["blocking"]
        measured = f"of all pairs, on {lost['rows_measured']} rows"
        rows += [
            (f"blocking: recall@1 {measured}", f"{lost['recall_at_1']:.4f}"),
            (f"blocking: recall@K {measured}", f"{lost['recall_at_k']:.4f}"),
            ("blocking: candidates a row", f"{lost['candidates_per_row']:,.4g}"),
            ("blocking: pairs that were spared", f"{lost['reduction_ratio']:.4f}"),
        ]
        for rule, pairs in lost.get("pairs_by_rule", {}).items():
            rows.append((f"blocking: pairs of {rule}", f"{pairs:,}"))
    if found.get("codes_compared_by") == "numpy":
        rows.append(("codes are compared by", "numpy; securevfl[faiss] is three times as fast"))
    if "comparing" in found:
        cost = found["comparing"]
        share = f"{cost['pairs']:,} ({100 * cost['share_of_pairs']:.3g} % of all)"
        rows.append(("pairs that parties compare", share))
        if cost["ciphertexts"]:
            rows.append(("ciphertexts that a secondary answers", f"{cost['ciphertexts']:,}"))
    for method, value in found.get("delta", {}).items():
        rows.append((f"Delta over {method}", f"{value:.4g}"))
    return rows


def _within(limit: float | None, unit: str) -> str:
    return "" if limit is None else f", at most {limit:g} apart ({unit})"


def _share(value: float | None) -> str:
    return "unknown: no linkage.truth" if value is None else f"{value:.4f}"


def _spread(quantiles: Mapping[str, float]) -> str:
    if not quantiles:
        return "no links"
    shown = ("0", "0.5", "0.95", "1")
    return ", ".join(f"{100 * float(level):g} %: {quantiles[level]:.4g}" for level in shown)
