"""Job files: what YAML guesses is held against what the flag takes, and every message names the file."""

import re

import pytest

from batch_gen.config import load_preset, resolve
from batch_gen.errors import ConfigError, UsageError
from batch_gen.job_file import read_job_file
from batch_gen.manifest import parse_overrides
from batch_gen.prepare import layers_of
from batch_gen.regress.suite import read_suite_file
from batch_gen.request import ModelLimits
from batch_gen.storage.base import open_store


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit: true", "limit: True is not a whole number"),
        ("limit: 2.5", "not a whole number"),
        ("crf: '20'", "not a whole number"),
        ("max-hours: false", "not a number"),
        ("quiet: 1", "not true or false"),
        ("compile: on", "not one of off, block, model"),
        ("decode: fast", "not one of exact"),
        ("crf: 1\ncrf: 2", "'crf' stands there twice"),
        ("run-seed: 1\nrun_seed: 2", "twice, with a dash and with an underscore"),
        ("s3-bucket-owner: 123456789012", "put it in quotes"),
        ("drain-at: 11:30", "put it in quotes"),
        ("override: [steps=4, 5]", "put it in quotes"),
        ("drain-at: 2026-99-99", "'2026-99-99' is no timestamp"),
        ('crf: !!int "xyz"', "'xyz' is no int"),
        ('crf: !!float "xyz"', "'xyz' is no float"),
        ('quiet: !!bool "xyz"', "'xyz' is no bool"),
        ('drain-at: !!timestamp "xyz"', "'xyz' is no timestamp"),
        (f"crf: {'9' * 5000}", "is no int"),
        ("[" * 3000, "nested too deeply"),
        ("lease-ttl: .inf\ncrf: 1\ncrf: 2", "twice"),
        ("a: &a [x,x,x,x]\n", "is no setting"),
    ],
)
def test_what_yaml_guesses_wrong_is_refused(tmp_path, text, words):
    """Booleans for numbers, numbers for text, equal keys: an error that names file and key, not a silent guess."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        read_job_file(str(path))
    assert str(path) in error.value.message


@pytest.mark.parametrize("text", ["suite: 2026-99-99", 'taps: !!int "xyz"'])
def test_limits_files_are_read_by_the_same_rule(tmp_path, text):
    """A limits file that YAML cannot read is the same clear error, with the file's name."""
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"limits .*limits\.yaml"):
        read_suite_file(str(path))


def test_a_heap_of_aliases_is_shown_short(tmp_path):
    """Lists of lists of aliases hold billions of words; the message about them does not."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists = [f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "job.yaml"
    path.write_text("where:\n" + "\n".join(f"  - {text.partition(': ')[2] or text}" for text in [*levels, *lists]))
    with pytest.raises(ConfigError, match="is not text") as error:
        read_job_file(str(path))
    assert len(error.value.message) < 2000


def test_off_is_a_word(tmp_path):
    """`compile: off` means what it says; an empty key and a single override are fine."""
    path = tmp_path / "job.yaml"
    path.write_text("compile: off\nlimit:\noverride: steps=4\nmesh: {tp: 2}\n")
    assert read_job_file(str(path)) == {"compile": "off", "override": ("steps=4",), "mesh": {"tp": 2}}


def test_a_job_file_may_lie_in_a_bucket(s3_store, s3_server):
    """Workers of a fleet read the settings that were submitted with them."""
    s3_store.create("job.yaml", b"crf: 12\n")
    options = {"config": f"{s3_store.url}/job.yaml", "s3_endpoint": s3_server.endpoint}
    assert layers_of(options)["crf"] == 12
    with pytest.raises(ConfigError, match="no such object"):
        layers_of({**options, "config": f"{s3_store.url}/none.yaml"})


def test_faults_say_who_said_it(tmp_path):
    """A value out of range in a file is the file's fault, on the command line the flag's."""
    path = tmp_path / "job.yaml"
    path.write_text("crf: 99\n")
    preset = load_preset("pocket", "pocket")
    given = layers_of({"config": str(path), "replicas": 0}) | {"model": "fake", "out": "o"}
    with pytest.raises(ConfigError) as error:
        resolve(given, preset, "cpu")
    assert f"config {path}: crf" in error.value.message
    assert "--replicas: " in error.value.message


@pytest.mark.parametrize("text", ["width=1_6", "steps=\u0661\u0662"])
def test_overrides_are_plain_digits(text):
    """What only Python reads as a number is no number."""
    with pytest.raises(UsageError, match="is no number"):
        parse_overrides([text], ModelLimits(name="m"))


def test_an_empty_output_root_is_refused():
    """`--out ''` is no wish for the default, and no store."""
    with pytest.raises(UsageError, match="--out is empty"):
        layers_of({"out": " "})
    with pytest.raises(UsageError, match="empty output root"):
        open_store("")
