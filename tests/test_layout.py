"""What keeps the repository readable: imports run downward, files stay short, nothing global changes."""
import ast
import io
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("minispec", "kernels", "weights") for path in (ROOT / folder).glob("*.py"))
COMMAND = [ROOT / "bench" / f"{name}.py" for name in ("__init__", "compare", "plot", "readings", "report", "trace")]     # of `minispec bench`
MODULES = {"minispec." + (f"{path.parent.name}." if path.parent.name != "minispec" else "") + path.stem: path for path in [*SOURCES, *COMMAND]}


def imports(path, nested=True):
    """Modules of ours that a file imports; nested: also those that functions import when they run."""
    tree, found = ast.parse(path.read_text("utf-8")), set()
    typing = {node for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
              for node in ast.walk(block)}
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.ImportFrom) and node not in typing:
            assert node.level == 0 or path.parent.name == "tests", f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_imports_run_downward():
    """Every import of ours goes to a module that is placed lower: there is an order, so there is no cycle, not even inside functions."""
    above = {name: imports(path) & MODULES.keys() for name, path in MODULES.items() if path.stem not in ("__init__", "__main__")}
    placed = set()
    while above:
        ready = {name for name, wanted in above.items() if wanted <= placed}
        assert ready, f"these import each other: {sorted(above)}"
        placed |= ready
        above = {name: wanted for name, wanted in above.items() if name not in ready}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "kernels"], ids=lambda p: p.stem)
def test_kernels_import_nothing_of_ours(path):
    assert not {name for name in imports(path) & MODULES.keys() if not name.startswith("minispec.kernels.")}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "weights"], ids=lambda p: p.stem)
def test_weights_know_configs_and_no_model(path):
    ours = {name for name in imports(path) if name in MODULES and not name.startswith("minispec.weights.")}
    assert ours <= {f"minispec.{name}" for name in ("config", "errors", "fields", "quantization", "rope")}, ours


def test_no_torch_in_policy():
    """The command line's help, the scheduler and the requests start without torch."""
    seen, todo = set(), {f"minispec.{name}" for name in ("cli", "scheduler", "request", "params", "pages", "stats")}
    while todo:
        name = todo.pop()
        seen.add(name)
        found = imports(MODULES[name], nested=False)
        assert not any(module.split(".")[0] == "torch" for module in found), name
        todo |= (found & MODULES.keys()) - seen


def test_a_cold_start_imports_no_compiler():
    """torch._dynamo takes most of a second, triton half of one and 75 MB: neither has work on a CPU."""
    code = "import sys, torch, minispec.engine; print('torch._dynamo' in sys.modules, 'triton' in sys.modules and not torch.cuda.is_available())"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_two_folders_are_no_packages():
    """`kernels` is another distribution's name: an __init__.py here would shadow or overwrite it."""
    assert not [name for name in ("kernels", "weights") if (ROOT / name / "__init__.py").exists()]
    for path in [*SOURCES, *(ROOT / "tests").glob("*.py"), *(ROOT / "bench").glob("*.py")]:
        assert not {name for name in imports(path) if name.split(".")[0] in ("kernels", "weights")}, path


def code_lines(path):
    """Lines with code on them, as cloc counts: no blank line, no comment, no docstring."""
    text, lines = path.read_text("utf-8"), set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_size_budget():
    """The engine, its weights and commands; and, beside it, the kernels, each with its reference."""
    kernels = [path for path in SOURCES if path.parent.name == "kernels"]
    assert sum(map(code_lines, set(SOURCES) - set(kernels))) < 5000
    assert sum(map(code_lines, kernels)) < 2250
    assert not {path.name: count for path in [*SOURCES, *COMMAND] if (count := len(path.read_text("utf-8").splitlines())) > 280}


@pytest.mark.parametrize("path", [*SOURCES, *COMMAND], ids=lambda p: p.stem)
def test_no_global_state(path):
    """No `global`, no empty container at module level to be filled later, no handler that catches everything."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: global"
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            assert node.type and not {getattr(name, "id", "") for name in caught} & {"Exception", "BaseException"}, f"{path}:{node.lineno}"
    for node in tree.body:
        value = getattr(node, "value", None)
        empty = isinstance(value, (ast.List, ast.Dict, ast.Set)) and not (getattr(value, "elts", None) or getattr(value, "keys", None))
        empty |= isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("list", "dict", "set") and not value.args
        assert not (isinstance(node, (ast.Assign, ast.AnnAssign)) and empty), f"{path}:{node.lineno}: a container to be filled later"
    assert all(len(line) <= 150 for line in path.read_text("utf-8").splitlines()), f"{path}: a line over 150 columns"
