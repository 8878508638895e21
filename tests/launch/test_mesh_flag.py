import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch.mesh_flag import parse_mesh


@pytest.mark.parametrize(("text", "devices", "axes"), [
    ("8", 8, ()),
    (" 1 ", 1, ()),
    ("rows:2;cols:4", 8, (("rows", 2), ("cols", 4))),
    ("all:3", 3, (("all", 3),)),
    ("a:2,b:3", 6, (("a", 2), ("b", 3))),
])
def test_reads(text, devices, axes):
    mesh = parse_mesh(text)
    assert (mesh.devices, mesh.axes) == (devices, axes)


@pytest.mark.parametrize(("text", "names"), [
    ("0", "fewer than one"), ("-4", "fewer than one"), ("rows:0", "fewer than one"),
    ("rows:-1;cols:2", "fewer than one"), ("", "axis:size"), ("eight", "axis:size"), ("2x4", "axis:size"),
    ("rows:2;", "axis:size"), ("rows=2", "axis:size"),
    ("rows:2;rows:4", "twice"), ("99999999", "at most"), ("1.5", "axis:size"),
])
def test_refuses_in_one_line(text, names):
    with pytest.raises(UsageError) as caught:
        parse_mesh(text)
    message = str(caught.value)
    assert names in message
    assert f"--mesh={text}" in message
    assert "\n" not in message


def test_names_a_folder():
    assert parse_mesh("8").file_name == "8"
    assert parse_mesh("rows:2;cols:4").file_name == "rows2-cols4"
