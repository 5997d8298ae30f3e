"""Each mistake of the list that drafts are known to suffer from, and what becomes of it here: refused, found, or impossible. None is left over."""
import re

import pytest

from minispec.doctor_finding import SEVERITIES, catalogue

from . import test_doctor_files, test_doctor_readings
from .conftest import ROOT

TESTS = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")}
# number, mistake -> (how, where): "refused" and "found" name the finding (a refusal is a finding too: the doctor reads on), which a test with
# that number builds; "impossible" names the test that shows it, in another file.
HAZARDS = {
    (1, "d2t used as absolute id"): ("refused", "d2t-absolute"),
    (2, "t2d.nonzero() used as map with frequency order"): ("found", "d2t-order"),
    (3, "d2t zero / not loaded"): ("refused", "d2t-unset"),
    (4, "d2t cast to bf16/fp16 with the model"): ("refused", "d2t-dtype"),
    (5, "lm_head[d2t] prune bug"): ("found", "head-duplicate-rows"),
    (6, "lm_head absent with Vd < V, target head used"): ("refused", "head-missing"),
    (7, "embed overwritten by target's though draft has its own"): ("impossible", "test_b02_own_embedding_and_head_are_kept"),
    (8, "tie_word_embeddings true in copied config"): ("refused", "tied-head"),
    (9, "unknown names dropped, missing tensors left at init"): ("refused", "tensor-unknown"),
    (10, "norm_before_residual mismatch"): ("found", "norm-before-residual"),
    (11, "norm_before_fc / fc_norm in the file but not applied"): ("refused", "norm-flag"),
    (12, "norm_output semantics"): ("found", "recycle-norm"),
    (13, "recycled hidden without residual"): ("found", "engine-recycle"),
    (14, "concat order hidden/embed swapped"): ("found", "halves-swapped"),
    (15, "aux concat order not ascending"): ("refused", "capture-order"),
    (16, "capture off by one layer"): ("found", "capture-layer"),
    (17, "nested/top-level ids ignored"): ("refused", "capture-list"),
    (18, "captured post-norm or layer delta without residual"): ("found", "capture-form"),
    (19, "use_aux_hidden_state ignored"): ("refused", "fusion-bypassed"),
    (20, "A hard-coded 3"): ("impossible", "test_number_of_captured_states_is_read_from_fc"),
    (21, "token/hidden shift missing"): ("found", "token-shift"),
    (22, "last prefill row uses prompt token instead of sampled"): ("found", "engine-prefill"),
    (23, "bonus not paired with last accepted aux"): ("found", "engine-pairing"),
    (24, "draft KV from drafting kept"): ("found", "engine-cache"),
    (25, "extend rows written to wrong slots after rejection"): ("found", "engine-cache"),
    (26, "hidden rows not gathered by accepted indices"): ("found", "engine-pairing"),
    (27, "target KV not compacted"): ("found", "engine-text"),
    (28, "tree mask not including prefix or self"): ("found", "engine-recycle"),
    (29, "position id of tree = index instead of depth"): ("found", "engine-recycle"),
    (30, "parent missing by tie, underflow, NaN"): ("impossible", "test_select_is_closed_under_parents"),
    (31, "branch KV lineage approximate"): ("impossible", "test_branches_keep_their_own_history"),
    (32, "duplicate siblings"): ("refused", "d2t-broken"),
    (33, "acceptance thresholds below 1, typical acceptance"): ("impossible", "test_joint"),
    (34, "p = 0 candidate accepted"): ("impossible", "test_a_forbidden_id_never_comes"),
    (35, "argmax at temperature above 0"): ("impossible", "test_conditional"),
    (36, "q not the distribution used"): ("impossible", "test_joint"),
    (37, "min_p / penalties / processors applied differently in verify"): ("impossible", "test_b45_bias_and_penalties_hold_at_every_position"),
    (38, "rope theta of the config is not the trained one"): ("found", "rope-theta"),
    (39, "rope interleaved or half"): ("found", "rope-style"),
    (40, "mscale^2 missing in the softmax scale"): ("impossible", "test_softmax_scale"),
    (41, "rope_scaling dropped or added by a converter"): ("found", "rope-scaling"),
    (42, "rope table smaller than the context"): ("impossible", "test_b29_b30_positions_past_the_drafts_own_table"),
    (43, "head_dim = hidden/heads assumed"): ("found", "head-split"),
    (44, "rms eps 1e-5 or 1e-6"): ("impossible", "test_b45_speculators_config_is_a_difference_to_class_defaults"),
    (45, "transformer_layer_config diff-serialised"): ("impossible", "test_b45_speculators_config_is_a_difference_to_class_defaults"),
    (46, "prefix hit with foreign last slot"): ("impossible", "test_b35_b37_b40_nothing_reads_a_foreign_or_free_slot"),
    (47, "draft KV not stored with an offloaded prefix"): ("impossible", "test_b39_draft_kv_of_a_chunked_prompt"),
    (48, "layers run outside the capture loop"): ("impossible", "test_logits_and_states_equal_transformers"),
    (49, "quantised/rotated or another target"): ("found", "states-unused"),
    (50, "chat template / thinking mode differs from training"): ("found", "prompts-differ"),
    (51, "fp8 draft KV"): ("impossible", "test_b12_sizes"),
    (52, "NaN hidden by a sanitiser"): ("refused", "not-finite"),
    (53, "ranks disagree on the accepted count"): ("found", "engine-text"),
    (54, "simulated acceptance left on"): ("found", "engine-text"),
    (55, "accept length with or without bonus"): ("impossible", "test_b67_accepted_counts_draft_tokens"),
    (56, "graph pad rows write into live draft slots"): ("impossible", "test_b35_b37_b40_nothing_reads_a_foreign_or_free_slot"),
    (57, "fc skipped because A * th == h"): ("found", "fusion-skipped"),
    (58, "training target off by one"): ("found", "states-last"),
    (59, "draft positions restart at 0 each round"): ("found", "engine-pairing"),
    (60, "the target's KV page table with other contents"): ("impossible", "test_cache_after_rounds_of_every_kind"),
}
# found by tests whose names carry the number (`test_13_...`), not by a row of a table of mutants
STORIES = {1: "test_story_2_a_map_stored_as_absolute_ids", 12: "test_story_5_a_sound_first_step_and_a_broken_recycle"}
SHARED = {26: 23, 28: 28, 53: 27, 54: 27}                 # the same fault as that number's, from the rounds' side


