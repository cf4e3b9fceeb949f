"""What an answer of `securevfl serve` costs: latency, and a minute of load with a kill in it.

``python research/serving/latency.py`` trains five parties on made-up tables, each its own process,
serves the model and asks one request after another. Beside it, in the same minute: a bare FastAPI
endpoint that reads the same body and returns a constant, and boosted trees of the primary's columns
alone behind the same endpoint. ``--load 60`` asks 50 times a second instead, kills the server in
the middle and starts it again. ``--customers 10000`` asks for so many customers who are not in the
primary's table, one by one, at epsilon 8.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import tomli_w

SECONDARIES = 4
FEATURES = 8
TOKEN = "the-token-of-a-benchmark"
PATIENCE_S = 180.0


def write_tables(folder: Path, *, rows: int, promised: bool, customers: int = 0) -> Path:
    """Write five made-up tables that link by two numeric keys, and their federation file.

    The secondaries know the primary's customers to come too, who are in ``customers.csv``.
    """
    random = np.random.default_rng(0)
    keys = random.uniform(0, 100, (rows + customers, 2))
    columns = {f"x{axis}" for axis in range(FEATURES)}
    parties: list[dict[str, Any]] = []
    for number in range(SECONDARIES + 1):
        name = f"party-{number}" if number else "primary"
        noisy = keys + random.normal(scale=0.01, size=keys.shape)
        own = {"lon": noisy[:, 0], "lat": noisy[:, 1]}
        own |= {column: random.normal(size=rows + customers) for column in sorted(columns)}
        party: dict[str, Any] = {"name": name, "role": "secondary", "data": f"{name}.csv"}
        if not number:
            own["y"] = (own["x0"] > 0).astype(int)
            party |= {"role": "primary", "label": "y", "address": "127.0.0.1:0"}
        elif promised:
            party |= {"scaling": "bounds", "bounds": [-6, 6]}
        frame = pd.DataFrame(own)
        if not number:
            frame[rows:].drop(columns="y").to_csv(folder / "customers.csv", index=False)
            frame = frame[:rows]
        frame.to_csv(folder / f"{name}.csv", index=False)
        parties.append({**party, "key": ["lon", "lat"]})
    model: dict[str, Any] = {"family": "fet", "neighbours": 4, "hidden": 16, "heads": 2}
    linkage: dict[str, Any] = {"protection": "none"}
    privacy: dict[str, Any] = {"mechanism": "none", "encoder": "trained"}
    if promised:
        model = {"family": "fet", "neighbours": 4, "release": "pooled", "top": "additive"}
        # As far as keys of one customer are apart: farther records keep their release.
        linkage |= {"choose": "records", "max_distance": 0.1}
        privacy = {"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1}
    source = {
        "federation": {"name": "served", "task": "binary", "seed": 1},
        "model": model,
        "training": {"epochs": 1, "batch_size": 128},
        "base": {"estimator": "none"},
        "privacy": privacy,
        "linkage": linkage,
        "party": parties,
    }
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose first line says where it serves; none outlives the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "SECUREVFL_TOKEN": TOKEN},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def served(run: Path, data: Path, *, port: int = 0) -> contextlib.AbstractContextManager[Any]:
    """Serve a run."""
    return program(
        *("-m", "securevfl.cli.main", "serve", str(run), "--data-root", str(data)),
        *("--port", str(port), "--json"),
    )


def url_of(process: subprocess.Popen[str]) -> str:
    """Return where a program serves, which it prints first."""
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["url"])


def wait_until_ready(url: str) -> float:
    """Wait for a server's parties; return how many seconds it took."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return time.monotonic() - began
        time.sleep(0.05)  # a poll of another process, not of this one's own state
    raise SystemExit(f"{url}: was not ready within {PATIENCE_S:g} s")


def bodies(folder: Path, *, batch: int, count: int) -> list[bytes]:
    """Return bodies of requests with rows of the primary's table, without labels."""
    frame = pd.read_csv(folder / "primary.csv").drop(columns="y")
    random = np.random.default_rng(1)
    return [
        json.dumps(
            {"rows": frame.iloc[random.integers(0, len(frame), batch)].to_dict("records")}
        ).encode()
        for _ in range(count)
    ]


