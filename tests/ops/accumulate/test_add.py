import math

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from hypothesis import given
from hypothesis import strategies as st
from support import VALUE_TYPES, bits_of, encode, read, write_index
from tiers import PARTS, examples

from gradtool import BadInputError, NonFiniteError, accumulate, norm, tuning


def test_a_known_result(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, 2, 3), f32(4, 5, 6))
    result = accumulate(grads[0], into=path, per_gradient=True)
    assert read(path)["a"].tolist() == [5, 7, 9]
    assert (result.norm_before, result.norm_after) == (math.sqrt(14), math.sqrt(155))
    assert (result.taken, result.skipped, result.weight_sum, result.updated, result.output.dry_run) == (
        1,
        0,
        1.0,
        True,
        False,
    )
    assert (result.sum_norm, result.coef, result.clipped, result.call.warnings) == (None, None, False, ())
    assert (result.call.files, result.call.tensors, result.call.elements, result.max_abs) == (2, 1, 3, 9.0)
    assert (result.output.files_written, result.output.bytes_written) == (1, path.stat().st_size)
    (row,) = result.per_gradient
    assert (row.weight, row.taken, row.norm, row.file) == (1.0, True, math.sqrt(77), str(grads[0]))
    assert (row.cosine, row.distance) == (1.0, 0.0)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=50))
def test_float32_into_float32_is_a_float32_add_bit_for_bit(tmp_path_factory, pairs):
    old, grad = np.array(pairs, np.float32).T
    path, grads = lay_out(tmp_path_factory.getbasetemp(), old, grad)
    accumulate(grads, into=path, nonfinite="propagate", fsync=False)
    with np.errstate(all="ignore"):
        expected, found = old + grad, read(path)["a"]
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(bits_of(found)[~np.isnan(found)], bits_of(expected)[~np.isnan(expected)])


def test_many_small_bf16_gradients_lose_nothing(tmp_path):
    path, grads = lay_out(tmp_path, encode([256], "BF16"), *[encode([0.5], "BF16")] * 64)
    accumulate(grads, into=path)
    assert read(path)["a"].astype(float).tolist() == [288.0]


def test_the_order_is_the_one_given(tmp_path):
    path, (big, one, minus) = lay_out(tmp_path, np.zeros(1), np.array([1e17]), np.array([1.0]), np.array([-1e17]))
    accumulate([big, minus, one], into=path, overwrite=True)
    assert read(path)["a"].tolist() == [1.0]
    accumulate([big, one, minus], into=path, overwrite=True)
    assert read(path)["a"].tolist() == [0.0]


@pytest.mark.parametrize("ours", VALUE_TYPES)
@pytest.mark.parametrize("theirs", VALUE_TYPES)
def test_any_type_goes_into_any_type(tmp_path, ours, theirs):
    path, grads = lay_out(tmp_path, encode([1, -2, 0.5], ours), encode([2, 4, 0.25], theirs))
    accumulate(grads, into=path, weight=[-2])
    assert read(path)["a"].dtype == encode([0], ours).dtype
    assert read(path)["a"].astype(float).tolist() == [-3, -10, 0]


def test_overwrite_drops_the_old_content_even_nan(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan, math.inf), f32(1, 2), f32(3, -4))
    result = accumulate(grads, into=path, overwrite=True)
    assert read(path)["a"].tolist() == [4, -2]
    assert (result.norm_before, result.norm_after) == (None, math.sqrt(20))


def test_overwriting_keeps_the_sign_of_a_zero(tmp_path):
    path, grads = lay_out(tmp_path, f32(5, 5), f32(-0.0, 0.0))
    accumulate(grads, into=path, overwrite=True)
    assert bits_of(read(path)["a"]).tolist() == [0x8000_0000, 0]


def test_each_gradient_has_its_weight(tmp_path):
    path, grads = lay_out(tmp_path, f32(100), f32(1), f32(1), f32(1))
    result = accumulate(grads, into=path, weight=[2, -0.5, 0], per_gradient=True)
    assert read(path)["a"].tolist() == [101.5]
    assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([2, -0.5, 0], 1.5)
    accumulate(grads[0], into=path, weight=-1.5)
    assert read(path)["a"].tolist() == [100]


def test_a_mean_divides_the_gradients_and_not_what_was_there(tmp_path):
    path, grads = lay_out(tmp_path, f32(10, 20), f32(3, 6), f32(1, 1))
    accumulate(grads, into=path, weight=[2, 1], mean=True)
    assert read(path)["a"].tolist() == [np.float32(10 + 7 / 3), np.float32(20 + 13 / 3)]
    accumulate(grads, into=path, mean=True, overwrite=True)
    assert read(path)["a"].tolist() == [2, 3.5]


