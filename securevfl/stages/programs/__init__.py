"""Programs of the user's own that all parties run on secret shares."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(session="session:run_program")
