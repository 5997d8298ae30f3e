"""The load audit: every refusal of the loader becomes a finding and is mended, as far as the files themselves say how, until the draft opens."""
import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from minispec.doctor_finding import Finding
from minispec.errors import MinispecError
from minispec.fields import Fields
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.draft import open_draft, repeated_rows
from minispec.weights.load import fill, open_target
from minispec.weights.names import strip_draft

IDS, NORM = "eagle_aux_hidden_state_layer_ids", re.compile(r"norm\.weight$")


class Files:
    """A draft's config (the JSON) and tensors (under the file's names), to be mended; `write` gives a folder that the engine can open.

    MinispecError for files that cannot be read at all.
    """

    def __init__(self, folder):
        self.config, checkpoint = copy.deepcopy(Fields.read(str(folder)).values), Checkpoint.open(str(folder), pickled=True)
        self.tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
        checkpoint.close()

    def name(self, bare):
        """The file's name of a canonical one, or None."""
        return next((name for name in self.tensors if strip_draft(name) == bare), None)

    def section(self, name):
        return self.config[name] if isinstance(self.config.get(name), dict) else {}

    def places(self):
        return self.section("transformer_layer_config"), self.section("eagle_config"), self.config

    def set(self, key, value):
        """Set a field where it is said, else at the top."""
        place = next((place for place in self.places() if key in place), self.config)
        place[key] = value

    def write(self, folder):
        Path(folder, "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.clone() for name, tensor in self.tensors.items()}, os.path.join(folder, "model.safetensors"))


def audit(folder, target, target_folder, scratch, dialect):
    """(findings, the folder to go on with, or None where nothing opens). target: TargetConfig; scratch: an empty folder for a mended copy;
    dialect: the caller's own reading, as weights.draft.open_draft takes it."""
    files, found, at = Files(folder), [], folder
    found += values(files)
    if any(finding.name == "not-finite" for finding in found):
        files.write(at := scratch)
    for _ in range(64):
        try:
            open_draft(str(at), target, **dialect).checkpoint.close()
            return [*found, *untrained(files), *prefix(files, target)], at
        except MinispecError as error:
            text = str(error).replace(f"{at}/", "").replace(f"{at}:", "").strip()
            match, (_, name, expected, cause, mend) = next((m, row) for row in REFUSALS if (m := re.search(row[0], text)))
            what, _, way = text.rpartition("; ")
            done = mend(files, match, target, target_folder) if mend else False
            found.append(Finding(name, "error", what, expected, cause, done or way, {"refused": text}))
        if done is False:
            break
        files.write(at := scratch)
    return [*found, *untrained(files)], None


def parameters(folder, target, wanted):
    """name -> fp32 tensor on the CPU of a few of a target's parameters (weights.names)."""
    plan = open_target(folder, target)
    found = {name: torch.empty(plan.shapes[name]) for name in wanted}
    fill(replace(plan, shapes={name: plan.shapes[name] for name in wanted}, pieces=[piece for piece in plan.pieces if piece[0].param in found]), found)
    return found


def keep_one(f, match, target, folder):
    """Of a parameter stored twice, all tensors under the prefix whose matrices look trained."""
    pairs = [[name for name in f.tensors if strip_draft(name) == strip_draft(other)] for other in f.tensors]
    sets = [{pair[i] for pair in pairs if len(pair) > 1} for i in (0, 1)]
    structure = [sum(edge(f.tensors[name]) for name in one if f.tensors[name].dim() == 2) for one in sets]
    worse = structure.index(min(structure))
    kept, gone = (next(re.match(r"(midlayer|.*?layers\.0)\.|(.*)", name)[0] for name in sorted(sets[i])) for i in (1 - worse, worse))
    for name in sets[worse]:
        del f.tensors[name]
    return f"remove {gone}*, whose matrices are nearer to random numbers (spectral edges {structure[worse]:.1f} against {structure[1 - worse]:.1f}), " \
           f"and keep {kept}*"


def drop(f, match, target, folder):
    """The unknown tensor goes; where a missing parameter is nearest, it takes that name."""
    tensor, near = f.tensors.pop(match[1]), match[2]
    if match[3] == "missing" and tensor.dim() == (1 if NORM.search(near) else 2):
        f.tensors[near] = tensor


def fill_norm(f, match, target, folder):
    if not NORM.search(match[1]):
        return False
    f.tensors[match[1]] = torch.ones(next(t.shape[0] for name, t in f.tensors.items() if strip_draft(name) == "fc.weight"))


def set_flag(f, match, target, folder):
    for place in f.places():
        place.pop({"fc_norm": "use_aux_norm"}.get(match[1]), None)
    f.set(match[1], match[2] == "False")


def name_layers(f, match, target, folder):
    """The listed layers where they can be, else the default: a place for the scan of readings to start from."""
    fc, n = f.name("fc.weight"), target.num_hidden_layers
    if fc is None or f.tensors[fc].shape[1] % target.hidden_size:
        return False
    count, outputs = f.tensors[fc].shape[1] // target.hidden_size, f.section("eagle_config").get("capture_convention") == "output"
    listed = [place.pop(key) for place in f.places() for key in (IDS, "layer_ids") if key in place]
    ids = sorted({i + outputs for i in listed[0] if type(i) is int and 0 <= i + outputs <= n}) if listed and isinstance(listed[0], list) else []
    default = [2, n // 2, n - 3] if count == 3 and n > 5 else [round((i + 1) * n / (count + 1)) for i in range(count)]
    f.config["eagle_config"] = {**f.section("eagle_config"), IDS: ids if len(ids) == count else default, "capture_convention": "input",
                                "use_aux_hidden_state": True}


def mend_map(f, match, target, folder):
    """d2t in the reading d2t + k x id that gives distinct ids (those of t2d where it is there), else the order of t2d."""
    size, name, t2d = f.config.get("draft_vocab_size", target.vocab_size), f.name("d2t"), f.name("t2d")
    kept = None if t2d is None else f.tensors[t2d].bool().nonzero().flatten()
    table = f.tensors[name].round().long() if name and len(f.tensors[name]) == size else None
    tries = {} if table is None or not table.any() else {k: table + k * torch.arange(size) for k in (1, 0, 2, -1)}
    tries = {k: ids for k, ids in tries.items() if len(ids.unique()) == size and 0 <= ids.min() and ids.max() < target.vocab_size}
    k = next((k for k, ids in tries.items() if kept is None or torch.equal(ids.sort().values, kept)), None)
    ids = tries.get(1 if k is None else k, kept if kept is not None and len(kept) == size else None)
    if ids is None:
        return False
    f.tensors[name or "d2t"] = ids - torch.arange(size)
    if t2d:
        f.tensors[t2d] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return f"the target ids are d2t + {k} x id, which fits: store d2t + {k - 1} x id" if k not in (None, 0, 1) else None


def lend_head(f, match, target, folder):
    d2t = f.name("d2t")
    if d2t is None or f.config.get("hidden_size", target.hidden_size) != target.hidden_size:
        return False
    f.tensors["lm_head.weight"] = parameters(folder, target, ["head"])["head"][f.tensors[d2t].long() + torch.arange(len(f.tensors[d2t]))]


LAYERS = "the layers whose inputs it was trained on, one for each state that fc.weight fuses"
CAPTURE = "a list of another draft or target, or in another order: engines sort, shift or replace it, each in its own way"
MAP = f"distinct target ids, draft id + d2t[draft id], those of t2d"
CAPTURE_FAULTS = ("fusion-bypassed", "capture-count", "capture-order", "capture-list")
# (pattern of the loader's refusal, name of the finding, what was expected, cause, how to read on or None)
REFUSALS = (
    (r"name the same parameter", "layer-twice", "each parameter once", "a layer saved as layers.0.* where midlayer.* is expected (or the "
     "reverse): a lenient loader kept both, one of them as it was initialised", keep_one),
    (r"tensor (\S+) .*nearest expected name is (\S+), which is (missing|there too)", "tensor-unknown", "names of a one-layer EAGLE-3 draft",
     "the file comes from code with other names; a lenient loader drops this tensor and leaves the one that it means as initialised", drop),
    (r"tensor (\S+) (?:\(.*\) )?is (a bias)()", "tensor-unknown", "no biases", "another architecture; a lenient loader drops it", drop),
    (r"tensor fc\.weight.* is missing", "fusion-missing", "fc.weight [hidden, states x target hidden]",
     "saved by code that skips fusion where one captured state fits the width: such a layer never saw three states", None),
    (r"lm_head\.weight is missing", "head-missing", "a head with a row for each draft id", "left out as if it were the target's", lend_head),
    (r"d2t, which is missing", "d2t-missing", MAP, "saved without its vocabulary mapping: draft ids pass for the first target ids", mend_map),
    (r"tensor (\S+).* is missing", "tensor-missing", "every parameter in the file",
     "saved incompletely, or dropped by the loader that wrote this file; an unchecked engine leaves it as initialised", fill_norm),
    (r"(norm_before_fc|fc_norm) is (True|False) but", "norm-flag", "the flag where the tensor is, and only there",
     "a converter lost the one or the other: an engine then skips a norm that was trained", set_flag),
    (r"model_type is .*q_norm\.weight is (present|missing)", "qk-norm", "q_norm and k_norm in speculators' qwen3 layers alone",
     "type and tensors do not belong together", lambda f, match, *_: f.set("model_type", {"present": "qwen3"}.get(match[1], "llama"))),
    (r"tie_word_embeddings is true", "tied-head", "tie_word_embeddings false", "copied from another config: an engine that believes it "
     "replaces the draft's head by an embedding", lambda f, *_: f.set("tie_word_embeddings", False)),
    (r"use_aux_hidden_state is False|1 layers, fc\.weight takes", "fusion-bypassed", LAYERS, "one state of the draft's own width reaches the layer "
     "without fc in engines that skip fusion where the width fits", name_layers),
    (r"layers, fc\.weight takes", "capture-count", LAYERS, CAPTURE, name_layers),
    (r"are not ascending", "capture-order", f"{LAYERS}, low to high", CAPTURE, name_layers),
    (r"--capture", "capture-list", LAYERS, CAPTURE, name_layers),
    (r"d2t\S* has dtype|d2t\S*.*expected I", "d2t-dtype", "int64", "cast with the model: ids above 256 (bf16) or 2048 (fp16) are rounded", mend_map),
    (r"absolute reading fits", "d2t-absolute", MAP, "d2t holds target ids, not offsets", mend_map),
    (r"t2d keeps|t2d leaves out", "d2t-against-t2d", MAP, "tables of different files, or t2d as training code starts it", mend_map),
    (r"d2t\S* is all zero", "d2t-unset", MAP, "saved before the vocabulary mapping was set: draft ids pass for the first ids", mend_map),
    (r"read as offset: ", "d2t-broken", MAP, "an offset 'fixed' once too often, or tables of different files", mend_map),
    (r"target_hidden_size|vocab_size|no multiple of the target's hidden", "wrong-target", "the widths and vocabulary of this target",
     "made for another target, or with the config of another draft", None),
    (r"", "load-refused", "files that the engine reads", "what the engine does not compute, or damaged files", None),
)


def untrained(f):
    """Matrices whose largest singular value is that of independent random numbers, beside norms that never moved."""
    layer = {strip_draft(name): t for name, t in f.tensors.items() if re.match(r"(layers\.0\.|fc\.)", strip_draft(name)) and t.is_floating_point()}
    still = all(bool((t == t[0]).all()) for t in layer.values() if t.dim() == 1)
    edges = {name: edge(t) for name, t in layer.items() if t.dim() == 2} if still else {}
    random = [name for name, value in edges.items() if value < 1.1]
    if edges and len(random) > len(edges) / 2:
        yield Finding("layer-untrained", "error", f"{len(random)} of {len(edges)} matrices have the spectrum of random numbers, and no norm has moved",
                      "a trained layer", "the loader did not expect this file's names (layers.0.* for midlayer.*, or the reverse), left the layer as "
                      "initialised and saved it", f"rename the layer of the trained file to {f.name(random[0]).rsplit('.', 3)[0].split('.self')[0]}.*, "
                      "load it with strict=True, and save again", {"spectral_edges": edges})


def edge(matrix):
    """Largest singular value over std x (sqrt(rows) + sqrt(columns)): about 1 for independent entries (Marchenko and Pastur, 1967)."""
    x = matrix.float()
    v = torch.linspace(1, 2, x.shape[1])
    for _ in range(30):
        v = x.T @ (x @ v)
        v = v / v.norm().clamp(min=1e-30)
    return ((x @ v).norm() / (x.std() * (x.shape[0] ** 0.5 + x.shape[1] ** 0.5)).clamp(min=1e-30)).item()


def values(f):
    """Values that are not finite (replaced by 0 to read on); zero and repeated rows of the head."""
    for name, t in f.tensors.items():
        bad = int((~t.float().isfinite()).sum()) if t.is_floating_point() else 0
        if bad:
            yield Finding("not-finite", "error", f"{bad} of {t.numel()} values of {name} are NaN or infinite", "finite values",
                          "training diverged, or nothing ever filled it (speculators start parameters as NaN)", f"save {name} again")
            f.tensors[name] = t.nan_to_num(0, 0, 0)
    head = f.tensors.get(f.name("lm_head.weight"))
    if head is not None and head.dim() == 2:
        zero, again = int((head == 0).all(-1).sum()), repeated_rows(head)
        if zero:
            yield Finding("head-zero-rows", "warning", f"{zero} of {len(head)} rows of lm_head are zero", "none", "rows that were never trained",
                          "save lm_head.weight again")
        if again > max(zero - 1, 0):
            yield Finding("head-duplicate-rows", "error", f"{again} of {len(head)} rows of lm_head repeat others", "distinct rows",
                          "pruned with offsets taken for ids (lm_head[d2t]), as one converter does",
                          "prune the full head again: lm_head.weight = full[d2t + arange]")


def prefix(f, target):
    size, d2t = f.config.get("draft_vocab_size", target.vocab_size), f.tensors.get(f.name("d2t"))
    if d2t is not None and size < target.vocab_size and not d2t.any():
        return [Finding("d2t-prefix", "warning", f"the draft keeps exactly the first {size} ids", "the most frequent ids of its training text",
                        "a default of the training code, not a choice by frequency", "train with a vocabulary mapping of the data (d2t, t2d)")]
    return []
