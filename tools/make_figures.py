"""Write the tables of measurements into the pages: ``python tools/make_figures.py``.

A table stands between two comments, ``<!-- figures NAME ... -->`` and ``<!-- end of figures -->``.
Its numbers are those of ``research/*/figures/*.json``, which scripts write with ``--keep``.
"""

import json
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FILES: Final = {path.stem: path for path in sorted(ROOT.glob("research/*/figures/*.json"))}
PAGES: Final = (
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("research/*/README.md")),
)

_BLOCK: Final = re.compile(
    r"<!-- figures ([a-z-]+): written by tools/make_figures\.py -->\n.*?<!-- end of figures -->\n",
    flags=re.DOTALL,
)

METHODS: Final = {
    "alone": "local baseline", "fedsim": "FedSim", "top1sim": "top1sim", "fet": "FeT",
    "fedhssl": "FedHSSL", "fedlocalssl": "FedHSSL, local pretraining alone",
    "auto": "`auto`",
}  # fmt: skip
WITHOUT_NOISE: Final = {
    "beside-alone-digits": "digits, 5 parties",
    "beside-alone-fate_breast": "fate_breast, 2 parties",
    "beside-alone-fate_vehicle": "fate_vehicle, 2 parties",
}
"""Tables that joint models without noise were compared on, by file."""

BEHIND_NOISE: Final = {
    "digits-fet": "FeT, class-mean encoders, its own top",
    "digits-avgsim": "AvgSim (FedSim without gates), random encoders",
    "digits-fedsplitnn": "FedSplitNN (FedHSSL without pretraining), random encoders",
}
"""Frozen families that an epsilon covers, by file."""

FRONTIER: Final = {
    "frontier-earnings": "earnings above 15,000 (Treatment), AUC",
    "frontier-visits": "more than 4 visits (OFP), AUC",
    "frontier-computers": "computers' prices, RMSE",
    "frontier-diamonds": "diamonds' prices, RMSE",
    "frontier-mfeat6": "mfeat, 6 parties, accuracy",
    "frontier-mfeat3": "mfeat, 3 parties, accuracy",
    "frontier-mnist10": "MNIST, 10 parties, accuracy",
    "frontier-mnist28": "MNIST, 28 parties, accuracy",
}
"""Tables of accuracy against epsilon, by file."""

FRONTIER_IN_FULL: Final = {
    "frontier-digits": "digits, 5 parties, accuracy",
    **FRONTIER,
    "frontier-denials": "denied mortgages (Hdma), AUC",
    "frontier-medicines": "any medicine bought (VietNamI), AUC",
    "frontier-doctors": "any doctor's visit (DoctorAUS), AUC",
    "frontier-spending": "log spending (VietNamH), RMSE",
    "frontier-hours": "wives' hours (Workinghours), RMSE",
}

FRONTIER_OF_NOTHING: Final = {
    "frontier-fate_breast": "fate_breast, AUC",
    "frontier-fate_vehicle": "fate_vehicle, accuracy",
    "frontier-letter": "letter, 8,000 rows, accuracy",
    "frontier-diabetes": "diabetes, RMSE",
    "frontier-house_kc": "house_kc, 4,000 rows, RMSE",
    "frontier-hdb": "hdb, 6,000 rows, RMSE",
}
"""Tables where no gain is clear at any epsilon, by file."""

ALL_EPSILONS: Final = ("16", "8", "4", "2", "1")

WATERFALL: Final = {
    "pooled": "pooled trees",
    "linked": "on links",
    "direction": "one direction",
    "length": "full length",
    "noise": "noise at 8",
    **{f"auto {epsilon}": f"`auto` at {epsilon}" for epsilon in ("8", "4", "2", "1")},
}
"""Steps down from pooled trees to what a run gains, by what they are called."""

