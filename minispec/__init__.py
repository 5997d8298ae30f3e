"""EAGLE-3 speculative decoding for mixture-of-experts models of the DeepSeek-V3 family."""
from pathlib import Path
from typing import TYPE_CHECKING

# kernels/, weights/ and bench/ lie beside this folder in a checkout; setup.py moves them inside it on install,
# because the top-level name `kernels` belongs to another distribution
if (Path(__file__).parents[1] / "setup.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from minispec.engine import Engine
    from minispec.errors import MinispecError
    from minispec.params import SamplingParams
    from minispec.request import Event, Output

__version__ = "0.1.0"
__all__ = ["Engine", "Event", "MinispecError", "Output", "SamplingParams", "__version__"]


def __getattr__(name):
    """Import the public names on first use: `minispec --help` should not wait for torch."""
    from importlib import import_module

    home = {"Engine": "engine", "Event": "request", "MinispecError": "errors", "Output": "request", "SamplingParams": "params"}
    if name not in home:
        raise AttributeError(f"module 'minispec' has no attribute {name!r}")
    return getattr(import_module(f"minispec.{home[name]}"), name)