def test_a_sum_beyond_the_type_is_an_error_that_names_the_tensor_unless_it_is_clipped(tmp_path):
    path, grads = lay_out(
        tmp_path, {"fine": f32(1), "hot": encode([1, 60_000], "F16")}, {"fine": f32(1), "hot": encode([0, 6e4], "F16")}
    )
    for options in ({}, {"dry_run": True}, {"nonfinite": "skip"}, {"max_norm": 1e5}):
        assert refused(NonFiniteError, tmp_path, path, grads, **options) == [("overflow", "hot", "buffer")]
    with pytest.raises(NonFiniteError, match=r"1 result overflows F16, the first at \[1\]") as caught:
        accumulate(grads, into=path)
    assert caught.value.exit_code == 1
    result = accumulate(grads, into=path, max_norm=1000, eps=0)
    assert (result.sum_norm, result.clipped) == (math.sqrt(120_000**2 + 5), True)
    assert read(path)["hot"][1] == 1000.0


def test_propagate_lets_a_sum_become_infinite(tmp_path):
    path, grads = lay_out(tmp_path, encode([60_000, 1], "F16"), encode([60_000, 1], "F16"))
    result = accumulate(grads, into=path, nonfinite="propagate")
    assert read(path)["a"].tolist() == [math.inf, 2]
    assert (result.inf, result.norm_after) == (1, math.inf)


@pytest.mark.parametrize(("norm_type", "sum_norm"), [(2, 5.0), (1, 7.0), (math.inf, 4.0)])
def test_the_float64_sum_is_clipped_with_one_rounding(tmp_path, norm_type, sum_norm):
    path, grads = lay_out(tmp_path, encode([1, 1], "BF16"), f32(2, 3))
    result = accumulate(grads, into=path, max_norm=0.7, norm_type=norm_type, eps=0)
    assert (result.sum_norm, result.coef, result.clipped, result.norm_type) == (
        sum_norm, 0.7 / sum_norm, True, norm_type,
    )  # fmt: skip
    assert read(path)["a"].tobytes() == encode(np.array([3.0, 4.0]) * (0.7 / sum_norm), "BF16").tobytes()
    assert result.norm_after == norm(path, norm_type=norm_type).norm


def test_a_sum_within_the_limit_is_not_clipped(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, 1), f32(2, 3))
    result = accumulate(grads, into=path, max_norm=6)
    assert (result.sum_norm, result.coef, result.clipped, result.norm_before) == (5.0, 1.0, False, math.sqrt(2))
    assert read(path)["a"].tolist() == [3, 4]


@pytest.mark.parametrize(("eps", "coef"), [(1e-6, 1 / (5 + 1e-6)), (0, 0.2)])
def test_eps(tmp_path, eps, coef):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(3, 4))
    assert accumulate(grads, into=path, max_norm=1, eps=eps, dry_run=True).coef == coef
    result = accumulate(grads, into=path, clip_each=1, eps=eps, dry_run=True, per_gradient=True)
    assert result.per_gradient[0].coef == coef


def test_propagate_goes_on(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, math.nan, 3), f32(math.inf, 1, 1))
    result = accumulate(grads, into=path, nonfinite="propagate")
    assert np.array_equal(read(path)["a"], [math.inf, math.nan, 4], equal_nan=True)
    assert (result.nan, result.inf) == (1, 1)
    result = accumulate(grads, into=path, nonfinite="propagate", max_norm=1)
    assert math.isnan(result.coef)
    assert np.isnan(read(path)["a"]).all()


def test_empty_files_empty_tensors_and_scalars(tmp_path):
    odd = {"none": np.zeros((0, 3), np.float32), "scalar": encode(10, "F32"), "row": np.zeros((1, 0), np.float32)}
    path, grads = lay_out(tmp_path, odd, {name: array.reshape(array.shape) for name, array in odd.items()})
    result = accumulate(grads, into=path)
    assert (read(path)["scalar"].tolist(), read(path)["scalar"].shape, result.norm_after) == (20.0, (), 20.0)
    path, grads = lay_out(tmp_path, {}, {})
    assert (accumulate(grads, into=path).norm_after, accumulate(grads, into=path).output.files_written) == (0.0, 0)
    path, grads = lay_out(tmp_path, np.zeros(0, np.float32), encode(5, "F32"))
    assert accumulate(grads, into=path).norm_after == 0.0


