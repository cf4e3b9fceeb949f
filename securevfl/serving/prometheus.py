"""Figures for Prometheus: counts, times and budgets; never a row, a key or a prediction."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from securevfl.federation.run_plan import PredictionBudget

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ServiceMetrics:
    """One server's figures, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "securevfl_http_requests",
            "HTTP requests answered",
            ["path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "securevfl_http_seconds",
            "Seconds from a request's first byte to its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._rows = Counter(
            "securevfl_predicted_rows", "Rows predicted and charged", registry=self._registry
        )
        self._requests = Counter(
            "securevfl_predict_requests",
            "Requests to the parties; several HTTP requests may share one",
            registry=self._registry,
        )
        self._asked = Histogram(
            "securevfl_predict_seconds",
            "Seconds of a request to the parties",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._ready = Gauge(
            "securevfl_ready", "1 while all parties are connected", registry=self._registry
        )
        self._spent = Gauge(
            "securevfl_prediction_epsilon_spent",
            "Epsilon that predictions of this model have spent, by party",
            ["party"],
            registry=self._registry,
        )
        self._budget = Gauge(
            "securevfl_prediction_epsilon_budget",
            "Epsilon that predictions of this model may spend, by party",
            ["party"],
            registry=self._registry,
        )

    def count_answer(self, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request."""
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_request(self, rows: int, seconds: float) -> None:
        """Count a request to the parties."""
        self._requests.inc()
        self._rows.inc(rows)
        self._asked.observe(seconds)

    def text(self, *, ready: bool, budgets: list[PredictionBudget]) -> bytes:
        """Return all figures as Prometheus reads them."""
        self._ready.set(float(ready))
        for budget in budgets:
            if budget.spent is not None:
                self._spent.labels(budget.party).set(budget.spent)
            if budget.budget is not None:
                self._budget.labels(budget.party).set(budget.budget)
        return generate_latest(self._registry)
