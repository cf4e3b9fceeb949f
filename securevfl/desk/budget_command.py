"""``securevfl budget``: epsilon from noise, noise from epsilon, steps from both.

Imports neither torch nor CrypTen, and the accountants, with all of scipy, only to answer.
"""

import json
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from securevfl.core.command_line import AsJson
from securevfl.core.errors import ConfigError

if TYPE_CHECKING:
    from securevfl.desk.accountants import AccountantFigure
    from securevfl.dp.budget import Budget

# The plot: from a fifth of the noise to ten times it, in equal ratios.
_POINTS: Final = 17
_LEAST: Final = 0.2
_MOST: Final = 10.0

app = typer.Typer(
    invoke_without_command=True,
    help="Compute epsilon from noise, noise from epsilon, or steps; with the sentence to sign.",
)


@app.callback()
def budget(
    context: typer.Context,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="z of one round: noise on the sum over the sum's sensitivity."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Target; gives the noise, or the steps if noise is given.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Rounds; each releases one average. Default 1.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Failure probability, in (0, 1).")] = 1e-5,
    sampling_rate: Annotated[
        float, typer.Option(help="q: rate of the secret Poisson sample that is linked.")
    ] = 1.0,
    unit: Annotated[
        str | None,
        typer.Option(help="secondary-record (default), linked-row or entity: what is hidden."),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="frozen (default), dp-trained or trained: the bottom models' state."),
    ] = None,
    links_per_record: Annotated[
        int | None,
        typer.Option(
            help="m: most rows of a round one record can touch. Default 1 only if neither --unit "
            "nor --encoder is given."
        ),
    ] = None,
    secondaries: Annotated[int, typer.Option(help="k: parties that add noise.")] = 1,
    colluding: Annotated[int, typer.Option(help="c: how many of them may help the primary.")] = 0,
    clip_norm: Annotated[float, typer.Option(help="C: for noise in a row's own units.")] = 1.0,
    batch_rows: Annotated[int, typer.Option(help="B: rows of a round.")] = 128,
    sampling: Annotated[
        str, typer.Option(help="per-round or per-epoch: how often a sample is drawn.")
    ] = "per-round",
    batches_per_epoch: Annotated[
        int, typer.Option(help="Rounds of an epoch, in one of which a row is.")
    ] = 1,
    gradient_noise_multiplier: Annotated[
        float | None, typer.Option(help="For dp-trained encoders; default: the same z.")
    ] = None,
    gradient_clip_norm: Annotated[
        float | None,
        typer.Option(help="C_g, for dp-trained encoders: for noise in a gradient's own units."),
    ] = None,
    accountant: Annotated[str, typer.Option(help="auto, pld or rdp.")] = "auto",
    comparison: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also RDP, naive composition, no MPC, and the papers' formula."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw epsilon against noise, as FeT's Figure 8."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer for a plan: give --noise-multiplier, or --epsilon, or both (for the steps)."""
    if context.invoked_subcommand is not None:
        return
    if noise_multiplier is None and epsilon is None:
        raise ConfigError("budget: give --noise-multiplier, --epsilon, or both; see --help")
    both = noise_multiplier is not None and epsilon is not None
    if both and steps is not None:
        raise ConfigError(
            "budget: --noise-multiplier and --epsilon together give the steps; leave --steps out"
        )
    if unit is None and encoder is None and links_per_record is None:
        links_per_record = 1
    settings: dict[str, Any] = {
        "steps": 1 if steps is None else steps,
        "delta": delta,
        "sampling_rate": sampling_rate,
        "unit": unit or "secondary-record",
        "encoder": encoder or "frozen",
        "links_per_record": links_per_record,
        "secondaries": secondaries,
        "colluding": colluding,
        "clip_norm": clip_norm,
        "batch_rows": batch_rows,
        "sampling": sampling,
        "batches_per_epoch": batches_per_epoch,
        "gradient_noise_multiplier": gradient_noise_multiplier,
        "gradient_clip_norm": gradient_clip_norm,
        "accountant": accountant,
    }
    from securevfl.desk.accountants import compare
    from securevfl.dp.budget import Budget

    asked = Budget(**settings)
    counted = asked.regime.caps_records or unit == "linked-row" or bool(links_per_record)
    asked = replace(asked, counts_links=counted)
    if noise_multiplier is None:
        assert epsilon is not None  # one of the two is given
        noise_multiplier = asked.noise_multiplier(epsilon=epsilon)
    elif epsilon is not None:
        within = asked.steps_within(epsilon=epsilon, noise_multiplier=noise_multiplier)
        asked = replace(asked, steps=within)
    _answer(
        asked,
        noise_multiplier=noise_multiplier,
        rows=compare(asked, noise_multiplier=noise_multiplier) if comparison else [],
        plot=plot,
        as_json=as_json,
    )


