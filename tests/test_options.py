"""What is declared of options; that commands, functions and docs agree with it is tested in test_api and test_docs."""

import math
from inspect import Parameter
from types import NoneType

import pytest

from gradtool import UsageError, options
from gradtool.backends.storage import STORAGE
from gradtool.declare import declared_of

CLASSES = [
    options.NormOptions,
    options.DiffOptions,
    options.CheckOptions,
    options.InfoOptions,
    options.ClipOptions,
    options.AccumulateOptions,
    options.ZeroOptions,
    options.LayerNormOptions,
    options.RecoverOptions,
    options.DisplayOptions,
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_default_is_a_value_that_the_option_takes(kind):
    for entry in declared_of(kind).values():
        if entry.default is Parameter.empty:
            continue
        value = entry.parse(entry.default)
        assert value == (list(entry.default) if entry.default == () else entry.default)
        assert type(value) in {bool, int, float, str, list, NoneType}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_help_is_a_sentence_and_every_value_has_a_name(kind):
    for entry in declared_of(kind).values():
        assert entry.help[0].isupper() or entry.name == "nonfinite"
        assert entry.help.endswith(".")
        assert bool(entry.metavar) == (entry.types[0] is not bool and entry.name != "progress"), entry.name


def test_the_types_of_a_buffer_are_those_that_carry_values():
    assert declared_of(options.AccumulateOptions)["dtype"].choices == tuple(STORAGE)


def test_options_come_in_the_order_of_their_groups():
    groups = [entry.group for entry in declared_of(options.ClipOptions).values()]
    assert list(dict.fromkeys(groups)) == ["Arguments", "Options", "Selection", "Output", "Compute", "Python"]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)


def test_what_is_given_is_converted_and_the_rest_has_its_default():
    clip_options = options.ClipOptions(max_norm=1, include="a", output=b"x")
    assert vars(clip_options).keys() == declared_of(options.ClipOptions).keys()
    assert (type(clip_options.max_norm), clip_options.include, clip_options.output) == (float, ["a"], "x")
    assert (clip_options.eps, clip_options.exclude, clip_options.threads) == (1e-6, [], None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_norm": "much"}, "max_norm must be a number, not 'much'"),
        ({"max_norm": -1}, "max_norm must be 0 or more, not -1.0"),
        ({"max_norm": math.nan}, "max_norm must be 0 or more, not nan"),
        ({"eps": math.inf}, "eps must be 0 or more and finite, not inf"),
        (
            {"norm_type": 0},
            "norm_type must be 0.01 or more, not 0.0: below that, rounding errors exceed 1e-12",
        ),
        ({"norm_type": None}, "norm_type must be a number, not None"),
        ({"unscale": 0}, "unscale must be above 0 and finite, not 0.0"),
        ({"nonfinite": "skip"}, "nonfinite must be one of error, propagate, zero, not 'skip'"),
        ({"write": ["inplace"]}, r"write must be one of replace, inplace, not \['inplace'\]"),
        ({"backend": "tpu"}, "backend must be one of auto, cpu, cuda, not 'tpu'"),
        ({"threads": "2.0"}, "threads must be a whole number, not '2.0'"),
        ({"threads": b"2"}, "threads must be a whole number, not b'2'"),
        ({"threads": 10**5000}, r"threads must be a whole number below 2\^63"),
        ({"eps": 10**5000}, "eps is beyond the range of float64"),
        ({"max_norm": -(10**400)}, "max_norm is beyond the range of float64"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"device": -1}, "device must be 0 or more, not -1"),
        ({"threads": True}, "threads must be a whole number, not True"),
        ({"max_norm": True}, "max_norm must be a number, not True"),
        ({"dry_run": "no"}, "dry_run must be True or False, not 'no'"),
        ({"fsync": None}, "fsync must be True or False, not None"),
        ({"include": 5}, "include must be a string or several, not 5"),
        ({"include": 0}, "include must be a string or several, not 0"),
        ({"output": 5}, "output must be a string or a path object, not 5"),
        ({"lock_timeout": -1}, "lock_timeout must be 0 or more and finite, not -1.0"),
    ],
)
def test_a_value_of_a_wrong_type_or_out_of_range_is_a_usage_error(given, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        options.ClipOptions(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": "2"}, "weight must be a number or several, not '2'"),
        ({"weight": [1, math.inf]}, r"weight must be finite, not \[1.0, inf\]"),
        ({"weight_key": ""}, "weight_key must be a non-empty string, not ''"),
        ({"dtype": "I32"}, "dtype must be one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2, not 'I32'"),
    ],
)
def test_values_that_accumulate_cannot_take_are_refused(given, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        options.AccumulateOptions(**given)


def test_a_choice_may_be_given_in_any_case_and_is_kept_as_it_is_declared():
    given = {"dtype": "bf16", "backend": "CPU", "nonfinite": "Skip", "write": "replace"}
    parsed = options.AccumulateOptions(**given)
    assert {name: getattr(parsed, name) for name in given} == {
        "dtype": "BF16", "backend": "cpu", "nonfinite": "skip", "write": "replace",
    }  # fmt: skip
    for name in STORAGE:
        assert options.AccumulateOptions(dtype=name.lower()).dtype == name


def test_a_limit_that_is_no_number_is_a_usage_error():
    with pytest.raises(UsageError, match="^fail_above must be a number, not nan$"):
        options.NormOptions(fail_above=math.nan)
