"""`diff --rule` and `--rules`: which tensors must be how close, by name."""

import math

import numpy as np
import pytest
from support import encode, gradtool, gradtool_json, write, write_index
from terminal import on_terminal

from gradtool import BadInputError, UsageError, diff
from gradtool.store.format import selection


def f32(*values):
    return encode(values, "F32")


@pytest.fixture
def sets(tmp_path):
    """Norms that are a bit off, a head that is far off, and an embedding that is the same."""
    a = {"head": f32(3, 4), "norm.1": f32(1, 2), "norm.2": f32(0, 1.5), "embed": f32(7, -0.0)}
    b = {"head": f32(3, 0), "norm.1": f32(1, 2.25), "norm.2": f32(0, 1.5), "embed": f32(7, 0)}
    return write(tmp_path / "a.safetensors", a), write(tmp_path / "b.safetensors", b)


def failed(result):
    """The tensors that fail their rule, and why."""
    assert all(problem.code == "different" for problem in result.problems)
    return {
        problem.tensor: problem.message.partition("': " if "'" in problem.message else '": ')[2]
        for problem in result.problems
    }


def rows(result):
    return [(row.rule, row.tensors, row.failed) for row in result.per_rule]


def test_the_first_rule_that_matches_the_whole_name_decides(sets):
    rules = ["norm: max_ulp<=0", "norm.*: max_abs<=0.2", ".*1|head: max_abs<=5", ".*: bits"]
    result = diff(*sets, rule=rules)
    messages = {problem.tensor: problem.message for problem in result.problems}
    assert messages == {
        "norm.1": 'fails rule="norm.*: max_abs<=0.2": max_abs_diff 0.25 at index 1 is above the limit 0.2',
        "embed": 'fails rule=".*: bits": differing_bits 1 is above the limit 0',
    }
    assert rows(result) == [(rules[0], 0, 0), (rules[1], 2, 1), (rules[2], 1, 0), (rules[3], 1, 1)]
    assert {problem.file for problem in result.problems} == {str(sets[0])}


@pytest.mark.parametrize(
    ("condition", "reasons"),
    [
        ("max_abs_diff<=4", None),
        ("max_abs<4", "max_abs_diff 4.0 at index 1 is not below the limit 4"),
        ("MAX_ABS <= 3.5e0", "max_abs_diff 4.0 at index 1 is above the limit 3.5e0"),
        ("max_rel<=1e300", "max_rel_diff inf at index 1 is above the limit 1e300"),
        ("rel_l2<=1.4", None),
        ("rel_l2<=1.3", "rel_l2 1.3333333333333333 is above the limit 1.3"),
        ("cosine>=.6", None),
        ("cosine>=0.7", "cosine 0.6 is below the limit 0.7"),
        ("cosine>0.6", "cosine 0.6 is not above the limit 0.6"),
        ("max_ulp<=1000", "max_ulp 1,082,130,432 at index 1 is above the limit 1000"),
        ("differing<=1", None),
        ("differing>=1", None),
        ("norm_b<=2", "norm_b 3.0 is above the limit 2"),
        ("close", "not_close 1 is above the limit 0"),
        ("bits", "differing_bits 1 is above the limit 0"),
        ("identical", "differing_bits 1 is above the limit 0"),
        ("bits or differing <= 1", None),
        ("bits and differing<=1", "differing_bits 1 is above the limit 0"),
        ("bits and close or rel_l2<=2 and max_abs<=4", None),
        ("rel_l2<=2 and max_abs<=4 or bits and close", None),
        ("rel_l2<=2 or close and differing<=0", None),
        (
            "max_abs<=3 or rel_l2<=1 and max_abs<=3",
            "max_abs_diff 4.0 at index 1 is above the limit 3 and rel_l2 1.3333333333333333 is above the limit 1",
        ),
        (
            "rel_l2<=2 and max_abs<=3  or\tbits",
            "max_abs_diff 4.0 at index 1 is above the limit 3 and differing_bits 1 is above the limit 0",
        ),
    ],
)
def test_conditions(sets, condition, reasons):
    result = diff(*sets, rule=f"head: {condition}", include=["head"])
    expected = {} if reasons is None else {"head": reasons}
    assert failed(result) == expected
    assert rows(result) == [(f"head: {condition}", 1, len(expected))]


def test_values_and_limits_are_compared_exactly(tmp_path):
    a, b = (write(tmp_path / name, {"t": np.array([value])}) for name, value in (("a", 1.0), ("b", -1.0)))
    ulps = diff(a, b).max_ulp
    assert ulps > 1 << 53
    assert diff(a, b, rule=f".*: max_ulp<={ulps}").problems == ()
    assert len(diff(a, b, rule=f".*: max_ulp<={float(ulps) * (1 - 2**-52):.17g}").problems) == 1


