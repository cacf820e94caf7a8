"""Settings: which source wins, what is refused, what is shown."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from maskfx import ops
from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings
from maskfx.serve.sources import (
    OPERATORS,
    configure,
    from_environment,
    known_keys,
    shown,
)


def file_with(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    file = file_with(tmp_path, "port = 1\nworkers = 2\nqueue = 3\n[limits]\npictures = 2\n")
    environment = {"MASKFX_PORT": "11", "MASKFX_WORKERS": "12", "HOME": "/"}
    found = configure({"port": 21, "workers": None}, environment, file)
    settings = found.settings
    assert (settings.port, settings.workers, settings.queue) == (21, 12, 3)
    assert settings.limits.pictures == 2
    assert settings.restarts == ServeSettings().restarts
    assert found.origins == {
        "port": "command line",
        "workers": "MASKFX_WORKERS",
        "queue": str(file),
        "limits.pictures": str(file),
    }


def test_nested_limits_from_the_environment_beside_those_of_the_file(tmp_path: Path) -> None:
    file = file_with(tmp_path, "[limits]\nbody_bytes = 7\nimages = 2\n")
    limits = configure({}, {"MASKFX_LIMITS__BODY_BYTES": "9"}, file).settings.limits
    assert (limits.body_bytes, limits.images) == (9, 2)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = file_with(tmp_path, "port = 5\n")
    assert configure({}, {"MASKFX_CONFIG": str(file)}).settings.port == 5


def test_an_empty_variable_is_not_set() -> None:
    found = configure({}, {"MASKFX_API_KEY": "", "MASKFX_MODEL": ""})
    assert found.settings.api_key is None
    assert found.origins == {}


def test_variables_of_operators_are_no_settings() -> None:
    named = set[str]()
    for path in Path(ops.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r'"(MASKFX_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    assert named == set(OPERATORS)
    assert from_environment(dict.fromkeys(named, "off")) == {}


@pytest.mark.parametrize(
    ("environment", "named", "meant"),
    [
        ({"MASKFX_PROT": "1"}, "MASKFX_PROT", "port"),
        ({"MASKFX_LIMITS__BODY_BYTE": "1"}, "MASKFX_LIMITS__BODY_BYTE", "limits.body_bytes"),
        ({"MASKFX_IMAGE_PIXELS": "1"}, "MASKFX_IMAGE_PIXELS", "limits.image_pixels"),
    ],
)
def test_an_unknown_variable_is_refused(
    environment: dict[str, str], named: str, meant: str
) -> None:
    with pytest.raises(InputError, match=f"{named}.*did you mean {meant}"):
        configure({}, environment)


@pytest.mark.parametrize(
    "text", ["max_seqs = 4\n", "[limits]\nbodybytes = 1\n", "[model]\na = 1\n"]
)
def test_an_unknown_key_of_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"serve\.toml: there is no setting"):
        configure({}, {}, file_with(tmp_path, text))


def test_an_unknown_key_of_the_command_line_is_refused() -> None:
    with pytest.raises(InputError, match="command line: there is no setting 'prot'"):
        configure({"prot": "1"}, {})


@pytest.mark.parametrize(
    ("command_line", "seen"),
    [
        ({"port": "http"}, "port .from command line.: got 'http'"),
        ({"port": 70_000}, "port .from command line.: got 70000"),
        ({"quality": "best"}, "quality"),
        ({"limits.pictures": 11}, r"limits\.pictures .from command line.: got 11"),
    ],
)
def test_a_value_that_makes_no_sense_says_where_it_stood(
    command_line: dict[str, Any], seen: str
) -> None:
    with pytest.raises(InputError, match=seen):
        configure(command_line, {})


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2\n"])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="not TOML"):
        configure({}, {}, file_with(tmp_path, text))


def test_a_file_that_isnt_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        configure({}, {}, tmp_path / "no.toml")


@pytest.mark.parametrize("name", ["cache_dir", "lora_dir"])
def test_a_directory_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    file = file_with(tmp_path, "")
    for place in (file, file / "deep" / "er"):
        with pytest.raises(InputError, match=rf"{name}.*serve\.toml is a file; give a directory"):
            configure({name: str(place)}, {})
    for place in (tmp_path, tmp_path / "new" / "one"):
        assert getattr(configure({name: str(place)}, {}).settings, name) == place
    assert configure({"cache_dir": "s3://bucket/x"}, {}).settings.cache_dir == "s3://bucket/x"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_key_is_refused(host: str) -> None:
    """A caller that sends nothing would have it."""
    with pytest.raises(InputError, match="api_key"):
        configure({"host": host, "api_key": ""}, {})
    assert configure({"host": host, "api_key": "k"}, {}).settings.host == host


def test_a_host_for_others_does_not_hinder_what_serves_nobody() -> None:
    """`launch.py` asks for the key."""
    assert configure({}, {"MASKFX_HOST": "0.0.0.0"}).settings.host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_takes_none(host: str) -> None:
    assert configure({"host": host}, {}).settings.api_key is None


def test_what_is_shown_tells_origins_and_no_secret(tmp_path: Path) -> None:
    file = file_with(tmp_path, 'api_key = "hunter2"\n[limits]\nimages = 2\n')
    text = shown(configure({"port": 8001}, {"MASKFX_QUEUE": "9"}, file))
    assert "port = 8001  # command line" in text
    assert "queue = 9  # MASKFX_QUEUE" in text
    assert f"images = 2  # {file}" in text
    assert "workers = 1  # default" in text
    assert "hunter2" not in text
    assert f'# api_key = "********"  # {file}' in text


def test_what_is_shown_is_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    given = {"port": 8001, "model": 'a "quoted" näme', "limits.urls": "true", "lora_dir": "/l"}
    given |= {"allowed_hosts": "a.example, b.example"}
    found = configure(given, {"MASKFX_LOST_SECONDS": "7.5"})
    text = shown(found)
    assert set(tomllib.loads(text)) <= set(ServeSettings.model_fields)
    again = configure({}, {}, file_with(tmp_path, text)).settings
    assert again == found.settings


def test_lists_are_given_as_lists_or_with_commas(tmp_path: Path) -> None:
    file = file_with(tmp_path, 'allowed_hosts = ["a.example", "::1"]\n')
    found = configure({}, {"MASKFX_ALLOWED_ORIGINS": "https://a.example, null"}, file).settings
    assert found.allowed_hosts == ("a.example", "::1")
    assert found.allowed_origins == ("https://a.example", "null")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_hosts", "https://a.example"),
        ("allowed_hosts", "a.example:80"),
        ("allowed_origins", "a.example"),
        ("allowed_origins", "https://a.example/path"),
    ],
)
def test_names_that_no_header_could_have_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"{name}.*give .* such as"):
        configure({name: value}, {})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "maskfx"),
        ({"model": "a/b"}, "b"),
        ({"model": "/a/b/"}, "b"),
        ({"model": "fake:needs=/a/b"}, "fake"),
        ({"model": "a/b", "served_model_name": "c/d"}, "c/d"),
    ],
)
def test_the_name_for_clients(settings: dict[str, str], name: str) -> None:
    assert configure(settings, {}).settings.served_name == name


def test_a_secret_isnt_told_in_an_error() -> None:
    with pytest.raises(InputError) as caught:
        configure({"api_key": ["hunter2"]}, {})
    assert "hunter2" not in str(caught.value)


def test_every_setting_has_one_key() -> None:
    keys = list(known_keys())
    assert len(keys) == len(set(keys))
    assert "limits.body_bytes" in keys
    assert "limits" not in keys
    assert {key.partition(".")[0] for key in keys} == set(ServeSettings.model_fields)


@pytest.mark.parametrize("given", ["s3://bucket/prefix", "file:///var/cache", "memory:///"])
def test_a_url_of_templates_stays_one_on_its_way_to_the_workers(given: str, tmp_path: Path) -> None:
    text = f'cache_dir = "{given}"\n'
    for found in (
        configure({"cache_dir": given}, {}),
        configure({}, {"MASKFX_CACHE_DIR": given}),
        configure({}, {}, file_with(tmp_path, text)),
    ):
        assert found.settings.cache_dir == given
        assert found.settings.cache_folder is None
        sent = ServeSettings.model_validate_json(found.settings.model_dump_json())
        assert sent.cache_dir == given
        assert text.strip() in shown(found)


def test_a_directory_of_templates_is_a_path() -> None:
    settings = configure({"cache_dir": "some/where"}, {}).settings
    assert settings.cache_dir == settings.cache_folder == Path("some/where")
    sent = ServeSettings.model_validate_json(settings.model_dump_json())
    assert sent.cache_dir == Path("some/where")
