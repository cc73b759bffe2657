"""Files that are whole or not there, and keys: their rights from the first byte, and what becomes of damaged ones."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rasura.core.files import appended, make_private, read_limited, read_private, write_new, write_whole
from rasura.core.interfaces import InputError
from rasura.defenses.homomorphic_keys import Context, make_keys
from rasura.service_protections.obfuslm.key import Key


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """As the usual umask, or a wider one, would leave files."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_its_owners_alone_unless_it_is_public(tmp_path: Path) -> None:
    write_whole(tmp_path / "secret", "a")
    write_whole(tmp_path / "shown", b"b", private=False)
    assert (mode(tmp_path / "secret"), mode(tmp_path / "shown")) == (0o600, 0o666)
    # What gives way takes its rights with it.
    write_whole(tmp_path / "shown", "c")
    assert mode(tmp_path / "shown") == 0o600 and (tmp_path / "shown").read_text() == "c"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret", "shown"]


def test_new_files_are_written_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "keys"
    assert write_new(folder, {"b": "secret"}, {"a": "public"}) == (folder / "b", folder / "a")
    assert (mode(folder / "b"), mode(folder / "a")) == (0o600, 0o666) and (folder / "a").read_text() == "public"
    with pytest.raises(InputError, match=r"keys/a already exists and is not overwritten"):
        write_new(folder, {"c": "secret"}, {"a": "other"})
    (folder / "d").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"keys/d already exists"):
        write_new(folder, {"c": "secret", "d": "secret"})
    # Another process makes one of them in the meantime: what is not ours stays.
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target.name == "f":
            target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(InputError, match=r"keys/f already exists"):
        write_new(folder, {"e": "secret"}, {"f": "public"})
    assert sorted(p.name for p in folder.iterdir()) == ["a", "b", "d", "f"] and (folder / "f").read_text() == "theirs"


def test_what_a_library_writes_is_its_owners_alone_and_whole(tmp_path: Path) -> None:
    modes: list[int] = []

    def plainly(path: Path) -> None:
        path.write_bytes(b"weights")
        modes.append(mode(path))

    def by_another_file(path: Path) -> None:
        (tmp_path / "other").write_bytes(b"more")
        (tmp_path / "other").replace(path)

    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    for write, content in ((plainly, b"weights"), (by_another_file, b"more")):
        make_private(tmp_path / "file", write)
        assert (mode(tmp_path / "file"), (tmp_path / "file").read_bytes()) == (0o600, content)
    with pytest.raises(OSError, match="No space"):
        make_private(tmp_path / "file", fails)
    assert (
        modes == [0o600] and [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"more"
    )


def test_no_moment_at_other_rights_and_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []
    kept = os.fsync

    def watch(number: int) -> None:
        about = os.fstat(number)
        if stat.S_ISREG(about.st_mode):
            seen.append((stat.S_IMODE(about.st_mode), (tmp_path / "key").read_bytes()))
        kept(number)

    (tmp_path / "key").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", watch)
    write_whole(tmp_path / "key", b"new")
    assert seen == [(0o600, b"old")] and (tmp_path / "key").read_bytes() == b"new"

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"key cannot be written \(No space left on device\)"):
        write_whole(tmp_path / "key", b"newer")
    assert [p.name for p in tmp_path.iterdir()] == ["key"] and (tmp_path / "key").read_bytes() == b"new"


