"""aegis runs Mixture-of-Experts language models several times larger than the memory they may use.

Names are imported when they are first used, so ``import aegis`` costs next to nothing: not even
typing and importlib are imported, since Ctrl-C before the command line has begun shows a traceback.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from aegis.api import GenerationResponse as GenerationResponse
    from aegis.api import generate as generate
    from aegis.api import load as load
    from aegis.api import plan as plan
    from aegis.api import stream_generate as stream_generate
    from aegis.engine.engine import Engine as Engine
    from aegis.errors import AegisError as AegisError
    from aegis.settings import Settings as Settings

_HOMES = {
    "AegisError": "aegis.errors",
    "Engine": "aegis.engine.engine",
    "GenerationResponse": "aegis.api",
    "Settings": "aegis.settings",
    "generate": "aegis.api",
    "load": "aegis.api",
    "plan": "aegis.api",
    "stream_generate": "aegis.api",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("aegis-moe")
    if name not in _HOMES:
        raise AttributeError(f"module 'aegis' has no attribute {name!r}")
    try:
        importlib.import_module("aegis.kernels")
    except ModuleNotFoundError:
        raise ImportError(importlib.import_module("aegis.errors").BARE_SOURCES) from None
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
