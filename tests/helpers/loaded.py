"""What a process loads before it forks parties of tests: all that primaries and secondaries use.

A primary spends a CPU-second on the libraries of its local baseline, which it loads late.
"""

import importlib

from helpers.fitted_once import fit_runs_once
from helpers.unsynced import skip_fsync

from securevfl.core.memory import loading

_NAMES = (
    "dp_accounting.pld.privacy_loss_distribution",
    "matplotlib.backends.backend_svg",
    "scipy.spatial",
    "scipy.special",
    "scipy.stats",
    "securevfl.desk.command_results",
    "securevfl.cli.run",
    "securevfl.desk.report.page",
    "securevfl.federation.base",
    "securevfl.mpc.crypten_bridge",
    "securevfl.runtime.primary_party",
    "securevfl.runtime.run_tables",
    "securevfl.runtime.secondary_party",
    "sklearn.ensemble",
    "sklearn.linear_model",
    "sklearn.metrics",
    "skops.io",
    # Loaded by the first gradient of each row alone.
    "torch._dynamo",
)
with loading():
    for _name in _NAMES:
        importlib.import_module(_name)
fit_runs_once()
skip_fsync()
