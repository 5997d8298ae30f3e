"""The tensors of a checkpoint folder: every header is checked before any library reads the file. Nothing is executed."""
import json
import math
import os
import pickle
import struct
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open

from minispec.errors import MinispecError
from minispec.fields import present, read_json, short

_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8,
           "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
           "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_MAX_HEADER = 100_000_000            # the safetensors library refuses longer ones
_AGAIN = "download the file again"


@dataclass(frozen=True)
class Info:
    """Where a tensor lies and what it is, from the header alone. dtype in safetensors' spelling."""
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass
class Checkpoint:
    """`tensors`: name -> Info over all shards. `read` gives one tensor; files stay open until `close`. `bytes_read`: what it gave."""
    folder: str
    tensors: dict[str, Info]
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    _files: dict = field(default_factory=dict, repr=False)
    _loaded: dict = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str, *, pickled: bool = False) -> "Checkpoint":
        """Single file or sharded index. pickled: also `pytorch_model.bin`, through torch's weights-only loading."""
        if not os.path.isdir(folder):
            raise MinispecError(f"{folder}: no such folder; give the folder of a checkpoint")
        single, index, binary = (os.path.join(folder, name) for name in
                                 ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"))
        if present(index):
            return cls(folder, _read_shards(folder, index, single))
        if present(single):
            return cls(folder, read_header(single))
        if pickled and present(binary):
            loaded, names = _read_pickle(binary), {dtype: name for name, dtype in _DTYPES.items()}
            tensors = {k: Info(binary, names[v.dtype], tuple(v.shape)) for k, v in loaded.items()}
            return cls(folder, tensors, [f"{binary}: pickle, read through torch's weights-only loading"], _loaded=loaded)
        raise MinispecError(f"{folder}: holds no model.safetensors and no model.safetensors.index.json (found: "
                            f"{short(sorted(os.listdir(folder)))}); download the weights, or convert them to safetensors")

    def refuse(self, name: str, what: str) -> MinispecError:
        """The error for a tensor: `raise checkpoint.refuse("fc.weight", "has ...; use ...")`."""
        return MinispecError(f"{self.tensors[name].file}: tensor {name} {what}")

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor as stored, or these rows and columns of it, on the CPU; no more than that is brought into memory."""
        if name in self._loaded:
            return self._loaded[name][part]
        path = self.tensors[name].file
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            out = self._files[path].get_slice(name)[part or ...]
            self.bytes_read += out.nbytes
            return out
        except (SafetensorError, OSError) as error:
            raise self.refuse(name, f"cannot be read ({error}); {_AGAIN}") from None

    def close(self) -> None:
        self._files.clear()
        self._loaded.clear()


def _read_shards(folder: str, index: str, single: str) -> dict[str, Info]:
    """The headers of all shards, each tensor in the one that the index names."""
    places, base = read_json(index).get("weight_map"), os.path.basename(index)
    if not isinstance(places, dict) or not places:
        raise MinispecError(f"{index}: weight_map is {short(places)}: an object of tensor names and files is expected; {_AGAIN}")
    for name, shard in places.items():
        beside = isinstance(shard, str) and shard.isprintable() and os.path.basename(shard) == shard
        if not name.isprintable() or not beside or not shard.endswith(".safetensors"):
            raise MinispecError(f"{index}: {short(name)} in {short(shard)}: a .safetensors file beside it is expected; {_AGAIN}")
    shards, tensors = sorted(set(places.values())), {}
    if present(single) and os.path.basename(single) not in shards:
        raise MinispecError(f"{single}: lies beside {base}, which does not name it; remove the stale one of the two")
    for shard in shards:
        if not present(os.path.join(folder, shard)):
            raise MinispecError(f"{os.path.join(folder, shard)}: shard named by {base} is missing; download it")
    for shard in shards:
        path = os.path.join(folder, shard)
        for name, info in read_header(path).items():
            if places.get(name) != shard:
                said = f"puts it in {places[name]}" if name in places else "does not name it"
                raise MinispecError(f"{path}: tensor {name} is here, but {base} {said}; {_AGAIN}")
            tensors[name] = info
    for name, shard in places.items():
        if name not in tensors:
            raise MinispecError(f"{os.path.join(folder, shard)}: tensor {name}, which {base} puts here, is missing; {_AGAIN}")
    return tensors


def read_header(path: str) -> dict[str, Info]:
    """Name -> Info of one safetensors file, after checking length, JSON, dtypes, shapes and that the data tile the file."""
    def refuse(what: str, way: str = _AGAIN) -> MinispecError:
        return MinispecError(f"{path}: {what}; {way}")
    try:
        with open(path, "rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(8)
            if len(head) < 8:
                raise refuse(f"{size} bytes are too few for a safetensors file")
            length, = struct.unpack("<Q", head)
            if length > min(size - 8, _MAX_HEADER):
                raise refuse(f"header length {length} does not fit the file of {size} bytes (truncated, or not safetensors)")
            raw = file.read(length)
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})", "check the file and its permissions") from None
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refuse(f"header is not valid JSON ({short(str(error))})") from None
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise refuse("header is not a JSON object")
    metadata, spans, tensors, at = header.pop("__metadata__", None) or {}, [], {}, 0
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise refuse("__metadata__ does not map strings to strings")
    for name, entry in header.items():
        if not name.isprintable():
            raise refuse(f"tensor name {short(name)} is not printable")
        dtype, shape, offsets = map(entry.get, ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
        if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(entry) != 3:
            raise refuse(f"tensor {short(name)} is {short(entry)}: dtype, shape and data_offsets (lists of sizes) are expected")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise refuse(f"tensor {short(name)} has dtype {short(dtype)}", f"convert it to one of {', '.join(_DTYPES)}")
        tensors[name], (start, end) = Info(path, dtype, tuple(shape)), offsets
        if end - start != tensors[name].bytes:
            raise refuse(f"tensor {short(name)}: {dtype} {shape} is {tensors[name].bytes} bytes, data_offsets say {end - start}")
        spans.append((start, end, name))
    for start, end, name in sorted(spans):
        if start != at:
            raise refuse(f"tensor {short(name)}: data start at {start} where {at} is expected (overlap or hole)")
        at = end
    if at != size - 8 - length:
        raise refuse(f"header describes {at} bytes of data, the file holds {size - 8 - length} (truncated?)")
    return tensors


def _sizes(value) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _unique(pairs: list) -> dict:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError(f"key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} appears twice")
    return values


def unpickle(path: str):
    """What a pickle holds, on the CPU. torch's weights-only unpickler builds tensors and containers and calls nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")             # of other pickle protocols: the refusal says it
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_pickle(path: str) -> dict[str, torch.Tensor]:
    """A state dict from a pickle."""
    try:
        loaded = unpickle(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError,
            AssertionError, struct.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MinispecError(f"{path}: torch's weights-only loading refuses it ({short(reason)}); convert it to model.safetensors "
                            "where you trust it") from None
    if not isinstance(loaded, dict) or not all(
            isinstance(k, str) and isinstance(v, torch.Tensor) and v.layout == torch.strided and v.dtype in _DTYPES.values()
            and v.device.type == "cpu" for k, v in loaded.items()):
        raise MinispecError(f"{path}: holds more than named plain tensors; save the state dict alone, as model.safetensors")
    return loaded