NULL_PARTNERS: Final = ("null-partners", "null-partners-trained-8")
"""Files of verdicts on partners that know nothing."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one file holds."""

    command: str
    date: date
    machine: str
    seeds: Sequence[int]
    figures: Any

    @property
    def ran(self) -> str:
        """When and where the command ran."""
        return f"{self.date.day} {self.date:%B %Y}, {self.machine}"

    @property
    def source(self) -> str:
        """The command, and when and where it ran."""
        return f"`{self.command}`; {self.ran}."


def measured(name: str) -> Measured:
    """Return what a file of figures holds."""
    content = json.loads(FILES[name].read_text(encoding="utf-8"))
    del content["code"]
    return Measured(**{**content, "date": date.fromisoformat(content["date"])})


def spread(values: Sequence[float], *, digits: int = 3, sign: str = "") -> str:
    """Return mean and deviation over seeds; of one seed the value."""
    mean = f"{statistics.mean(values):{sign}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def gain(values: Sequence[float], *, digits: int = 3) -> str:
    """Return a gain, bold where it exceeds two deviations; 0 where every seed has 0."""
    if not any(values):
        return "0"
    text = spread(values, digits=digits, sign="+")
    clear = len(values) > 1 and statistics.mean(values) > 2 * statistics.stdev(values)
    return f"**{text}**" if clear else text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines
    )


def demo() -> str:
    """Return the demo's accuracy by epsilon."""
    found = measured("digits-privacy")
    rows = [
        [
            epsilon,
            *(spread(of[name]) for name in ("joint", "alone")),
            *(gain(of[name]) for name in ("gain", "partners")),
            " ".join(f"{one:+.3f}" for one in of["gain"]),
        ]
        for epsilon, of in sorted(found.figures.items(), key=lambda one: float(one[0]))
    ]
    head = ["epsilon", "joint accuracy", "local baseline", "gain", "from partners", "gain by seed"]
    combine = spread(next(iter(found.figures.values()))["combine"])
    return f"{table(head, rows)}\nAll features in one place reach {combine}. {found.source}\n"


def behind_noise() -> str:
    """Return what the papers' families gain on digits, by epsilon."""
    files = {title: measured(name) for name, title in BEHIND_NOISE.items()}
    epsilons = ("8", "4", "2")
    rows = []
    for title, found in files.items():
        for name, first in (("gain", title), ("partners", "*from partners*")):
            rows.append([first, *(gain(found.figures[epsilon][name]) for epsilon in epsilons)])
    refused = ["refused"] * len(epsilons)
    rows.extend([title, *refused] for title in ("FedSim, FeatureSim", "FedHSSL"))
    return f"{table(['family, frozen', *epsilons], rows)}\n{_sources(files.values())}"


def without_noise() -> str:
    """Return what joint models gain without noise."""
    rows = []
    files = {title: measured(name) for name, title in WITHOUT_NOISE.items()}
    for title, found in files.items():
        for method, of in found.figures.items():
            digits = _digits(of)
            cells = [METHODS[method], spread(of["seeds"], digits=digits), "", ""]
            if method == "alone":
                title = f"{title} ({_unit(of)}), {len(of['seeds'])} seeds"
            else:
                cells[2:] = (
                    gain(_over_baseline(found, method), digits=digits),
                    gain(of["partners"], digits=digits),
                )
            rows.append([title if method == "alone" else "", *cells])
    head = ["table", "method", "test", "gain", "from partners"]
    return f"{table(head, rows)}\n{_sources(files.values())}"


def frontier(
    tables: Mapping[str, str] = FRONTIER, epsilons: Sequence[str] = ("8", "4", "2", "1")
) -> str:
    """Return gains against epsilon, and the partners' part of them where it is less."""
    rows = []
    files = {title: measured(name) for name, title in tables.items()}
    for title, found in files.items():
        (of,) = found.figures.values()
        base = of["none"]
        digits = 3 if statistics.mean(base["alone"]) < 100 else 1
        title = f"{title} ({spread(base['alone'], digits=digits)})"
        pooled = ""
        if "pooled" in base:
            better = -1 if "RMSE" in title else 1
            pairs = zip(base["pooled"], base["alone"], strict=True)
            pooled = gain([better * (both - alone) for both, alone in pairs], digits=digits)
        whole, partners = (
            [
                gain(of[epsilon][name], digits=digits) if epsilon in of else ""
                for epsilon in ("none", *epsilons)
            ]
            for name in ("gain", "partners")
        )
        rows.append([title, pooled, *whole])
        if partners != whole:
            rows.append(["*from partners*", "", *partners])
    head = ["table (local baseline)", "pooled trees", "no noise", *epsilons]
    return f"{table(head, rows)}\n{_sources(files.values())}"