def latencies(url: str, sent: list[bytes]) -> list[float]:
    """Ask one request after another; return milliseconds."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    headers["Content-Type"] = "application/json"
    took = []
    with httpx.Client(headers=headers, timeout=PATIENCE_S) as client:
        for body in sent:
            began = time.perf_counter()
            answer = client.post(url, content=body)
            took.append(1000 * (time.perf_counter() - began))
            answer.raise_for_status()
    return took


def run_baselines(folder: Path) -> None:
    """Serve a constant and boosted trees of the primary alone, until told to stop."""
    import uvicorn
    from fastapi import FastAPI
    from sklearn.ensemble import HistGradientBoostingClassifier

    from securevfl.serving.server import listening_socket

    table = pd.read_csv(folder / "primary.csv")
    columns = [name for name in table.columns if name != "y"]
    trees = HistGradientBoostingClassifier(random_state=0).fit(
        table[columns].to_numpy(), table["y"]
    )
    app = FastAPI()

    @app.post("/constant")
    async def constant(body: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
        return {"predictions": [{"prediction": 0} for _ in body["rows"]]}

    @app.post("/trees")
    async def boosted(body: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
        rows = np.array([[row[name] for name in columns] for row in body["rows"]])
        return {"predictions": [{"probability": p} for p in trees.predict_proba(rows)[:, 1]]}

    with listening_socket("127.0.0.1", 0) as listener:
        print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        config = uvicorn.Config(app, log_level="error", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


def measure(folder: Path, run: Path, *, requests: int) -> list[dict[str, Any]]:
    """Return p50 and p95 of every variant and batch, interleaved in blocks of ten requests."""
    with contextlib.ExitStack() as held:
        own = held.enter_context(served(run, folder))
        script = str(Path(__file__).resolve())
        base = url_of(held.enter_context(program(script, "--baselines", str(folder))))
        url = url_of(own)
        wait_until_ready(url)
        variants = {
            "constant": f"{base}/constant",
            "trees of the primary alone": f"{base}/trees",
            "securevfl serve": f"{url}/predict",
        }
        results = []
        for batch in (1, 128):
            took: dict[str, list[float]] = {name: [] for name in variants}
            for place in variants.values():
                latencies(place, bodies(folder, batch=batch, count=5))
            for block in range(0, requests, 10):
                sent = bodies(folder, batch=batch, count=min(10, requests - block))
                for name, place in variants.items():
                    took[name] += latencies(place, sent)
            base_p50 = float(np.median(took["constant"]))
            for name, values in took.items():
                p50, p95 = np.percentile(values, [50, 95])
                results.append(
                    {
                        "variant": name,
                        "batch": batch,
                        "p50_ms": round(float(p50), 2),
                        "p95_ms": round(float(p95), 2),
                        "p50_over_constant": round(float(p50) / base_p50, 1),
                    }
                )
        return results


@dataclass
class Load:
    """What became of the requests of a minute."""

    answers: Counter[str] = field(default_factory=Counter)
    took_ms: list[float] = field(default_factory=list)


async def load(url: str, sent: list[bytes], *, rate: float, seconds: float, into: Load) -> None:
    """Ask so many times a second, whatever has been answered."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    headers["Content-Type"] = "application/json"

    async def ask(client: httpx.AsyncClient, body: bytes) -> None:
        began = time.perf_counter()
        try:
            answer = await client.post(f"{url}/predict", content=body)
        except httpx.TransportError as error:
            into.answers[type(error).__name__] += 1
            return
        into.answers[str(answer.status_code)] += 1
        if answer.status_code == 200:
            into.took_ms.append(1000 * (time.perf_counter() - began))

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
        asked = []
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            asked.append(asyncio.create_task(ask(client, sent[number % len(sent)])))
        await asyncio.gather(*asked)


def rows_booked(folder: Path, run: Path) -> dict[str, int]:
    """Return how many rows each party's ledger has charged for predictions."""
    from securevfl.core.files import read_json
    from securevfl.ledger.book import LedgerBook
    from securevfl.ledger.chain import ChainedFile
    from securevfl.ledger.ledger_file import ledger_of_table

    simulated, booked = read_json(run / "metrics.json")["mode"] != "federated", {}
    for table in (*folder.glob("primary.csv"), *sorted(folder.glob("party-*.csv"))):
        own = run / "parties" / table.stem / "ledger.jsonl"
        file = ChainedFile(own if simulated else ledger_of_table(table), read_only=True)
        file.close()
        book = LedgerBook()
        book.read(file.entries, where=table.name)
        booked[table.stem] = sum(one.row_releases for one in book.sessions if one.model)
    return booked


