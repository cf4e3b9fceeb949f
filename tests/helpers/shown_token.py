"""The token that clients of a test's server show."""

import hashlib
from typing import Final

from securevfl.serving.guard import Token

SHOWN: Final = "a-token-of-the-tests"
HEADERS: Final = {"Authorization": f"Bearer {SHOWN}"}
TOKEN: Final = Token(hashlib.sha256(SHOWN.encode()).digest(), "the tests")
