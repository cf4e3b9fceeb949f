"""``securevfl lab``: experiments, which no party of a run takes part in."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from securevfl.core.command_line import (
    AsJson,
    DataRoot,
    Device,
    FederationFile,
    FileDataRoot,
    Out,
    RunFederation,
)
from securevfl.core.errors import PrivacyError
from securevfl.core.memory import keep_freed_memory, loading
from securevfl.desk.printing import print_figures, say
from securevfl.lab.study_commands import app as studies_app

if TYPE_CHECKING:
    from securevfl.lab.attacks.run_audit import RunAudit
    from securevfl.lab.audit.audit_report import AuditReport

app = typer.Typer(
    no_args_is_help=True,
    help="Compare methods and settings, audit and measure, in the simulator.",
)
app.add_typer(studies_app)

demo_app = typer.Typer()
link_app = typer.Typer()


@demo_app.command(rich_help_panel="Start")
def demo(
    out: Out = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, of models and of shuffling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train on handwritten digits with five parties, one process each."""
    with loading():
        from securevfl.config.reading import parse_federation
        from securevfl.core import files
        from securevfl.desk.command_results import print_results, train_and_report
        from securevfl.lab import datasets
        from securevfl.runtime.run_folder import run_folder_for

    config = parse_federation(datasets.demo_federation(seed=seed), file="demo")
    folder = run_folder_for(config, out)
    files.require_writable_folder(folder)
    datasets.write_tables(datasets.digits_tables(seed=seed), folder / "tables")
    metrics = train_and_report(config, folder, simulated=False, data_root=folder)
    print_results(metrics, folder, as_json=as_json)


