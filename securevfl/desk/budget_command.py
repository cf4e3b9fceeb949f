"""``securevfl budget``: epsilon from noise, noise from epsilon, steps from both.

Imports neither torch nor CrypTen, and the accountants, with all of scipy, only to answer.
"""

import json
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.core.command_line import AsJson
from securevfl.core.errors import ConfigError

if TYPE_CHECKING:
    from securevfl.desk.accountants import AccountantFigure
    from securevfl.dp.budget import Budget

app = typer.Typer()


@app.command(
    help="Compute epsilon from noise, noise from epsilon, or steps; with the sentence to sign.",
    rich_help_panel="Check and audit",
)
def budget(
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
    as_json: AsJson = False,
) -> None:
    """Answer for a plan: give --noise-multiplier, or --epsilon, or both (for the steps)."""
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
        as_json=as_json,
    )


def _answer(
    asked: "Budget",
    *,
    noise_multiplier: float,
    rows: "list[AccountantFigure]",
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