def _answer(
    asked: "Budget",
    *,
    noise_multiplier: float,
    rows: "list[AccountantFigure]",
    plot: Path | None,
    as_json: bool,
) -> None:
    from securevfl.dp.statement import bounded_statement

    spent = asked.epsilon(noise_multiplier=noise_multiplier)
    share = asked.noise_share_std(noise_multiplier=noise_multiplier)
    updates: dict[str, float] = {}
    if asked.regime.noises_updates:
        multiplier = asked.gradient_noise_multiplier or noise_multiplier
        updates = {
            "gradient_noise_multiplier": multiplier,
            "gradient_noise_std": asked.gradient_noise_std(multiplier),
            "gradient_clip_norm": asked.gradient_clip_norm or 1.0,
        }
    statement = bounded_statement(
        unit=asked.unit,
        encoder=asked.encoder,
        epsilon=spent,
        delta=asked.delta,
        parties=asked.secondaries,
        colluding=asked.colluding,
        links_per_record=asked.links_per_record,
    )
    if plot is not None:
        _draw(asked, path=plot, around=noise_multiplier)
    if as_json:
        plan = {name: value for name, value in asdict(asked).items() if "gradient" not in name}
        answer: dict[str, Any] = {
            "epsilon": spent,
            "noise_multiplier": noise_multiplier,
            "noise_share_std": share,
            **plan,
            **updates,
            "statement": statement.text,
            "against": statement.against,
            "hides": statement.hides,
            "odds_factor": statement.odds_factor,
            "warning": statement.warning,
        }
        if rows:
            answer["compare"] = {
                row.name: {"epsilon": row.epsilon, "guarantee": row.sound} for row in rows
            }
        if plot is not None:
            answer["plot"] = str(plot)
        print(json.dumps(answer, allow_nan=False))
        return
    print(f"epsilon           {spent:.6g}")
    print(f"delta             {asked.delta:g}")
    print(f"noise multiplier  {noise_multiplier:.6g}")
    print(f"steps             {asked.steps}")
    print(f"noise per party   {share:.6g} (on its own term, clip norm {asked.clip_norm:g})")
    if updates:
        print(
            f"noise per update  {updates['gradient_noise_std']:.6g} (on a secondary's sum of row "
            f"gradients, clip norm {updates['gradient_clip_norm']:g})"
        )
    for row in rows:
        figure = "no answer" if row.epsilon is None else f"{row.epsilon:.6g}"
        print(f"  {row.label:<50} epsilon {figure}")
    print(textwrap.fill(statement.text, 80))
    if plot is not None:
        print(f"plot              {plot}")


def _draw(budget: "Budget", *, path: Path, around: float) -> None:
    """Write an SVG file with one curve a method, the noise multiplier on the horizontal axis.

    Raises:
        ConfigError: If the file's name does not end in ``.svg``.
        StorageError: If it cannot be written.
    """
    import numpy as np
    from matplotlib.figure import Figure

    from securevfl.core.files import output_path, write_output
    from securevfl.desk.accountants import curves
    from securevfl.desk.report.plots import GREY, svg

    output_path(path, endings=[".svg"], option="--plot")
    multipliers = [float(x) for x in np.geomspace(_LEAST * around, _MOST * around, _POINTS)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (label, epsilons) in curves(budget, multipliers).items():
        points = [
            (x, y) for x, y in zip(multipliers, epsilons, strict=True) if y is not None and y > 0
        ]
        if points:
            style = "--" if name == "as-published" else "-"
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.axvline(around, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("noise multiplier of one round, z")
    axes.set_ylabel(f"epsilon at delta = {budget.delta:g}")
    axes.set_title(
        f"{budget.unit}, {budget.encoder} encoder, {budget.steps} steps, "
        f"q = {budget.sampling_rate:g}, k = {budget.secondaries}"
    )
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize="small")
    write_output(path, svg(figure))


@app.command()
def similarity(
    key_scale: Annotated[float, typer.Option("--sigma0", help="Scale of the similarities.")],
    noise_std: Annotated[
        float | None, typer.Option("--sigma", help="Noise on the normalised similarity.")
    ] = None,
    bound: Annotated[
        float | None, typer.Option("--tau", help="Wanted bound on the attacker's success.")
    ] = None,
    key_mean: Annotated[
        float | None, typer.Option("--mu0", help="mu_0, the mean negative distance; with --rows.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of the primary, for the epsilon of Theorem 1.")
    ] = None,
    records: Annotated[
        int | None, typer.Option(help="Records, for the expected number of recoveries.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """FedSim's tau: a bound on one greedy attacker's success. It is not DP."""
    from securevfl.dp.sensitivity import (
        expected_recoveries,
        reachable_floor,
        recovery_bound,
        similarity_epsilon,
        similarity_noise_std,
    )

    if noise_std is None and bound is not None:
        noise_std = similarity_noise_std(bound=bound, key_scale=key_scale)
    elif noise_std is None or bound is not None:
        raise ConfigError("budget similarity: give exactly one of --sigma and --tau")
    if (key_mean is None) != (rows is None):
        raise ConfigError("budget similarity: give both --mu0 and --rows, or neither")
    tau = recovery_bound(noise_std=noise_std, key_scale=key_scale)
    answer: dict[str, Any] = {
        "tau": tau,
        "sigma": noise_std,
        "sigma0": key_scale,
        "tau_floor": reachable_floor(key_scale=key_scale),
        "is_differential_privacy": False,
    }
    if records is not None:
        answer["records"] = records
        answer["expected_recoveries"] = expected_recoveries(
            noise_std=noise_std, key_scale=key_scale, records=records
        )
    if key_mean is not None and rows is not None:
        answer["epsilon_at_least"] = similarity_epsilon(
            noise_std=noise_std, key_scale=key_scale, key_mean=key_mean, rows=rows
        )
    if as_json:
        print(json.dumps(answer, allow_nan=False))
        return
    for name, value in answer.items():
        if name != "is_differential_privacy":
            print(f"{name:<20} {value:.6g}")
    print("This bounds one greedy attacker; it is not differential privacy.")
