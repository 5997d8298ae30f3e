"""What is measured: `minispec bench` (compare.py and what it imports), and scripts, which a checkout runs as `python -m bench.NAME`.

Installed, this folder is minispec.bench. What scripts share is named here and imported on first use: a script sets the environment
that torch reads before it imports torch.
"""
HOME = {"measure": "compare", **dict.fromkeys(("DEFAULT", "difference", "environment", "read_jsonl", "spread", "timed"), "readings")}


def __getattr__(name):
    from importlib import import_module

    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOME[name]}"), name)