def waterfall() -> str:
    """Return gains from pooled trees down to ``auto``, and what it keeps of clear ones at 8."""
    found, names, rows = measured("waterfall"), {**FRONTIER_IN_FULL, **FRONTIER_OF_NOTHING}, []
    for name, one in found.figures.items():
        gains = one["gains"]
        digits = 3 if statistics.mean(one["alone"]) < 100 else 1
        title = f"{names[f'frontier-{name}']} ({spread(one['alone'], digits=digits)})"
        cells = [gain(gains[step], digits=digits) for step in WATERFALL]
        whole, kept = (statistics.mean(gains[step]) for step in ("linked", "auto 8"))
        clear = whole > 2 * statistics.stdev(gains["linked"])
        rows.append([title, *cells, f"{kept / whole:.2f}" if clear else ""])
    head = ["table (local baseline)", *WATERFALL.values(), "kept at 8"]
    return f"{table(head, rows)}\n{found.source}\n"


def surviving() -> str:
    """Return what survives of one score at each epsilon, by what it is released with."""
    found = measured("surviving")
    head = ["epsilon", *(f"{epsilon:g}" for epsilon in found.figures["epsilons"])]
    rows = [[name, *cells] for name, cells in found.figures["rows"].items()]
    return f"{table(head, rows)}\n{found.source}\n"


def null_partners() -> str:
    """Return how often verdicts said that partners help."""
    files = [measured(name) for name in NULL_PARTNERS]
    lines = [one for found in files for one in found.figures]
    rows = []
    for method in dict.fromkeys(one["method"] for one in lines):
        family, _, epsilon = method.partition("@")
        some = [one for one in lines if one["method"] == method]
        counts = [
            sum(one[name] for one in some)
            for name in ("used", "improves", "without_placebo", "worse")
        ]
        rows.append(
            [
                METHODS[family] + (f" at epsilon {epsilon}" if epsilon else ""),
                ", ".join(f"{one['runs']} {one['partner']}" for one in some),
                *map(str, counts),
            ]
        )
    head = [
        "method", "runs, by what the partner has", "joint model used", '"improves"',
        "without a placebo", "worse",
    ]  # fmt: skip
    return f"{table(head, rows)}\n{_sources(files)}"


def null_tables() -> str:
    """Return how often class means answer, and claim a gain, on real tables."""
    files = {name: measured(f"null-tables-{name}") for name in ("permuted", "real")}
    rows = [
        [epsilon, name, *map(str, by_table["all"].values())]
        for name, found in files.items()
        for epsilon, by_table in found.figures.items()
    ]
    head = [
        "epsilon", "partner's rows", "runs", "joint model used", '"improves"',
        "worse by one standard error", "worse",
    ]  # fmt: skip
    return f"{table(head, rows)}\n{_sources(files.values())}"


def gains() -> str:
    """Return the few gains that the README shows."""
    digits, plain = measured("digits-privacy").figures, measured("beside-alone-digits")
    views = measured("frontier-mfeat6").figures["shares"]
    visits = measured("frontier-visits").figures["shares"]
    by_table = {
        "digits, 5 parties": digits,
        "mfeat, 6 parties": views,
        "visits, 2 parties (AUC)": visits,
    }
    rows = [
        [f"{title}, class means", epsilon, *_gains_of(found[epsilon])]
        for title, found in by_table.items()
        for epsilon in ("8", "4", "2")
    ]
    for method in ("fedsim", "fet"):
        of = {
            "alone": plain.figures["alone"]["seeds"],
            "gain": _over_baseline(plain, method),
            "partners": plain.figures[method]["partners"],
        }
        rows.append([f"digits, {METHODS[method]}", "none", *_gains_of(of)])
    head = ["table, method", "epsilon", "local baseline", "gain", "of it the partners'"]
    return table(head, rows)


