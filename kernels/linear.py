"""A matrix product with a weight [out, in], by the fastest library that is there; and products whose bits do not depend on the rows."""
import torch
import torch.nn.functional as F

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x, weight):
    """x [..., in], weight [out, in] -> [..., out].

    In fp32 on the CPU torch's own product is MKL's, which copies the weight into panels at every call; oneDNN reads it where it lies.
    At 2 to 7 rows, 2 threads: 2.1 times faster at [384, 384], 2.4 times at [4096, 384] (bench/results/cpu-default.json has the sum of it).
    """
    if ONEDNN and x.is_cpu and x.dtype == torch.float32 and x.numel():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def rowwise(function, x, exact=False):
    """function(x) for a function of each row alone; x [B, R, ...].

    exact: 16 rows at a time, the last block padded with zeros. Libraries choose an algorithm, and with it the order of sums, by the number
    of rows; of one shape a row has the same bits in any company.
    """
    if not exact:
        return function(x)
    rows = x.flatten(0, 1)
    blocks = torch.cat([rows, rows.new_zeros(-len(rows) % 16, *rows.shape[1:])]).split(16)
    return torch.cat([function(block[None])[0] for block in blocks])[:len(rows)].unflatten(0, x.shape[:2])
