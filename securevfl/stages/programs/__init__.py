"""Programs of the user's own that all parties run on secret shares."""

from securevfl.core.stages import Stage

STAGE = Stage(session="session:run_program")