def test_what_is_added_to_is_its_owners_alone_and_one_runs(tmp_path: Path) -> None:
    """The half-done file of a run had the rights of the umask, and two runs wrote into it in turns."""
    target = tmp_path / "rows.part"
    with appended(target) as file:
        assert mode(target) == 0o600
        file.write(b"one\n")
        with pytest.raises(InputError, match=r"rows.part is being written by another run"), appended(target):
            pass
    target.chmod(0o644)
    with appended(target) as file:
        assert mode(target) == 0o600 and file.read() == b"one\n"
        file.truncate(2)
        file.write(b"two")
    assert target.read_bytes() == b"ontwo"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for bad in (tmp_path / "link", tmp_path / "none" / "a", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot be written"), appended(bad):
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_the_other_run_has_just_ended_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = tmp_path / "rows.part", os.open

    def late(*given: Any) -> int:
        number = made(*given)
        target.unlink()
        return number

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(InputError, match=r"rows.part is being written by another run"), appended(target):
        pass


def test_what_must_not_give_way_stays(tmp_path: Path) -> None:
    write_whole(tmp_path / "key", "first", replace=False)
    with pytest.raises(InputError, match="key already exists and is not overwritten; remove it or choose another name"):
        write_whole(tmp_path / "key", "second", replace=False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="link already exists"):
        write_whole(tmp_path / "link", "third", replace=False)
    assert (tmp_path / "key").read_text() == "first" and not (tmp_path / "nowhere").exists()
    for wrong in (tmp_path / "no" / "folder", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot be written"):
            write_whole(wrong, "x")


def test_reading_has_a_limit_and_looks_at_rights(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"12345")
    assert (
        read_limited(tmp_path / "a", "file", 5) == (b"12345", False) and read_private(tmp_path / "a", "file", 5) == b"12345"
    )
    with pytest.raises(InputError, match="a has more than 4 bytes"):
        read_limited(tmp_path / "a", "file", 4)
    for rights in (0o640, 0o604, 0o620):
        (tmp_path / "a").chmod(rights)
        assert read_limited(tmp_path / "a", "file", 5)[1]
        with pytest.raises(InputError, match="can be read by other users; run: chmod 600 "):
            read_private(tmp_path / "a", "file", 5)
    os.mkfifo(tmp_path / "pipe")
    for wrong, why in (("pipe", "is not a file"), ("none", "No such file"), (".", r"cannot be read|is not a file")):
        with pytest.raises(InputError, match=why):
            read_limited(tmp_path / wrong, "file", 5)


def key() -> Key:
    tokens = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    return Key(tokens, '{"model": {"vocab": {"a": 0}}}', {"unk_token": "[UNK]"}, "0" * 16, "1" * 16, {"plus": False})


def same(one: Key, two: Key) -> bool:
    return (
        torch.equal(one.tokens, two.tokens)
        and vars(one).keys() == vars(two).keys()
        and all(getattr(one, n) == getattr(two, n) for n in ("tokenizer", "options", "pair", "base", "settings"))
    )


def damaged(good: bytes, number: int) -> bytes:
    """One byte changed, or cut, or longer."""
    draw = random.Random(number)
    place = draw.randrange(len(good))
    if number % 5 == 0:
        return good[:place]
    if number % 5 == 1:
        return good + bytes([number % 256])
    return good[:place] + bytes([good[place] ^ (1 << draw.randrange(8))]) + good[place + 1 :]


def test_a_damaged_key_of_a_model_is_never_taken_for_another(tmp_path: Path) -> None:
    key().save(tmp_path / "key")
    assert mode(tmp_path / "key") == 0o600 and same(Key.load(tmp_path / "key"), key())
    with pytest.raises(InputError, match="already exists"):
        key().save(tmp_path / "key")
    good = (tmp_path / "key").read_bytes()
    (tmp_path / "bad").touch(0o600)
    refused = 0
    for number in range(200):
        (tmp_path / "bad").write_bytes(damaged(good, number))
        try:
            # White space of the header may change; what it says may not.
            assert same(Key.load(tmp_path / "bad"), key())
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 180


def test_a_damaged_key_of_sealing_never_reaches_its_library(tmp_path: Path) -> None:
    pytest.importorskip("tenseal")
    keys = make_keys(2)
    keys.save(tmp_path / "secret")
    keys.public().save(tmp_path / "public")
    assert (mode(tmp_path / "secret"), mode(tmp_path / "public")) == (0o600, 0o666)
    (tmp_path / "bad").touch(0o600)
    for name in ("secret", "public"):
        good = (tmp_path / name).read_bytes()
        head = good.index(b"\n", good.index(b"\n") + 1)
        for number in range(100):
            at = number if number <= head else 31 * number
            (tmp_path / "bad").write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            try:
                found = Context.load(tmp_path / "bad")
            except InputError:
                continue
            assert found == Context.load(tmp_path / name) and at <= head
        with pytest.raises(InputError, match="already exists"):
            keys.save(tmp_path / name)
