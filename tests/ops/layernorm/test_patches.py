from layers import FORMS, assert_all, layer, reference
from support import read, write

from gradtool import layernorm_backward


def test_many_narrow_rows_make_several_groups(tmp_path):
    tensors = layer((300_000, 1), types=("BF16", "F32", "F32"))
    tensors |= {f"wider.{name}": array for name, array in layer((30_001, 19)).items()}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, fsync=False)
    found = read(path)
    for prefix, dtype in (("", "BF16"), ("wider.", "F32")):
        expected = reference({name: tensors[prefix + name] for name in layer((1, 1))}, **FORMS["layernorm"])
        assert_all({name: found[prefix + name] for name in expected}, expected, dtype, "F32")