@link_app.command(rich_help_panel="Check and audit")
def link(
    federation: FederationFile,
    out: Out = None,
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Link the tables of a federation on this machine, and measure the links."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.core import files
        from securevfl.core.shown_progress import RunProgress
        from securevfl.lab.links_alone import link as link_tables
        from securevfl.lab.study_outputs import similarities_plot
        from securevfl.runtime.run_folder import run_folder_for

    keep_freed_memory()
    config = read_federation(federation, only_linkage=True)
    folder = run_folder_for(config, out, reads=[federation])
    with RunProgress(metric="recall") as progress:
        root = data_root or federation.parent
        study = link_tables(config, out=folder, data_root=root, observe=progress)
    files.write_text(folder / "similarities.svg", similarities_plot(study.curves), for_others=True)
    if as_json:
        print(json.dumps(study.figures))
    else:
        _print_links(Console(), study.figures, folder)


def _print_links(console: Console, figures: Mapping[str, Any], folder: Path) -> None:
    for name, link_figures in figures["secondaries"].items():
        title = f"{name}: {link_figures['rows']:,} rows, {link_figures['records']:,} records, K = "
        rows = [["figure", "value"], *map(list, _link_rows(link_figures, figures["max_distance"]))]
        print_figures(console, rows, title=f"{title}{link_figures['links_per_row']}")
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


def _link_rows(figures: Mapping[str, Any], limit: float | None) -> list[tuple[str, str]]:
    unit, linked = figures["distance_unit"], figures["rows"] - figures["rows_without_links"]
    rows = [
        ("rows that keep a link", f"{linked} of {figures['rows']}{_within(limit, unit)}"),
        ("recall@1", _share(figures["recall_at_1"])),
        ("recall@K", _share(figures["recall_at_k"])),
        ("pairs completeness", _share(figures["pairs_completeness"])),
        ("reduction ratio", _share(figures["reduction_ratio"])),
        (
            f"distance of the first link ({unit})",
            _format_quantiles(figures["first_distance_quantiles"]),
        ),
        (
            f"distance of the last link ({unit})",
            _format_quantiles(figures["last_distance_quantiles"]),
        ),
        ("rows with ties", str(figures["tied_rows"])),
        ("rows with fewer than K links", str(figures["rows_short"])),
        ("rows without a link", str(figures["rows_without_links"])),
        ("records linked at all", str(figures["records_used"])),
        ("rows of the ten most used records", ", ".join(map(str, figures["most_used"]))),
        (
            "seconds",
            f"{figures['seconds']:.2f}{' (kept from before)' if figures['cached'] else ''}",
        ),
    ]
    if figures["similarities"] is not None:
        similar = figures["similarities"]
        rows.append(("similarities: sigma_0", f"{similar['sigma_0']:.6g} {unit}"))
        rows.append(("similarities: sigma", f"{similar['sigma']:.4g}"))
        tau = similar["tau"]
        rows.append(("similarities: tau", similar["tau_note"] if tau is None else f"{tau:.4e}"))
        if similar["epsilon_at_least"] is not None:
            epsilon = f"at least {similar['epsilon_at_least']:.3g}: no promise"
            rows.append(("similarities: epsilon, as DP", epsilon))
    if "blocking" in figures:
        lost = figures["blocking"]
        measured = f"of all pairs, on {lost['rows_measured']} rows"
        rows += [
            (f"blocking: recall@1 {measured}", f"{lost['recall_at_1']:.4f}"),
            (f"blocking: recall@K {measured}", f"{lost['recall_at_k']:.4f}"),
            ("blocking: candidates a row", f"{lost['candidates_per_row']:,.4g}"),
            ("blocking: pairs that were spared", f"{lost['reduction_ratio']:.4f}"),
        ]
        for rule, pairs in lost.get("pairs_by_rule", {}).items():
            rows.append((f"blocking: pairs of {rule}", f"{pairs:,}"))
    if figures.get("codes_compared_by") == "numpy":
        rows.append(("codes are compared by", "numpy; securevfl[faiss] is three times as fast"))
    if "comparing" in figures:
        cost = figures["comparing"]
        share = f"{cost['pairs']:,} ({100 * cost['share_of_pairs']:.3g} % of all)"
        rows.append(("pairs that parties compare", share))
        if cost["ciphertexts"]:
            rows.append(("ciphertexts that a secondary answers", f"{cost['ciphertexts']:,}"))
    return rows


def _within(limit: float | None, unit: str) -> str:
    return "" if limit is None else f", at most {limit:g} apart ({unit})"


def _share(value: float | None) -> str:
    return "unknown: no linkage.truth" if value is None else f"{value:.4f}"


def _format_quantiles(quantiles: Mapping[str, float]) -> str:
    if not quantiles:
        return "no links"
    shown = ("0", "0.5", "0.95", "1")
    return ", ".join(f"{100 * float(level):g} %: {quantiles[level]:.4g}" for level in shown)


@app.command()
def contribution(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    permutations: Annotated[
        int,
        typer.Option("--permutations", help="Orders that Shapley values of many partners take."),
    ] = 32,
    federation: RunFederation = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what each partner contributes to a run; sends nothing and costs nothing."""
    with loading():
        from securevfl.core.shown_progress import RunProgress
        from securevfl.desk.report.page import write_report
        from securevfl.lab.contribution import contribution as measure
        from securevfl.runtime.run_folder import CONTRIBUTION, read_figures

    metric = read_figures(run)["metric"]
    with RunProgress(metric=metric) as progress:
        measured = measure(
            run,
            permutations=permutations,
            federation=federation,
            data_root=data_root,
            device=device,
            observe=progress,
        ).as_json()
    write_report(run)
    if as_json:
        print(json.dumps(measured))
        return
    _print_contribution(measured)
    print(run / CONTRIBUTION)


def _print_contribution(measured: dict[str, Any]) -> None:
    from securevfl.desk.report.overview import readings, sampled_in_words

    better = "higher" if measured["higher_is_better"] else "lower"
    for reading in readings(measured):
        print(f"securevfl: {reading.title}; {reading.summary}", file=sys.stderr)
        rows = ([name, *cells] for name, cells in reading.rows.items())
        print_figures(Console(), [["secondary", *reading.columns], *rows])
    print(
        f"securevfl: positive is better, also of {measured['metric']} ({better} is better); "
        f"{measured['level']:.0%} intervals over {measured['rows']} test rows",
        file=sys.stderr,
    )
    for text in (*measured["notes"], *sampled_in_words(measured)):
        print(f"securevfl: {text}", file=sys.stderr)
    print(f"securevfl: this cost {measured['cost']}", file=sys.stderr)


@app.command()
def audit(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Folder of a run that was recorded with --record-views: attack what its parties "
            "received. Without it, the installed mechanism is tested.",
        ),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attacks",
            metavar="NAME,...",
            help="With RUN: which; default: all but shadow-rows and shadow-records, which train "
            "the federation again and again on the parties' tables.",
        ),
    ] = None,
    shadows: Annotated[
        int, typer.Option(help="With RUN: trainings of each of these two, at least 8.")
    ] = 16,
    seeds: Annotated[
        int, typer.Option(help="With RUN: how often what an attack draws at random is drawn.")
    ] = 3,
    beside: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="With RUN: another recorded run of the same file."),
    ] = None,
    data_root: DataRoot = None,
    secondaries: Annotated[
        int, typer.Option(help="Parties that average; the primary comes on top.")
    ] = 4,
    noise_multiplier: Annotated[
        float,
        typer.Option(
            help="Noise of the released average over the clip norm, and of class sums over what "
            "one record moves, 0.25 to 8."
        ),
    ] = 1.0,
    label_epsilon: Annotated[
        float, typer.Option(help="Epsilon of one row's label, 0.5 to 8.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Attack what the parties of RUN received, or test the noise and the clip on made-up rows.

    Without RUN real rounds run between processes. Class sums and drawn labels, to which class means
    are fitted, and symbols of their scores are tested too.

    Exit code 0 if every test passes and the run keeps its promises, 4 if not.
    """
    if run is not None:
        _audit_run(
            run,
            attacks,
            seeds=seeds,
            beside=beside,
            shadows=shadows,
            data_root=data_root or Path(),
            as_json=as_json,
        )
        return
    from securevfl.lab.audit.audit_statistics import AuditSettings

    settings = AuditSettings(
        secondaries=secondaries,
        noise_multiplier=noise_multiplier,
        label_epsilon=label_epsilon,
    )
    with loading():
        from securevfl.lab.audit import audit_report

    report = audit_report.audit(settings)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_audit(report)
    if report.verdict == "fail":
        raise typer.Exit(PrivacyError.exit_code)


def _audit_run(
    run: Path,
    attacks: str | None,
    *,
    seeds: int,
    beside: Path | None,
    shadows: int,
    data_root: Path,
    as_json: bool,
) -> None:
    with loading():
        from securevfl.lab.attacks import run_audit
        from securevfl.lab.attacks.shadow_runs import Shadows
        from securevfl.runtime.run_folder import AUDIT, federation_of_run
        from securevfl.runtime.run_tables import read_tables

    def tell(text: str) -> None:
        print(f"securevfl: attack {text}", file=sys.stderr, flush=True)

    names, trained = run_audit.attack_names(attacks), None
    if any(name in run_audit.TRAIN_ANEW for name in names):
        tables = read_tables(federation_of_run(run, None), data_root)
        trained = Shadows(tables=tables, runs=shadows, tell=tell)
    audited = run_audit.audit_run(
        run, names, seeds=seeds, beside=beside, shadows=trained, tell=tell
    )
    if as_json:
        print(json.dumps(audited.as_json()))
    else:
        _print_run_audit(audited, run / AUDIT)
    if audited.violations:
        raise typer.Exit(PrivacyError.exit_code)


def _run_audit_cells(finding: Mapping[str, Any]) -> list[str]:
    return [
        f"{finding['attacker']}, {finding['about']}",
        f"{finding['value']:.3f}{' *' if finding['beats_floor'] else ''}",
        "{:.3f} to {:.3f}".format(*finding["interval"]),
        f"{finding['floor']:.3f}",
        "" if finding["ceiling"] is None else f"{finding['ceiling']:.3f}",
    ]


def _print_run_audit(audited: "RunAudit", path: Path) -> None:
    console = Console()
    attacks: dict[str, list[dict[str, Any]]] = {}
    for finding in audited.findings:
        attacks.setdefault(
            f"{finding['attack']}: {finding['measure'].partition(';')[0]}", []
        ).append(finding)
    for title, each in attacks.items():
        rows = [["by, on", "found", "95 % interval", "trivial guess", "ceiling"]]
        rows += [_run_audit_cells(finding) for finding in each]
        print_figures(console, rows, title=title)
    say(console, "*: ", "beats the trivial guess, clearly")
    for channel in audited.channels:
        if channel["status"] == "nothing is sent":
            continue
        measured = (
            f"; measured by {', '.join(channel['measured_by'])}" if channel["measured_by"] else ""
        )
        beaten = f"; above the trivial guess: {', '.join(channel['beaten_by'])}"
        why = "" if channel["status"].startswith("not covered,") else f" ({channel['guarantee']})"
        text = f"{channel['status']}{why}{measured}{beaten if channel['beaten_by'] else ''}"
        say(console, f"{channel['channel']}: ", text)
    for name, why in audited.not_tried.items():
        say(console, f"not tried, {name}: ", why)
    for text in audited.violations:
        say(console, "PROMISE BROKEN: ", text, style="red")
    say(
        console,
        "",
        f"{audited.seconds:.0f} s; all figures: {path}; securevfl report {path.parent} shows them",
    )


_RELEASES: Final = {
    "sequence": "rows clipped whole, released again in every round",
    "pooled": "means of clipped records, each released once",
    "class_sums": "for class means: one record there or not, as a primary sees it",
    "label_sums": "for class means: one row's label exchanged, as a secondary sees it",
    "drawn_labels": "for class means: labels by randomised response",
    "symbols": "of class means' scores: one record there or not, as a primary sees it",
    "one_run": "a training behind noise: which of many records were there, all guessed at once",
}


def _print_audit(report: "AuditReport") -> None:
    """Print every test's statistic, threshold, power and verdict, and then the verdict of all."""
    from securevfl.lab.audit.audit_statistics import FALSE_FAILURE

    console = Console()
    for release, tests in report.tests.items():
        rows = [["test", "statistic", "threshold", "power", "verdict"]]
        for test in tests:
            sign = ">=" if test.passes_if == "at least" else "<="
            # Rounded down: 0.99996 must not be shown as certainty.
            power = f"{int(test.power * 1e4) / 1e4:.4f}"
            verdict = "pass" if test.verdict == "pass" else "FAIL"
            limits = f"{test.statistic:.4g}", f"{sign} {test.threshold:.4g}"
            rows.append([test.name, *limits, power, verdict])
        print_figures(console, rows, title=f"{release}: {_RELEASES[release]}")
    console.print("power: the probability that a test fails the mechanism if")
    against = {test.name: test.against for tests in report.tests.values() for test in tests}
    for name, mistake in against.items():
        console.print(f"  {name}: {mistake}", highlight=False, soft_wrap=True)
    settings = report.settings
    if report.refusal is not None:
        console.print("rounds_finished: [bold red]FAIL[/bold red]:", escape(report.refusal))
    console.print(
        f"{report.rows:,} rows of {settings.secondaries} secondaries between processes, "
        f"{report.round_seconds or 0:.1f} s of rounds, {report.seconds:.1f} s in all; a right "
        f"mechanism fails a test with probability at most {FALSE_FAILURE:g}.\n"
        f"verdict: [bold]{report.verdict}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
