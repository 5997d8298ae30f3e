"""What is installed: the wheel holds the package, its three folders inside it, and the default pair with its attribution."""
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy in which the tensors are empty: only names matter, and packing 40 MB takes seconds."""
    source = tmp_path_factory.mktemp("source")
    tracked = [path for folder in ("minispec", "kernels", "weights", "tests", "bench") for path in (ROOT / folder).rglob("*")]
    for path in [ROOT / "setup.py", ROOT / "README.md", ROOT / "LICENSE", *tracked]:
        if path.is_file() and "__pycache__" not in path.parts:
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(b"" if path.suffix == ".safetensors" else path.read_bytes())
    subprocess.run([sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_has_everything_and_owns_only_minispec(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"minispec"}
    for folder in ("minispec", "kernels", "weights", "bench"):
        inside = "minispec" if folder == "minispec" else f"minispec/{folder}"
        assert {f"{inside}/{path.name}" for path in (ROOT / folder).glob("*.py")} <= set(names)
    default = ROOT / "weights/default"
    files = [path.relative_to(default).as_posix() for path in default.rglob("*") if path.is_file()]
    assert {"SOURCES.tsv", "README.md", "target/model.safetensors", "draft/model.safetensors"} <= set(files)
    assert {f"minispec/weights/default/{file}" for file in files} <= set(names)
    assert "minispec/bench/prompts.jsonl" in names and not [name for name in names if "results" in name]
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_runs_outside_a_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = ("import minispec, minispec.kernels.choose as k, minispec.weights.load as w; from minispec import SamplingParams;"
            "from minispec.bench import read_jsonl, readings as b; assert len(read_jsonl()) == 40;"
            "print(minispec.__file__, k.__file__, w.__file__, b.__file__, len(minispec.__path__))")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
                         capture_output=True, text=True, check=True)
    *files, paths = run.stdout.split()
    assert all(Path(file).is_relative_to(tmp_path / "site/minispec") for file in files) and paths == "1"


def test_readme_has_the_two_lines_that_ci_runs():
    lines = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("pip install ")]
    assert len(lines) == 2
    assert 'minispec generate --prompt "def fibonacci(n):"' in lines[0] and "[test]" in lines[1] and "pytest" in lines[1]


def test_readme_tree_names_every_file():
    tree = (ROOT / "README.md").read_text("utf-8").partition("## Files")[2]
    named = set(re.findall(r"\w+", tree))
    files = [path.stem for folder in ("minispec", "kernels", "weights", "bench") for path in (ROOT / folder).glob("[!_]*.py")]
    assert not set(files) - named