def test_rules_are_read_from_a_file_after_those_of_the_option(sets, tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text("# the norms\n\n  norm\\.[12] : max_abs<=0.2\r\n\t# all others\n.*: close\n")
    result = diff(*sets, rule=["head: max_abs<=9"], rules=path)
    assert rows(result) == [("head: max_abs<=9", 1, 0), ("norm\\.[12] : max_abs<=0.2", 2, 1), (".*: close", 1, 0)]
    assert failed(result) == {"norm.1": "max_abs_diff 0.25 at index 1 is above the limit 0.2"}
    assert rows(diff(*sets, rule=["norm.*|head: max_abs<=9"], rules=path))[1:] == [
        ("norm\\.[12] : max_abs<=0.2", 0, 0), (".*: close", 1, 0),
    ]  # fmt: skip


def test_a_regular_expression_may_have_colons(sets):
    assert rows(diff(*sets, rule=["(?:head|embed): max_abs<=4", "norm.*:max_abs<=1"])) == [
        ("(?:head|embed): max_abs<=4", 2, 0), ("norm.*:max_abs<=1", 2, 0),
    ]  # fmt: skip


def test_tensors_without_a_rule_are_all_named_before_a_value_is_read(sets, monkeypatch):
    monkeypatch.setattr("gradtool.ops.diff.Compare", None)
    with pytest.raises(BadInputError) as caught:
        diff(*sets, rule=["norm.*: bits", "hea: bits"])
    assert [(problem.code, problem.tensor, problem.message) for problem in caught.value.problems] == [
        ("no-match", name, "no rule matches the name") for name in ("head", "embed")
    ]
    assert caught.value.exit_code == 3
    assert caught.value.problems[0].hint == (
        'add a last rule for all other tensors, such as rule=".*: rel_l2<=1e-3 or max_abs<=1e-6"'
    )


def test_names_after_map_and_only_tensors_that_are_compared(sets, tmp_path):
    other = write(tmp_path / "c.safetensors", {"module.head": f32(3, 0), "only": f32(1)})
    result = diff(other, sets[1], map=["^module\\.="], missing="skip", rule="head: bits")
    assert (result.problems, rows(result)) == ((), [("head: bits", 1, 0)])


@pytest.mark.parametrize("types", [("F32", "BF16"), ("F32", "F32")])
def test_bits_of_other_types_differ(tmp_path, types):
    a, b = (write(tmp_path / name, {"t": encode([1, 2], dtype)}) for name, dtype in zip("ab", types, strict=True))
    assert len(diff(a, b, rule=".*: bits").problems) == (types[0] != types[1])
    assert diff(a, b, rule=".*: max_abs<=0 and differing<=0").problems == ()


def test_nan_on_one_side_fails_every_rule_and_is_told_once(tmp_path):
    a = write(tmp_path / "a", {"x": f32(1, math.nan), "y": f32(1, math.nan), "z": f32(0)})
    b = write(tmp_path / "b", {"x": f32(1, 2), "y": f32(1, math.nan), "z": f32(0)})
    result = diff(a, b, rule=".*: nonfinite_a<=9 and rel_l2<=1")
    assert [(problem.code, problem.tensor) for problem in result.problems] == [("nonfinite", "x")]
    assert (rows(result)[0][1:], result.call.warnings) == ((3, 1), ())
    result = diff(a, b, rule=["z: bits", ".*: nonfinite_both<=0"], include=["y", "z"])
    assert failed(result) == {"y": "nonfinite_both 1 is above the limit 0"}


def test_limits_on_all_tensors_as_one_vector_go_with_rules(sets):
    result = diff(*sets, rule=".*: max_abs<=4", max_rel_l2=1e-3)
    (problem,) = result.problems
    assert problem.message.startswith("rel_l2 ")
    assert rows(result) == [(".*: max_abs<=4", 4, 0)]


@pytest.mark.parametrize("options", [{"rtol": 1}, {"atol": 0}, {"max_ulp": 1}, {"close": True}, {"bits": True}])
def test_limits_on_all_elements_do_not(sets, options):
    (name,) = options
    with pytest.raises(UsageError, match=f"^rule and {name} exclude each other; write the limit as a rule"):
        diff(*sets, rule=".*: bits", **options)
    with pytest.raises(UsageError, match=f"^rules and {name} exclude each other"):
        diff(*sets, rules="nowhere", **options)


WRONG = {
    "head": "rule=\"head\" must be REGEX: CONDITION, such as '.*: rel_l2<=1e-3 or max_abs<=1e-6'",
    ": bits": "rule=\": bits\" must be REGEX: CONDITION, such as '.*: rel_l2<=1e-3 or max_abs<=1e-6'",
    "(: bits": 'rule="(" is not a regular expression: missing ), unterminated subpattern at position 0',
    ".*:": "rule=\".*:\": '' is not a condition",
    ".*: rel_l2": "rule=\".*: rel_l2\": 'rel_l2' is not a condition",
    ".*: bits<=0": "rule=\".*: bits<=0\": 'bits<=0' is not a condition",
    ".*: (bits)": "rule=\".*: (bits)\": '(bits)' is not a condition",
    ".*: rel_l2=1": "rule=\".*: rel_l2=1\": 'rel_l2=1' is not a condition",
    ".*: rel_l2<=nan": "rule=\".*: rel_l2<=nan\": 'rel_l2<=nan' is not a condition",
    ".*: rel_l2<=5x": "rule=\".*: rel_l2<=5x\": 'rel_l2<=5x' is not a condition",
    ".*: name<=1": "rule=\".*: name<=1\": 'name<=1' is not a condition",
    ".*: bits or": "rule=\".*: bits or\": 'bits or' is not a condition",
    ".*: bits and or close": "rule=\".*: bits and or close\": 'bits and' is not a condition",
    ".*: max_abs<=-1": 'the limit of max_abs in rule=".*: max_abs<=-1" must be 0 or more, not -1.0',
    ".*: cosine>=1.5": 'the limit of cosine in rule=".*: cosine>=1.5" must be from -1 to 1, not 1.5',
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_rule_is_a_usage_error_or_in_a_file_bad_input(sets, tmp_path, text):
    with pytest.raises(UsageError) as caught:
        diff(*sets, rule=[".*: bits", text])
    assert caught.value.problems[0].message == WRONG[text]
    (tmp_path / "rules").write_text(f".*: bits\n{text}\n")
    with pytest.raises(BadInputError) as in_file:
        diff(*sets, rules=tmp_path / "rules")
    problem = in_file.value.problems[0]
    assert (problem.message, problem.file) == (WRONG[text], str(tmp_path / "rules"))
    assert problem.hint == caught.value.problems[0].hint


def test_files_that_have_no_rules(sets, tmp_path):
    for content, message in (("", "lists no rules"), ("# x\n", "lists no rules"), (" \n", "no rule matches the name")):
        (tmp_path / "rules").write_text(content)
        with pytest.raises(BadInputError) as caught:
            diff(*sets, rules=tmp_path / "rules")
        assert caught.value.problems[0].message == message
    with pytest.raises(BadInputError, match="no such file"):
        diff(*sets, rules=tmp_path / "missing")
    (tmp_path / "rules").write_bytes(b"\xff: bits\n")
    with pytest.raises(BadInputError, match="must be valid UTF-8"):
        diff(*sets, rules=tmp_path / "rules")


def test_a_regular_expression_that_takes_forever_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "LIMIT", 0.2)
    path = write(tmp_path / "a", {"a" * 60: f32(1)})
    with pytest.raises(BadInputError, match="CPU time to match the name") as caught:
        diff(path, path, rule=["(a+)+b: bits", ".*: bits"])
    assert caught.value.problems[0].code == "limit"


def test_shards_and_whole_files_have_the_same_failures(tmp_path):
    rng = np.random.default_rng(4)
    tensors = {f"t{k}": rng.standard_normal(70_000 if k == 2 else 9) for k in range(5)}
    far = {name: array * (1 + int(name[1:]) * 1e-3) for name, array in tensors.items()}
    whole = write(tmp_path / "whole", far)
    write_index(tmp_path / "shards", {"1.safetensors": {"t4": far["t4"], "t1": far["t1"]}, "2.safetensors": {
        name: far[name] for name in ("t3", "t0", "t2")}})  # fmt: skip
    golden, rules = write(tmp_path / "golden", tensors), ["t[01]: rel_l2<=5e-4 and cosine>=0.9", ".*: rel_l2<=2.5e-3"]
    first, second = (
        diff(path, golden, rule=rules, threads=threads) for path, threads in ((whole, 1), (tmp_path / "shards", 4))
    )
    assert failed(first).keys() == {"t1", "t3", "t4"}
    assert (failed(first), rows(first)) == (failed(second), rows(second))


def test_the_command_exits_with_1_and_json_has_rows(sets):
    rules = ["--rule", "head: max_abs<=1", "--rule", ".*: max_abs<=1"]
    done = gradtool("diff", *sets, *rules, "--quiet")
    message = "tensor 'head': fails --rule 'head: max_abs<=1': max_abs_diff 4.0 at index 1 is above the limit 1"
    assert (done.returncode, done.stderr) == (1, f"gradtool: error: {sets[0]}: {message}\n")
    answer = gradtool_json("diff", *sets, *rules)
    assert answer["data"]["per_rule"] == [
        {"rule": "head: max_abs<=1", "tensors": 1, "failed": 1},
        {"rule": ".*: max_abs<=1", "tensors": 3, "failed": 0},
    ]
    assert [(error["code"], error["tensor"]) for error in answer["errors"]] == [("different", "head")]
    assert gradtool("diff", *sets, "--rule", ".*: max_abs<=4").returncode == 0
    columns = gradtool("diff", *sets, *rules, "--columns", "rule,failed").stdout
    assert columns == "rule\tfailed\nhead: max_abs<=1\t1\n.*: max_abs<=1\t0\n"


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_no_rule_is_broken_on_a_terminal(sets, columns):
    rules = "head: max_abs<=1 or cosine>=.9", ".*: close or max_abs<=1"
    options = [text for rule in rules for text in ("--rule", rule)]
    code, shown = on_terminal("diff", *sets, *options, columns=columns, errors=False)
    assert code == 1
    assert all(rule in shown for rule in rules)
