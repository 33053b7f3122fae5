"""Gradients whose sums of squares leave float64: the same norms for any split, thread count and backend."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import encode, read, write, write_index

from gradtool import accumulate, clip, norm, tuning
from gradtool.backends.choose import Choice

# Tensors of about 2^exponent: in range, too large, too small for squares; some with tiles of several kinds.
TENSORS = st.lists(
    st.tuples(
        st.sampled_from([1, 37, 2049, 65_537, 80_000]),
        st.lists(st.sampled_from([-1060, -700, -460, 0, 490, 700, 1000]), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def made(tensors, seed):
    """Tensors in F64 and, every third, in BF16, whose values each have 12 bits at most."""
    rng, arrays = np.random.default_rng(seed), {}
    for number, (size, exponents) in enumerate(tensors):
        values = (1 + rng.integers(0, 1 << 11, size) / 2**11) * rng.choice([-1.0, 1.0], size)
        parts = np.array_split(values, len(exponents))
        array = np.concatenate([np.ldexp(part, one) for part, one in zip(parts, exponents, strict=True)])
        arrays[f"t{number}"] = encode(values, "BF16") if number % 3 == 2 else array
    return arrays


def squares(arrays):
    """The exact sum of all squares."""
    units = 0
    for array in arrays:
        for value in array.astype(np.float64).tolist():
            numerator, denominator = value.as_integer_ratio()
            units += ((numerator << 1074) // denominator) ** 2
    return Fraction(units, 1 << 2148)


def assert_within_one_ulp(found, arrays):
    ulp, exact = Fraction(math.ulp(found)), squares(arrays)
    assert (Fraction(found) - ulp) ** 2 <= exact <= (Fraction(found) + ulp) ** 2


def shards(folder, arrays, count):
    return write_index(
        folder, {f"{i}.safetensors": {name: arrays[name] for name in list(arrays)[i::count]} for i in range(count)}
    )


@settings(max_examples=8)
@given(tensors=TENSORS, seed=st.integers(0, 9), norm_type=st.sampled_from([1, 2]))
def test_norms_are_exact_and_do_not_depend_on_the_split(tmp_path_factory, backend, tensors, seed, norm_type):
    arrays, folder = made(tensors, seed), tmp_path_factory.mktemp("split")
    expected = norm(write(folder / "one", arrays), norm_type=norm_type, per_tensor=True, threads=1)
    if norm_type == 2:
        assert_within_one_ulp(expected.norm, arrays.values())
        for row in expected.per_tensor:
            assert_within_one_ulp(row.norm, [arrays[row.name]])
    layouts = ((1, 1, 512 << 10), (1, 4, 3_000_000), (3, 1, 3_000_000), (3, 4, 512 << 10))
    for number, (count, threads, block_bytes) in enumerate(layouts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "BLOCK_BYTES", block_bytes)
            patch.setattr("gradtool.engines.choose.choose_backend", lambda *_: Choice(backend, "for a test"))
            index = shards(folder / str(number), arrays, count)
            result = norm(index, norm_type=norm_type, per_tensor=True, threads=threads)
        assert result.norm == expected.norm
        assert {row.name: row.norm for row in result.per_tensor} == {row.name: row.norm for row in expected.per_tensor}


@pytest.mark.parametrize("exponent", [-1000, -500, 600, 1000])
@pytest.mark.parametrize("options", [{}, {"write": "inplace"}, {"dry_run": True}, {"per_tensor": True}])
def test_clipping_measures_what_it_writes(tmp_path, exponent, options):
    path = write(tmp_path / "x.safetensors", made([(70_000, [exponent, -700]), (9, [exponent])], 3))
    before = norm(path).norm
    limit = before * 2.0**-20
    result = clip(path, max_norm=limit, eps=0, **options)
    assert result.norm_before == before
    assert result.coef == (None if "per_tensor" in options else 2.0**-20)
    if not options.get("dry_run"):
        assert result.norm_after == norm(path).norm
        assert_within_one_ulp(result.norm_after, read(path).values())
    assert 0 < result.norm_after < math.inf


@pytest.mark.parametrize("exponent", [-1000, 600, 1000])
@pytest.mark.parametrize("write_mode", ["replace", "inplace"])
def test_accumulating_measures_before_and_after_in_one_pass(tmp_path, exponent, write_mode):
    old, grad = ({"a": made([(140_000, [exponent])], seed)["t0"], "b": np.ones(5)} for seed in (1, 2))
    path, other = write(tmp_path / "x.safetensors", old), write(tmp_path / "g.safetensors", {"a": grad["a"]})
    before = norm(path).norm
    result = accumulate(other, into=path, write=write_mode, missing="skip")
    assert (result.norm_before, result.norm_after) == (before, norm(path).norm)
    assert_within_one_ulp(result.norm_before, old.values())
    assert_within_one_ulp(result.norm_after, read(path).values())
    # What is added to, what is added, and what is only measured.
    assert result.call.timings.read_bytes <= path.stat().st_size + 140_000 * 8 + 5 * 8
