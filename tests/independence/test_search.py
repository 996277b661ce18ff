"""A search for programs of which the reading claims more than is so.

Programs are drawn at random (`tests/programs.py`), and every tensor of them that is claimed to be shared, sized or each
example's own is held against brute force (`tests/brute.py`): its entries, its lengths and its numbers, in batches of
1, 3, 4, 7, 299 and 300 examples, of 2,100 where a type of 11 bits is met, and over many seeds where it is noise.

Whole steps are searched too (`tests/steps.py`): by how much one example moves the clipped sum of a program, where a
tensor of the batch has one row, two, one less than there are examples, or no axis at all.

`TFDP_REC_PROGRAMS=100000 pytest tests/independence/test_search.py -m slow -s` searches for a night.
"""

import os
import traceback
from collections import Counter

import numpy as np
import pytest
from brute import Held
from programs import FAMILIES, LEAVES, Program, batch
from steps import ROWS, moved

from tfdp_rec.core.ground.refused import NotPrivate

PROGRAMS = int(os.environ.get("TFDP_REC_PROGRAMS", "1000"))
FIRST_SEED = int(os.environ.get("TFDP_REC_FIRST_PROGRAM", "0"))
FEW = 3  # programs of a family


def search(seeds, family=None):
    """How many programs and claims there were; the first operation of each program whose claim is false."""
    counts, found = Counter(), {}
    for seed in seeds:
        program = Program(seed, FAMILIES.get(family))
        try:
            held = Held(program, LEAVES)
        except NotPrivate:
            counts["refused"] += 1
            continue
        except AssertionError as problem:  # TensorFlow cannot differentiate some branches within loops
            if "tensorflow" not in traceback.extract_tb(problem.__traceback__)[-1].filename:
                raise
            counts["not made"] += 1
            continue
        if any(tensor.shape.rank and tensor.shape[0] not in (None, spec.shape[0]) for tensor, spec in held.specs):
            counts["of one size"] += 1  # TensorFlow wrote a length into an argument: no batch of another can be given
            continue
        counts["programs"] += 1
        counts["claims"] += len(held.claimed)
        for operation, (tensor, said) in held.faults(batch, np.random.default_rng(seed)).items():
            made_of = ", ".join(type(held.walk.value(t)).__name__ for t in operation.inputs)
            about = f"{operation.type}({made_of}) is claimed to be {type(held.walk.value(tensor)).__name__}"
            found.setdefault(about, f"program {seed} of {family}, {program.said}: {said[:300]}")
            counts[about] += 1
    return counts, found


def none(counts, found):
    assert not found, "\n".join(f"{about}, {counts[about]} times: {said}" for about, said in found.items())
    return counts


@pytest.mark.fast_cases("places", "flat numbers", "functions", "noise")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_claim_about_a_few_programs_is_false(family):
    counts = none(*search(range(FEW), family))
    assert counts["claims"] > 20 * counts["programs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_no_claim_about_a_program_is_false(family):
    counts, found = search(range(FIRST_SEED, FIRST_SEED + PROGRAMS), family)
    print(f"\n{family or 'all'}: {dict(counts)}")
    none(counts, found)


def steps(seeds, odd):
    """The programs whose clipped sum one example moves by more than it may, and by how many clips."""
    found = {(family, seed): moved(seed, family, odd) for family in STEPS for seed in seeds}
    return {which: clips for which, clips in found.items() if clips is not None and clips > 1.0}, found


STEPS = ("own rows", "lengths", "any operation")  # each found a tensor of one row in 986fe75 with its first program


@pytest.mark.fast_cases("one row")
@pytest.mark.parametrize("odd", ["as it should be", "one row"])
def test_no_step_is_moved_by_more_than_the_clip(odd):
    """62 clips with one row in 986fe75."""
    wrong, found = steps(range(1), odd)
    assert not wrong, wrong
    assert odd == "one row" or any(clips is not None for clips in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("odd", ROWS)
def test_no_step_of_several_programs_is_moved_by_more_than_the_clip(odd):
    wrong, found = steps(range(FIRST_SEED, FIRST_SEED + max(PROGRAMS // 100, 1)), odd)
    print(f"\n{odd}: {len(found)} programs, {sum(clips is None for clips in found.values())} refused")
    assert not wrong, wrong
