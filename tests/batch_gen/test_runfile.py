"""run.json: one fingerprint per output root."""

from __future__ import annotations

import pytest

from batch_gen.errors import ConfigError, StoreError, UsageError
from batch_gen.runfile import RUN_KEY, fingerprint_of, load_run, new_run, open_run
from batch_gen.storage.base import open_store
from batch_gen.storage.memory import MemoryStore

SETTINGS = {"model": "sha-a", "crf": 16, "solver": "unipc", "run_seed": 0}


def test_first_worker_begins_and_others_join():
    """The first file stands; a worker with equal settings and another machine gets that one."""
    store = MemoryStore()
    first = open_run(store, new_run(SETTINGS, profile={"device": "cpu"}))
    second = open_run(store, new_run(dict(reversed(SETTINGS.items())), profile={"device": "neuron"}))
    assert first == second == load_run(store)


def test_other_settings_are_refused_with_the_difference():
    """A resume with another fingerprint stops and names each setting that differs."""
    store = MemoryStore()
    open_run(store, new_run(SETTINGS))
    with pytest.raises(ConfigError, match="crf: 16 -> 18") as caught:
        open_run(store, new_run({**SETTINGS, "crf": 18, "lora": "x"}))
    assert "lora: unset -> x" in caught.value.message
    assert "solver" not in caught.value.message
    assert caught.value.exit_code == 2


def test_newer_and_damaged_files_are_refused():
    """A root of a newer version, or a torn run.json, is never taken for a fresh one."""
    for body, words in ((b'{"format": 2}', "format 2"), (b"{", "damaged"), (b'{"format": 1}', "damaged")):
        store = MemoryStore()
        store.create(RUN_KEY, body)
        with pytest.raises(ConfigError, match=words):
            open_run(store, new_run(SETTINGS))


def test_fingerprint_knows_values_not_order():
    """Order of settings means nothing, any value means something."""
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 1.5})


def test_a_foreign_folder_is_refused(tmp_path):
    """A run begins in an empty place or among parts of a run, never among other people's files."""
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"not empty \(holiday.jpg"):
        open_run(open_store(str(tmp_path)), new_run({"crf": 16}))
    assert not (tmp_path / "run.json").exists()
    (tmp_path / "holiday.jpg").unlink()
    (tmp_path / "submit").mkdir()
    (tmp_path / "submit" / "a-m.parquet").write_bytes(b"x")
    assert open_run(open_store(str(tmp_path)), new_run({"crf": 16})).settings == {"crf": 16}


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"format": 1}', b'{"format": 1, "settings": {}, "fingerprint": 3}'])
def test_a_damaged_run_file_says_what_to_do(body):
    """One line: the file, its first fault, and the two ways on."""
    store = MemoryStore()
    store.create("run.json", body)
    with pytest.raises(ConfigError) as error:
        load_run(store)
    assert "run.json is damaged" in error.value.message
    assert "another --out" in error.value.message
    assert "\n" not in error.value.message


def test_a_place_that_never_takes_files_is_exit_2():
    """/proc answers "no such file" for ever: starting again would not help."""
    with pytest.raises(StoreError) as error:
        open_run(open_store("/proc/x"), new_run({"crf": 16}))
    assert error.value.exit_code == 2
