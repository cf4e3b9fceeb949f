"""Every target by name."""

from collections.abc import Mapping
from typing import Final

from helpers.fuzzing.files import FILES
from helpers.fuzzing.kept_files import KEPT_FILES
from helpers.fuzzing.tables import TABLES
from helpers.fuzzing.target import Target
from helpers.fuzzing.wire import WIRE

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target for target in (*WIRE, *FILES, *KEPT_FILES, *TABLES)
}
"""All decoders that are fuzzed, of the wire first."""
