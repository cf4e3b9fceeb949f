"""Events of a party's process as the launcher gets them: through JSON."""

import json
import math

from securevfl.core.logs import plain
from securevfl.core.progress import PartyDone, event_fields, event_of


def test_what_is_spent_without_noise_is_infinite_at_the_launcher_too() -> None:
    done = PartyDone(epsilon=math.inf, total_epsilon=2.5)
    report = json.loads(json.dumps(plain(event_fields(done))))

    assert event_of(PartyDone.EVENT, report) == done


def test_a_report_that_is_no_event_of_a_run_is_none() -> None:
    assert event_of("memory", {"bytes": 1}) is None
    assert event_of(PartyDone.EVENT, {"epsilon": "much", "total_epsilon": 1.0}) is None
    assert event_of(PartyDone.EVENT, {"another": 1.0}) is None
