"""The load audit: every refusal of the loader becomes a finding and is mended, as far as the files themselves say how, until the draft opens."""
import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from minispec.doctor_finding import finding
from minispec.errors import MinispecError
from minispec.fields import Fields
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.draft import open_draft, repeated_rows
from minispec.weights.names import strip_draft

IDS, NORM = "eagle_aux_hidden_state_layer_ids", re.compile(r"norm\.weight$")


class Files:
    """A draft's config (the JSON) and tensors (under the file's names), to be mended; `write` gives a folder that the engine can open.

    MinispecError for files that cannot be read at all.
    """

    def __init__(self, folder):
        self.config, checkpoint = Fields.read(str(folder)).values, Checkpoint.open(str(folder), pickled=True)
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
        next((place for place in self.places() if key in place), self.config)[key] = value

    def write(self, folder):
        Path(folder, "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.clone() for name, tensor in self.tensors.items()}, Path(folder, "model.safetensors"))


def audit(folder, target, scratch, reading):
    """(findings, the folder to go on with, or None where nothing opens). target: TargetConfig; scratch: an empty folder for a mended copy;
    reading: the caller's own, as weights.draft.open_draft takes it; MinispecError where it is that which cannot be."""
    files, at, done, before = Files(folder), folder, None, ""
    found = [*values(files)]
    if any(one.name == "not-finite" for one in found):
        files.write(at := scratch)
    for _ in range(64):
        try:
            open_draft(str(at), target, **reading).checkpoint.close()
            return [*found, *untrained(files), *prefix(files, target)], at
        except MinispecError as error:
            text = str(error).replace(f"{at}/", "").replace(f"{at}:", "").strip()
            if text == before:                          # no file says this any more: the caller's own reading does
                raise MinispecError(text) from None
        before = text
        match, name, mend = next((match, *row) for pattern, *row in REFUSALS if (match := re.search(pattern, text)))
        done, (what, _, way) = mend(files, match, target) if mend else False, text.rpartition("; ")
        found.append(finding(name, what, {"refused": text}, done, way=way))
        if done is False:
            break
        files.write(at := scratch)
    return [*found, *untrained(files)], None


def keep_one(f, match, target):
    """Of a parameter stored twice, all tensors under the prefix whose matrices look trained."""
    pairs = [[name for name in f.tensors if strip_draft(name) == strip_draft(other)] for other in f.tensors]
    sets = [{pair[i] for pair in pairs if len(pair) > 1} for i in (0, 1)]
    structure = [sum(edge(f.tensors[name]) for name in one if f.tensors[name].dim() == 2) for one in sets]
    worse = structure.index(min(structure))
    kept, gone = (next(re.match(r"(midlayer|.*?layers\.0)\.|(.*)", name)[0] for name in sorted(sets[i])) for i in (1 - worse, worse))
    for name in sets[worse]:
        del f.tensors[name]
    sums = f"{structure[worse]:.1f} against {structure[1 - worse]:.1f}"
    return f"remove {gone}*, whose matrices are nearer to random numbers (spectral edges {sums} in all), and keep {kept}*"


def drop(f, match, target):
    """The unknown tensor goes; where a missing parameter is nearest, it takes that name."""
    tensor, near = f.tensors.pop(match[1]), match[2]
    if match[3] == "missing" and tensor.dim() == (1 if NORM.search(near) else 2):
        f.tensors[near] = tensor


def set_flag(f, match, target):
    for place in f.places():
        place.pop({"fc_norm": "use_aux_norm"}.get(match[1]), None)
    f.set(match[1], match[2] == "False")
    return f"set {match[1]} to {str(match[2] == 'False').lower()} in config.json"


def name_layers(f, match, target):
    """The listed layers where they can be, else the default: a place for the scan of readings to start from."""
    fc, n = f.name("fc.weight"), target.num_hidden_layers
    if fc is None or f.tensors[fc].shape[1] % target.hidden_size:
        return False
    count, outputs = f.tensors[fc].shape[1] // target.hidden_size, f.section("eagle_config").get("capture_convention") == "output"
    listed = [place.pop(key) for place in f.places() for key in (IDS, "layer_ids") if key in place]
    ids = sorted({i + outputs for i in listed[0] if type(i) is int and 0 <= i + outputs <= n}) if listed and isinstance(listed[0], list) else []
    default = [2, n // 2, n - 3] if count == 3 and n > 5 else [round((i + 1) * n / (count + 1)) for i in range(count)]
    eagle = f.section("eagle_config")
    f.config["eagle_config"] = {**eagle, IDS: ids if len(ids) == count else default, "capture_convention": "input", "use_aux_hidden_state": True}
    return None if eagle.get("use_aux_hidden_state") is not False else "set eagle_config.use_aux_hidden_state to true"


def mend_map(f, match, target):
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


CAPTURE_FAULTS = ("fusion-bypassed", "capture-count", "capture-order", "capture-list")
# (pattern of the loader's refusal, name of the finding, how to read on or None)
REFUSALS = (
    (r"name the same parameter", "layer-twice", keep_one),
    (r"tensor (\S+) .*nearest expected name is (\S+), which is (missing|there too)", "tensor-unknown", drop),
    (r"tensor (\S+) (?:\(.*\) )?is (a bias)()", "tensor-unknown", drop),
    (r"tensor fc\.weight.* is missing", "fusion-missing", None),
    (r"lm_head\.weight is missing", "head-missing", None),
    (r"d2t, which is missing", "d2t-missing", mend_map),
    (r"tensor (\S+).* is missing", "tensor-missing", None),
    (r"(norm_before_fc|fc_norm) is (True|False) but", "norm-flag", set_flag),
    (r"model_type is .*q_norm\.weight is (present|missing)", "qk-norm",
     lambda f, match, *_: f.set("model_type", {"present": "qwen3"}.get(match[1], "llama"))),
    (r"tie_word_embeddings is true", "tied-head", lambda f, *_: f.set("tie_word_embeddings", False)),
    (r"use_aux_hidden_state is False|1 layers, fc\.weight takes", "fusion-bypassed", name_layers),
    (r"layers, fc\.weight takes", "capture-count", name_layers),
    (r"are not ascending", "capture-order", name_layers),
    (r"--capture", "capture-list", name_layers),
    (r"d2t\S* has dtype", "d2t-dtype", mend_map),
    (r"absolute reading fits", "d2t-absolute", mend_map),
    (r"t2d keeps|t2d leaves out", "d2t-against-t2d", mend_map),
    (r"d2t\S* is all zero", "d2t-unset", mend_map),
    (r"read as offset: ", "d2t-broken", mend_map),
    (r"target_hidden_size|vocab_size|no multiple of the target's hidden", "wrong-target", None),
    (r"", "load-refused", None),
)


def untrained(f):
    """Matrices whose largest singular value is that of independent random numbers, beside norms that never moved."""
    layer = {name: t for name, t in f.tensors.items() if strip_draft(name).startswith(("layers.0.", "fc.")) and t.is_floating_point()}
    edges = {name: edge(t) for name, t in layer.items() if t.dim() == 2}
    random = [name for name, value in edges.items() if value < 1.1]
    if len(random) > len(edges) / 2 and all(bool((t == t[0]).all()) for t in layer.values() if t.dim() == 1):
        yield finding("layer-untrained", f"{len(random)} of {len(edges)} matrices have the spectrum of random numbers, and no norm has moved",
                      {"spectral_edges": edges}, prefix=re.match(r"midlayer|.*?layers\.0|", random[0])[0])


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
        if t.is_floating_point() and (bad := int((~t.float().isfinite()).sum())):
            yield finding("not-finite", f"{bad} of {t.numel()} values of {name} are NaN or infinite", {"share": bad / t.numel()}, tensor=name)
            f.tensors[name] = t.nan_to_num(0, 0, 0)
    head = f.tensors.get(f.name("lm_head.weight"), torch.ones(1, 1))
    zero, again = int((head == 0).all(-1).sum()), repeated_rows(head) if head.dim() == 2 else 0
    for name, count, what in (("head-zero-rows", zero, "are zero"), ("head-duplicate-rows", again if again >= zero else 0, "repeat others")):
        if count:
            yield finding(name, f"{count} of {len(head)} rows of lm_head {what}")


def prefix(f, target):
    size, d2t = f.config.get("draft_vocab_size", target.vocab_size), f.tensors.get(f.name("d2t"))
    if d2t is not None and size < target.vocab_size and not d2t.any():
        yield finding("d2t-prefix", f"the draft keeps exactly the first {size} ids")
