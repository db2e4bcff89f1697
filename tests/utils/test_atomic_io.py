"""Atomic and durable writes, including on a disk that is really full."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import small_disk
from safetensors import SafetensorError

from vlm_grpo.errors import UserError
from vlm_grpo.utils.atomic_io import append_durable, explain_disk_full, write_atomic

SIZE = 2**20  # size of the disk in bytes; the tests write more


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", SIZE) as mounted:
        yield mounted


@pytest.mark.parametrize("write", [write_atomic, append_durable])
@pytest.mark.parametrize("leaving", [0, 8192])
def test_a_failed_write_leaves_the_file_unchanged(disk, write, leaving):
    path = disk.folder / "file"
    write(path, b"before\n")
    disk.fill(leaving)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"x" * SIZE)
    assert path.read_bytes() == b"before\n"
    assert {p.name for p in disk.folder.iterdir()} == {"file", "filler"}
    disk.make_room()
    write(path, b"after\n")
    assert path.read_bytes() == (b"after\n" if write is write_atomic else b"before\nafter\n")


def test_writes_at_once_leave_one_of_their_contents(tmp_path):
    path = tmp_path / "report.html"
    contents = [bytes([65 + number]) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_atomic(path, content), contents * 20))
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_with_its_remedy(disk):
    disk.fill()
    message = r"is full \(.*No space left.*/file'\).*make room.*resume=true$"
    with (
        pytest.raises(UserError, match=message) as caught,
        explain_disk_full(disk.folder),
        explain_disk_full(disk.folder),
    ):
        write_atomic(disk.folder / "file", b"x" * SIZE)
    assert str(caught.value).count("is full") == 1


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("I/O error: Permission denied (os error 13)"), False),
        (PermissionError(13, "Permission denied"), False),
        (ValueError("something else"), False),
    ],
)
def test_only_errors_of_a_full_disk_are_replaced(error, full, tmp_path):
    with pytest.raises(UserError if full else type(error)), explain_disk_full(tmp_path):
        raise error