def test_all_sixty_are_here():
    assert [number for number, _ in HAZARDS] == list(range(1, 61))


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: f"{hazard[0]} {hazard[1][:40]}")
def test_no_hazard_is_left_over(hazard):
    number, (how, where) = hazard[0], HAZARDS[hazard]
    if how == "impossible":
        assert any(f"def {where}(" in text for name, text in TESTS.items() if not name.startswith("test_doctor")), where
        return
    tables = {**{key: row[2] for key, row in test_doctor_files.MUTANTS.items()}, **{key: row[2] for key, row in test_doctor_readings.MUTANTS.items()},
              **{key: row[2] for key, row in test_doctor_readings.SAVED.items()}}
    rows = [name for key, name in tables.items() if key.split()[0] == str(number)]
    if number in STORIES:
        assert f"def {STORIES[number]}(" in TESTS["test_doctor_stories.py"] and where in TESTS["test_doctor_stories.py"]
    elif where not in rows:
        names = "|".join(str(n) for n in {number, SHARED.get(number, number)})
        named = re.findall(rf"def test_(?:\d+_)*(?:{names})_\w*\((?:.|\n)*?(?=\n@|\ndef |\Z)", TESTS["test_doctor_engine.py"] + TESTS["test_doctor_readings.py"])
        assert any(where in body for body in named), f"no test builds {number} and finds {where}"
    assert where in catalogue()


def test_at_least_thirty_single_mutants_and_every_finding_is_built():
    tables = [*test_doctor_files.MUTANTS.values(), *test_doctor_readings.MUTANTS.values(), *test_doctor_readings.SAVED.values()]
    assert len(tables) > 50
    text = "".join(TESTS[name] for name in TESTS if name.startswith("test_doctor") and name != "test_doctor_hazards.py")
    assert not {name for name in catalogue() if name not in text}, "every name of the catalogue is found by some test"


def test_the_catalogue_is_whole():
    """Every name that the code says has a row, every row is said, and no cell is empty."""
    code = "".join(path.read_text("utf-8") for path in (ROOT / "minispec").glob("doctor*.py"))
    said = set(re.findall(r'"((?:[a-z0-9]+-)+[a-z0-9]+)"', code)) - {"utf-8"}
    assert catalogue().keys() == said | {f"rope-{part}" for part in ("style", "theta", "scaling")}
    for name, cells in catalogue().items():
        assert len(cells) == 4 and all(cells) and cells[0] in SEVERITIES, name
