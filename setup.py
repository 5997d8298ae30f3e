import re
from pathlib import Path

from setuptools import setup

root = Path(__file__).parent
setup(
    name="minispec",
    version=re.search(r'^__version__ = "(.+)"', (root / "minispec/__init__.py").read_text("utf-8"), re.M)[1],
    description="EAGLE-3 speculative decoding for mixture-of-experts models of the DeepSeek-V3 family",
    long_description=(root / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # In a checkout kernels/, weights/ and bench/ lie beside minispec/; installed, they lie inside it,
    # because the top-level name `kernels` belongs to another distribution.
    package_dir={"minispec": "minispec", "minispec.kernels": "kernels", "minispec.weights": "weights", "minispec.bench": "bench"},
    packages=["minispec", "minispec.kernels", "minispec.weights", "minispec.bench"],
    package_data={"minispec": ["doctor.md"], "minispec.weights": ["default/*", "default/*/*"], "minispec.bench": ["prompts.jsonl"]},
    install_requires=[
        "torch>=2.6",
        'triton; sys_platform == "linux"',
        "safetensors>=0.4",
        "sentencepiece",
        "tiktoken",
        "click>=8.1",
        "jinja2>=3.1",
        "numpy",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "transformers>=5", "scipy", "tokenizers", "setuptools>=70.1"],
        "tokenizers": ["tokenizers"],
        "flash-attn": ["flash-attn"],
        "plot": ["matplotlib"],
    },
    entry_points={"console_scripts": ["minispec = minispec.cli:main"]},
)
