"""Any bytes, any config: a clear refusal or a right load, never another exception (bounded; the long run is marked slow)."""
import json
import shutil
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minispec.config import TargetConfig
from minispec.errors import MinispecError
from minispec.weights.checkpoint import Checkpoint, read_header
from minispec.weights.draft import load_draft, open_draft
from minispec.weights.load import fill, open_target

from . import tiny, tiny_draft

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
SMALL = dict(num_hidden_layers=2, vocab_size=40, n_routed_experts=2, num_experts_per_tok=1, n_group=1, storage="int4")


def filled(plan):
    return {name: torch.full(shape, float("nan")) for name, shape in plan.shapes.items()}


def read_target(folder):
    plan = open_target(str(folder), TargetConfig.read(str(folder)))
    parameters = filled(plan)
    fill(plan, parameters)
    return parameters


def read_draft(folder, target):
    plan = open_draft(str(folder), target)
    parameters = filled(plan)
    load_draft(plan, parameters)
    return parameters | ({} if plan.d2t is None else {"d2t": plan.d2t})


def outcome(read, *args):
    """The parameters, or None after one clear line."""
    try:
        parameters = read(*args)
    except MinispecError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000 and str(error).isprintable()
        return None
    assert all(value.isfinite().all() for value in parameters.values())
    return parameters


class Spoiled:
    """A sound checkpoint, its mutants in a folder of their own."""

    def __init__(self, sound, work):
        self.sound, self.work = sound, work
        self.bytes, self.config = (sound / "model.safetensors").read_bytes(), json.loads((sound / "config.json").read_text())
        self.header = struct.unpack("<Q", self.bytes[:8])[0]
        shutil.copytree(sound, work)

    def write(self, data=None, config=None):
        (self.work / "model.safetensors").write_bytes(self.bytes if data is None else data)
        (self.work / "config.json").write_text(json.dumps(self.config if config is None else config))
        return self.work


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    target = tiny.write_target(root / "target", **SMALL)
    capture_target = tiny.write_target(root / "deep", num_hidden_layers=8, vocab_size=40, n_routed_experts=2,
                                       num_experts_per_tok=1, n_group=1)
    draft = tiny_draft.write_draft(root / "draft", capture_target, "specforge", vocab=24, capture=(1, 3, 5))
    pair = Spoiled(target, root / "t"), Spoiled(draft, root / "d"), TargetConfig.read(str(capture_target))
    assert outcome(read_target, pair[0].write()) and outcome(read_draft, pair[1].write(), pair[2])
    return pair


def mutate_bytes(data, spoiled):
    """A few bytes of length or header overwritten, removed or inserted, or the file cut."""
    raw = bytearray(spoiled.bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(raw), 8 + spoiled.header)))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "remove", "digit"]))
        if kind == "cut":
            del raw[at:]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif kind == "remove":
            del raw[at:at + data.draw(st.integers(1, 8))]
        elif at < len(raw):
            raw[at] = data.draw(st.integers(48, 57) if kind == "digit" else st.integers(0, 255))
    return bytes(raw)


def check_bytes(data, pair):
    target, draft, config = pair
    outcome(read_target, target.write(mutate_bytes(data, target)))
    outcome(read_draft, draft.write(mutate_bytes(data, draft)), config)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.integers(-2**70, 2**70), st.floats(), st.text(max_size=8),
                 st.sampled_from(["yarn", "llama3", "linear", "input", "output", "mla", "re:(a+)+$", "re:["]),
                 st.lists(st.integers(-2, 70), max_size=4), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))


def mutate_config(data, config):
    config = json.loads(json.dumps(config))
    for _ in range(data.draw(st.integers(1, 3))):
        place = config
        while True:
            key = data.draw(st.sampled_from(sorted(place)))
            if isinstance(place[key], dict) and place[key] and data.draw(st.integers(0, 3)):
                place = place[key]
                continue
            if data.draw(st.booleans()):
                place[key] = data.draw(JUNK)
            elif len(place) > 1:
                del place[key]
            break
    return config


def check_config(data, pair):
    target, draft, config = pair
    sound = read_target(target.write())
    changed = mutate_config(data, target.config)
    parameters = outcome(read_target, target.write(config=changed))
    if parameters is not None:
        assert set(parameters) == set(sound), "a config that loads describes the tensors of the file"
    outcome(read_draft, draft.write(config=mutate_config(data, draft.config)), config)


@QUICK
@given(st.data())
def test_mutated_bytes(pair, data):
    check_bytes(data, pair)


@QUICK
@given(st.data())
def test_mutated_configs(pair, data):
    check_config(data, pair)


@pytest.mark.slow
@LONG
@given(st.data())
def test_mutated_bytes_at_length(pair, data):
    check_bytes(data, pair)


@pytest.mark.slow
@LONG
@given(st.data())
def test_mutated_configs_at_length(pair, data):
    check_config(data, pair)


DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "I32", "F32", "I64", "F64"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5), st.integers(0, 16))
def test_any_sound_file_is_read_as_the_library_reads_it(tmp_path_factory, kinds, padding):
    """Headers built by hand: what the checks let pass, the safetensors library reads, and with the same shapes."""
    width = dict(zip(DTYPES, (1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 8, 8)))
    header, at = {}, 0
    for i, (dtype, shape) in enumerate(kinds):
        size = width[dtype] * torch.Size(shape).numel()
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode() + b" " * padding
    folder = tmp_path_factory.mktemp("sound")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))
    checkpoint = Checkpoint.open(str(folder))
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {f"t{i}": tuple(s) for i,
                                                                               (_, s) in enumerate(kinds)}
    assert all(tuple(checkpoint.read(name).shape) == info.shape for name, info in checkpoint.tensors.items())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_as_header(tmp_path_factory, raw, framed):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw if framed else raw)
    try:
        read_header(str(path))
    except MinispecError as error:
        assert "any.safetensors" in str(error)
