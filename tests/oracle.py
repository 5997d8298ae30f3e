"""What equal means here, and transformers as an oracle."""
import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from minispec.kernels.choose import Sampling, process
from minispec.kernels.noise import gumbel

from . import naive

TIE = 1e-4      # of log-probability: a smaller gap between the two best is no preference in fp32


def assert_same(plain, other, score, params):
    """Equal ids, finish reason, text and log-probabilities, up to a first difference that is a tie, which is printed.

    score: an Engine for the same target; params: the SamplingParams of this request. Returns True when all of it was equal.
    """
    differ = next((i for i, (a, b) in enumerate(zip(plain.ids, other.ids)) if a != b), None)
    if differ is not None:
        gap = choice_gap(plain.prompt_ids, plain.ids[:differ], score, params)
        two = f"{plain.ids[differ]} and {other.ids[differ]}"
        assert gap < TIE, f"ids differ at {differ}: {two}, where the two best are {gap:.3g} apart"
        print(f"tie at {differ}: {two}, gap {gap:.2g}")
        return False
    assert (plain.ids, plain.finish_reason, plain.text) == (other.ids, other.finish_reason, other.text)
    assert (plain.logprobs is None) == (other.logprobs is None)
    if plain.logprobs is not None:
        assert len(other.logprobs) == len(other.ids)
        assert plain.logprobs == pytest.approx(other.logprobs, abs=TIE)
    return True


def choice_gap(prompt, ids, score, params):
    """Distance between the two best scores of the choice after prompt + ids."""
    logits = score.score([*prompt, *ids]).logits[-1:].float()[None]
    scores = process(logits, Sampling.build([params], [prompt], [ids], logits.shape[-1]))[0, 0]
    if params.temperature:
        at = torch.tensor(len(prompt) + len(ids))
        scores = scores + gumbel(torch.tensor(params.seed), at, torch.arange(len(scores)))
    best = scores.topk(2).values
    return (best[0] - best[1]).item()


def assert_mixed(outputs, deepest):
    """Some draft tokens were accepted and some rejected, or a comparison shows nothing. deepest: what a round can accept."""
    outputs = outputs if isinstance(outputs, list) else [outputs]
    full_rounds = [a for out in outputs for a in out.accepted[:-1]]         # the last one may be cut
    assert sum(full_rounds) > 0, "nothing was accepted"
    assert min(full_rounds) < deepest, "nothing was rejected"


def assert_varied(outputs, share=0.3):
    """No short loop: the share of distinct bigrams."""
    pairs = [pair for out in outputs for pair in zip(out.ids, out.ids[1:])]
    assert len(set(pairs)) / len(pairs) > share


def transformers_model(directory, folder):
    """The checkpoint's dequantised weights in transformers' own class, fp32: DeepseekV3ForCausalLM, or V2 for a V2 config."""
    import transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    target = naive.Target(directory, torch.float32)
    config = {k: v for k, v in target.config.items() if k != "quantization_config"} | {"torch_dtype": "float32"}
    kind = "DeepseekV2" if config["model_type"] == "deepseek_v2" else "DeepseekV3"
    config["model_type"] = kind.lower().replace("v", "_v")     # kimi_k2 has no rule there that stacks experts
    folder.mkdir()
    tensors = {k: v.contiguous() for k, v in target.w.items() if not k.startswith(("vision_tower", "mm_projector"))
               and f"layers.{config['num_hidden_layers']}." not in k}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return getattr(transformers, kind + "ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()