def on_shares() -> str:
    """Return milliseconds a round of sums on shares."""
    found = measured("on-shares")
    lines = found.figures["rows"]
    settings = dict.fromkeys((one["parties"], one["shape"]) for one in lines)
    columns = dict.fromkeys((one["line"], one["variant"]) for one in lines)
    by_all = {(one["parties"], one["shape"], one["line"], one["variant"]): one for one in lines}
    rows = [
        [
            str(parties),
            shape,
            *(f"{by_all[parties, shape, *column]['ms']:,.0f}" for column in columns),
        ]
        for parties, shape in settings
    ]
    names = [variant if line == "loopback" else f"{variant}, {line}" for line, variant in columns]
    return f"{table(['k', 'rows x numbers', *names], rows)}\n{found.source}\n"


PEERS: Final = ROOT / "docs" / "peers.toml"


def peers() -> str:
    """What other toolkits have: a word a cell, linked to where it was read."""
    content = tomllib.loads(PEERS.read_text(encoding="utf-8"))
    names = ("securevfl", *content["peers"])
    cells = [
        [row["what"], *(f"[{row[name][0]}]({row[name][1]})" for name in names)]
        for row in content["row"]
    ]
    return table(["", *names], cells)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "behind-noise": behind_noise,
    "demo": demo,
    "frontier": frontier,
    "frontier-in-full": partial(frontier, FRONTIER_IN_FULL, ALL_EPSILONS),
    "frontier-of-nothing": partial(frontier, FRONTIER_OF_NOTHING, ALL_EPSILONS),
    "gains": gains,
    "null-partners": null_partners,
    "null-tables": null_tables,
    "on-shares": on_shares,
    "peers": peers,
    "surviving": surviving,
    "waterfall": waterfall,
    "without-noise": without_noise,
}


def written(page: str) -> str:
    """Return a page with the tables of today's figures in it."""

    def made(block: re.Match[str]) -> str:
        name = block.group(1)
        begin = f"<!-- figures {name}: written by tools/make_figures.py -->\n"
        return f"{begin}{TABLES[name]()}<!-- end of figures -->\n"

    return _BLOCK.sub(made, page)


def _gains_of(found: Mapping[str, Sequence[float]]) -> list[str]:
    return [spread(found["alone"]), gain(found["gain"]), gain(found["partners"])]


def _sources(files: Iterable[Measured]) -> str:
    """Each command, and once for all that ran alike, when and where."""
    ran: dict[str, list[str]] = {}
    for found in files:
        ran.setdefault(found.ran, []).append(f"    {found.command}\n")
    lists = (f"{on}:\n\n{''.join(dict.fromkeys(commands))}" for on, commands in ran.items())
    return "\n".join(lists)


def _over_baseline(found: Measured, method: str) -> list[float]:
    pairs = zip(found.figures[method]["seeds"], found.figures["alone"]["seeds"], strict=True)
    return [found.figures[method]["sign"] * (own - alone) for own, alone in pairs]


def _digits(of: Mapping[str, Any]) -> int:
    return 2 if of["metric"] == "rmse" else 3


def _unit(of: Mapping[str, Any]) -> str:
    return {"rmse": "RMSE", "auc": "AUC"}.get(of["metric"], of["metric"])


def main() -> None:
    """Write every page."""
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        path.write_text(written(page), encoding="utf-8")
        if tables := len(_BLOCK.findall(page)):
            sys.stdout.write(f"{path}: {tables} tables\n")


if __name__ == "__main__":
    main()