@pytest.mark.parametrize(
    ("old", "grad", "options"),
    [
        ([1e200] * 3, [2e200] * 3, {}),
        ([1e200] * 3, [-1e200, 1e-200, 0], {}),
        ([1e-200] * 3, [1e-200] * 3, {}),
        ([1e200] * 3, [1e200] * 3, {"max_norm": 1e-3}),
        ([1e200] * 3, [1e200] * 3, {"max_norm": 1e199, "norm_type": 1}),
        ([1e150] * 3, [1e150] * 3, {"norm_type": math.inf}),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_norms_are_those_of_the_files_even_where_squares_overflow(tmp_path, old, grad, options, dry_run):
    left = np.full(2, 3e190)
    path, grads = lay_out(tmp_path, {"a": np.array(old), "left": left}, {"a": np.array(grad)})
    order = {"norm_type": options.get("norm_type", 2)}
    before = norm(path, **order).norm
    result = accumulate(grads, into=path, missing="skip", dry_run=dry_run, **options)
    assert result.norm_before == before
    if dry_run:
        accumulate(grads, into=path, missing="skip", **options)
    assert result.norm_after == norm(path, **order).norm
    assert math.isfinite(result.norm_after)


def test_a_sum_beyond_the_squares_is_clipped_and_not_turned_to_zeros(tmp_path):
    path, grads = lay_out(tmp_path, np.full(4, 1e200), np.full(4, 1e200))
    result = accumulate(grads, into=path, max_norm=1e200, eps=0)
    assert (result.sum_norm, result.coef) == (4e200, 0.25)
    assert read(path)["a"].tolist() == [5e199] * 4


def test_a_norm_beyond_float64_is_refused_rather_than_clipped_to_zero(tmp_path):
    path, grads = lay_out(tmp_path, np.full(4, 1.7e308), np.zeros(4), np.full(4, 1.7e308))
    refused(BadInputError, tmp_path, path, grads[:1], max_norm=1)
    refused(BadInputError, tmp_path, path, grads[1:], overwrite=True, clip_each=1)


@st.composite
def cases(draw):
    """Shapes of the buffer, types on both sides, and axes along which each gradient is broadcast."""
    sizes = st.sampled_from([(), (0,), (5,), (2049,), (65_537,), (3, 40_001), (2, 3, 7), (300_001,)])
    shapes = draw(st.lists(sizes, min_size=1, max_size=5))
    ours = [draw(st.sampled_from(["F64", "F32"])) for _ in shapes]
    grads = []
    for _ in range(draw(st.integers(1, 3))):
        narrow = [tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape) for shape in shapes]
        cut = [draw(st.integers(0, 1)) if one and one[0] == 1 else 0 for one in narrow]
        types = [draw(st.sampled_from(VALUE_TYPES)) for _ in shapes]
        grads.append([(one[skip:], dtype) for one, skip, dtype in zip(narrow, cut, types, strict=True)])
    return shapes, ours, grads


def wide_sum(old, grads, weights, *, overwrite, mean):
    """The contract in numpy: float64, in the order given."""
    total = np.full(old.shape, -0.0) if overwrite or mean else old.astype(np.float64)
    for grad, weight in zip(grads, weights, strict=True):
        total += weight * np.broadcast_to(grad.astype(np.float64), old.shape)
    if mean:
        total = total / math.fsum(weights)
        total = total if overwrite else total + old.astype(np.float64)
    return total.astype(old.dtype)


# Files of the buffer, threads, tiles in a block, bytes of a batch, elements of a window.
LAYOUTS = ((1, 1, 4, 2 << 20, 1 << 18), (2, 2, 1, 1, 1000), (3, 8, 3, 100_000, 1))


@PARTS
def test_the_same_bits_for_any_threads_blocks_and_shards(tmp_path_factory, part):
    @examples(30, part)
    @given(case=cases(), seed=st.integers(0, 9), overwrite=st.booleans(), mean=st.booleans())
    def check(case, seed, overwrite, mean):
        check_bits(tmp_path_factory.mktemp("bits"), case, seed, overwrite=overwrite, mean=mean)

    check()


def check_bits(folder, case, seed, *, overwrite, mean):
    shapes, ours, theirs = case
    rng = np.random.default_rng(seed)
    old = {f"t{i}": encode(rng.standard_normal(shape), ours[i]) for i, shape in enumerate(shapes)}
    grads = [{f"t{i}": encode(rng.standard_normal(s) * 4, t) for i, (s, t) in enumerate(one)} for one in theirs]
    weights = [0.3, -1.7, 2.0][: len(grads)]
    expected = {
        name: wide_sum(array, [one[name] for one in grads], weights, overwrite=overwrite, mean=mean).tobytes()
        for name, array in old.items()
    }
    clipped = None
    for count, threads, tiles, batch, window in LAYOUTS:
        home = folder / str(count)
        places = [sharded(home / f"g{k}", dict(reversed(one.items())), 1 + k % 2) for k, one in enumerate(grads)]
        options = {"weight": weights, "overwrite": overwrite, "mean": mean, "threads": threads, "fsync": False}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "SUM_TILES", tiles)
            patch.setattr(tuning, "BATCH_BYTES", batch)
            patch.setattr(tuning, "WINDOW_ELEMENTS", window)
            buffer = sharded(home / "buffer", old, count)
            before = norm(buffer).norm
            result = accumulate(places, into=buffer, max_norm=1, clip_each=9, output_dir=home / "clipped", **options)
            clipped = clipped or (result.norm_after, result.sum_norm, result.coef, values_in(home / "clipped"))
            found = (result.norm_after, result.sum_norm, result.coef, values_in(home / "clipped"))
            assert found == clipped
            result = accumulate(places, into=buffer, **options)
        assert values_in(buffer) == expected
        assert result.norm_before == (None if overwrite else before)
        assert result.norm_after == norm(buffer).norm