def under_load(folder: Path, run: Path, *, rate: float, seconds: float) -> dict[str, Any]:
    """Serve half the time, kill the server, start it again on the same port, and serve the rest."""
    sent = bodies(folder, batch=1, count=500)
    first, second = Load(), Load()
    with served(run, folder) as server:
        url = url_of(server)
        wait_until_ready(url)
        asyncio.run(load(url, sent, rate=rate, seconds=seconds / 2, into=first))
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
    killed = time.monotonic()
    with served(run, folder, port=int(url.rsplit(":", 1)[1])) as server:
        url_of(server)
        wait_until_ready(url)
        back_s = time.monotonic() - killed
        asyncio.run(load(url, sent, rate=rate, seconds=seconds / 2, into=second))
        told = httpx.get(f"{url}/budget", headers={"Authorization": f"Bearer {TOKEN}"}).json()
        server.send_signal(signal.SIGTERM)
        stopped = time.monotonic()
        code = server.wait(PATIENCE_S)
        end_s = time.monotonic() - stopped
    parts = {}
    for name, part in (("before the kill", first), ("after it", second)):
        p50, p95 = np.percentile(part.took_ms, [50, 95]).round(1).tolist()
        parts[name] = {"answers": dict(part.answers), "p50_ms": p50, "p95_ms": p95}
    return {
        **parts,
        "seconds_from_kill_to_ready": round(back_s, 1),
        "exit_code_of_sigterm": code,
        "seconds_from_sigterm_to_end": round(end_s, 1),
        "rows_answered": first.answers["200"] + second.answers["200"],
        "rows_booked": rows_booked(folder, run),
        "budget": told["parties"][0],
    }


def one_by_one(folder: Path, run: Path) -> dict[str, Any]:
    """Ask for every customer who is not in the primary's table, and read what it cost."""
    frame = pd.read_csv(folder / "customers.csv")
    sent = [json.dumps({"row": row}).encode() for row in frame.to_dict("records")]
    shown = {"Authorization": f"Bearer {TOKEN}"}
    with served(run, folder) as server:
        url = url_of(server)
        wait_until_ready(url)
        took = latencies(f"{url}/predict", sent[:1])
        first = httpx.get(f"{url}/budget", headers=shown).json()["parties"]
        took += latencies(f"{url}/predict", sent[1:])
        last = httpx.get(f"{url}/budget", headers=shown).json()["parties"]
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
    p50, p95 = np.percentile(took, [50, 95]).round(1).tolist()
    return {
        "customers": len(sent),
        "answered": len(took),
        "p50_ms": p50,
        "p95_ms": p95,
        "p50_ms_of_the_last_hundred": round(float(np.median(took[-100:])), 1),
        "epsilon_after_the_first": {one["party"]: one["spent"] for one in first},
        "epsilon_after_the_last": {one["party"]: one["spent"] for one in last},
        "releases_per_record": last[0]["releases_per_record"],
        "rows_booked": rows_booked(folder, run),
        "records_released": records_released(run),
    }


def records_released(run: Path) -> dict[str, int]:
    """Return how many of its records each secondary has released for predictions."""
    from securevfl.ledger.chain import read_chain
    from securevfl.ledger.ledger_file import FILE

    released = {}
    for path in sorted(run.glob(f"parties/*/{FILE}")):
        lines = read_chain(path)[1]
        records = [one for line in lines if line["kind"] == "released" for one in line["records"]]
        released[path.parent.name] = len(set(records))
    return released


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000, help="of every table")
    parser.add_argument("--requests", type=int, default=100, help="of each variant and batch")
    parser.add_argument("--promise", action="store_true", help="frozen encoders at an epsilon")
    parser.add_argument("--simulated", action="store_true", help="all parties in one process")
    parser.add_argument("--customers", type=int, help="ask for so many instead, at epsilon 8")
    parser.add_argument("--load", type=float, metavar="SECONDS", help="ask for so long instead")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, with --load")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--baselines", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.baselines is not None:
        run_baselines(asked.baselines)
        return
    with tempfile.TemporaryDirectory() as made:
        folder, run = Path(made), Path(made) / "run"
        path = write_tables(
            folder,
            rows=asked.rows,
            promised=asked.promise or asked.customers is not None,
            customers=asked.customers or 0,
        )
        how = "simulate" if asked.simulated else "train"
        command = ("-m", "securevfl.cli.main", how, str(path), "--out", str(run))
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        if asked.load is not None:
            result: Any = under_load(folder, run, rate=asked.rate, seconds=asked.load)
        elif asked.customers is not None:
            result = one_by_one(folder, run)
        else:
            result = measure(folder, run, requests=asked.requests)
    if asked.json or isinstance(result, dict):
        print(json.dumps(result, indent=None if asked.json else 2))
        return
    print(f"load of this machine before and after: {os.getloadavg()}")
    for row in result:
        print(
            f"| {row['variant']} | {row['batch']} | {row['p50_ms']} | {row['p95_ms']} "
            f"| {row['p50_over_constant']} |"
        )


if __name__ == "__main__":
    main()
