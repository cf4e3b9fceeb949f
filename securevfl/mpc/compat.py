"""Make ``import crypten`` work on today's torch; the only place that deals with it.

CrypTen 0.4.1 asks for ``torch.onnx._internal.registration``, which torch moved in 2.9. The module
is needed by CrypTen's ONNX importer alone, which nothing here uses.
"""

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Final

from securevfl.core.errors import ConfigError

_OLD_HOME: Final = "torch.onnx._internal.registration"
_NEW_HOME: Final = "torch.onnx._internal.torchscript_exporter.registration"


def import_crypten() -> ModuleType:
    """Import CrypTen and return it.

    Raises:
        ConfigError: If it, or something that it needs, is not installed.
    """
    try:
        if _OLD_HOME not in sys.modules and importlib.util.find_spec(_OLD_HOME) is None:
            sys.modules[_OLD_HOME] = importlib.import_module(_NEW_HOME)
        with warnings.catch_warnings():
            # Its sources hold invalid escapes, which Python reports while it compiles them.
            for category in (SyntaxWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            return importlib.import_module("crypten")
    except ImportError as error:
        raise ConfigError(
            f"CrypTen cannot be imported ({error}); install crypten==0.4.1 with sklearn==0.0, or "
            f"simulate, which needs neither"
        ) from error