def sharded(folder, tensors, count):
    names = list(tensors)
    write_index(folder, {f"{i}.safetensors": {n: tensors[n] for n in names[i::count]} for i in range(count)})
    index = folder / "model.safetensors.index.json"
    if len(names) < count:
        index.unlink()  # A shard without a tensor is in no index.
    return folder


def values_in(folder):
    return {name: array.tobytes() for file in folder.glob("*.safetensors") for name, array in read(file).items()}


def test_clipping_the_sum_is_about_what_is_added_to(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(3), "z": f32(math.nan)}, {"a": f32(1)})
    result = accumulate(grads, into=path, missing="skip", max_norm=1, eps=0)
    assert (result.sum_norm, result.coef, read(path)["a"].tolist()) == (4.0, 0.25, [1.0])
    assert math.isnan(result.norm_after)


def test_an_overflow_is_told_of_the_tensors_that_have_one(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(3e38), "z": f32(math.nan)}, {"a": f32(3e38)})
    assert refused(NonFiniteError, tmp_path, path, grads, missing="skip") == [("overflow", "a", "buffer")]


def test_an_infinite_limit_limits_nothing_whatever_the_norm(tmp_path):
    huge = np.full(4, 1.7e308)
    path, grads = lay_out(tmp_path, huge, np.zeros(4))
    assert accumulate(grads, into=path, max_norm=math.inf).coef == 1.0
    assert read(path)["a"].tolist() == huge.tolist()
    assert refused(BadInputError, tmp_path, path, grads, max_norm=1) == [("input", None, None)]
    assert refused(BadInputError, tmp_path, grads[0], path, clip_each=1) == [("input", None, "buffer")]
    assert accumulate(path, into=grads[0], clip_each=math.inf, per_gradient=True).per_gradient[0].coef == 1.0


def test_a_coefficient_that_underflows_is_refused(tmp_path):
    path, grads = lay_out(tmp_path, np.full(4, 1e300), np.zeros(4), np.full(4, 1e300))
    for options in ({"max_norm": 1e-30}, {"max_norm": 1e-8}):
        assert refused(BadInputError, tmp_path, path, grads, **options) == [("input", None, None)]
    for options in ({}, {"weight": [0, 1e-250]}, {"weight": [0, -1e-250]}):
        limit = 1e-30 if not options else 1e230
        assert refused(BadInputError, tmp_path, path, grads, clip_each=limit, **options) == [("input", None, "g2")]
    assert accumulate(grads, into=path, max_norm=0).coef == 0.0
    assert accumulate(grads, into=path, clip_each=0, per_gradient=True).per_gradient[1].coef == 0.0
    # A weight is taken as it is given.
    assert (
        accumulate(grads[1], into=path, weight=1e-310, clip_each=1e305, overwrite=True, per_gradient=True)
        .per_gradient[0]
        .coef
        == 1.0
    )
    assert read(path)["a"].tolist() == [1e-310 * 1e300] * 4


def test_zeros_before_and_after_and_what_rounding_lost(tmp_path):
    path, grads = lay_out(
        tmp_path, encode([0, 0, 0, 1], "F16"), f32(1e-9, 1e-5, 0, -1), encode([0, 0, 2.0**-24, 0], "F16")
    )
    result = accumulate(grads, into=path)
    assert (result.zeros, result.zeros_before) == (2, 3)
    (warning,) = result.call.warnings
    # An exact subnormal has lost nothing, nor has a sum that is 0.
    assert warning.message.startswith("of 3 values other than 0, 1 became 0 and 1 more than before are subnormal")
    # A buffer keeps its type.
    assert warning.message.endswith("too small for F16")
    assert warning.hint == "use a buffer of F32 to keep them"
    new = accumulate(grads, output=tmp_path / "new", dtype="F16")
    assert new.call.warnings[0].hint == 'use dtype="F32" with output or output_dir to keep them'
    again = accumulate(grads, into=path, overwrite=True)
    assert (again.zeros, again.zeros_before) == (1, None)
    assert accumulate(grads, into=path, update=False).zeros_before == 1
    clipped = accumulate(grads, into=path, max_norm=1e-6)
    assert (clipped.zeros_before, [one.code for one in clipped.call.warnings]) == (1, ["underflow"])
    assert accumulate(grads[1], into=path, weight=[0.0]).call.warnings == ()
