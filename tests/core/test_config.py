"""The configuration: which source wins, what is refused and how that is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moonpool import _native
from moonpool.core.config import config, sections, setting, units
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.config.schema import json_schema, markdown
from moonpool.core.errors import ConfigError, InvalidArgument


def written(folder: Path, text: str) -> Path:
    file = folder / "moonpool.toml"
    file.write_text(text)
    return file


def test_each_source_beats_the_one_before_and_is_remembered(runtime: Path) -> None:
    file = written(runtime, '[node]\ndram = "3GiB"\nname = "by-file"\nhttp = "off"\n')
    env = {"MOONPOOL_NODE_NAME": "by-env", "MOONPOOL_NODE_HTTP": "127.0.0.1:1"}
    made = config.load(file, env=env, arguments={"node.http": "127.0.0.1:2", "node.socket": None})
    assert made.node.dram == 3 << 30
    assert made.node.name == "by-env"
    assert made.node.http == "127.0.0.1:2"
    assert str(made.origin("node.dram")) == f"file {file}"
    assert str(made.origin("node.name")) == "environment MOONPOOL_NODE_NAME"
    assert str(made.origin("node.http")) == "argument --http"
    assert str(made.origin("node.socket")) == "default"


def test_defaults_are_those_of_the_design() -> None:
    node = config.load(env={}).node
    assert (node.listen, node.http) == ("127.0.0.1:7710", "127.0.0.1:7711")
    assert (node.key_bytes_max, node.parts_max) == (1024, 4096)
    assert (node.frame_bytes_max, node.frame_keys_max) == (8 << 20, 16384)
    assert node.object_share_max == 0.25
    assert config.load(env={}).proxy.listen == "127.0.0.1:8080"


def test_the_file_may_come_from_the_environment_and_an_argument_beats_it(runtime: Path) -> None:
    first = written(runtime, '[node]\nname = "first"\n')
    second = runtime / "second.toml"
    second.write_text('[node]\nname = "second"\n')
    env = {"MOONPOOL_CONFIG": str(first)}
    assert config.load(env=env).node.name == "first"
    assert config.load(second, env=env).node.name == "second"


def test_the_object_is_frozen() -> None:
    made = config.load(env={})
    with pytest.raises(AttributeError):
        made.node.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\ndramm = 1\n", "unknown key node.dramm in the config file .*; did you mean node.dram?"),
        ("[nodes]\ndram = 1\n", "unknown section nodes in the config file .*; did you mean node?"),
        ("node = 1\n", r"node in the config file .* must be a table, written \[node\]"),
        (
            '[[up.engine]]\nmodell = "x"\n',
            r"unknown key up.engine\[0\].modell .*; did you mean up.engine\[0\].model?",
        ),
        ('[node]\ndram = "2 gigs"\n', "node.dram = '2 gigs' .* write for example 2GiB"),
        ("[node]\ndram = -1\n", "node.dram = -1 .* >= 0"),
        ("[node]\nname = 7\n", "node.name = 7 .*expected `str`"),
        ("[up]\nnode = 1\n", "up.node = 1 .*expected `bool`"),
        ('[log]\nlevel = "inf"\n', "log.level = 'inf' .* did you mean info?"),
        ("[[up.engine]]\nport = 70000\n", r"up.engine\[0\].port = 70000 .*<= 65535"),
        ('[[up.engine]]\nengine = "vlm"\n', r"up.engine\[0\].engine = 'vlm' .*vllm"),
        ('[[up.node]]\ndramm = "1GiB"\n', r"unknown key up.node\[0\].dramm .*did you mean up.node\[0\].dram"),
        ('[[up.node]]\ndram = "1 gig"\n', r"up.node\[0\].dram = '1 gig' .* write for example 2GiB"),
        ("[up]\nengine = [1]\n", r"up.engine\[0\] = 1 .*must be a table"),
        ("[up]\ngrace_s = 'soon'\n", "up.grace_s = 'soon' .* write for example 1.5s"),
        ("[node\n", "is no valid TOML"),
        ('[cluster]\ntoken = "s3cret"\n', "cluster.token must not stand in the config file"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_key_the_place_and_the_remedy(
    runtime: Path, text: str, message: str
) -> None:
    file = written(runtime, text)
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(file, env={})
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_missing_file_is_an_error(runtime: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*: No such file"):
        config.load(runtime / "nowhere.toml", env={})


@pytest.mark.parametrize(
    ("variable", "near"),
    [("MOONPOOL_NODE_DRAMM", "MOONPOOL_NODE_DRAM"), ("MOONPOOL_NOED_DRAM", "MOONPOOL_NODE_DRAM")],
)
def test_a_misspelt_variable_is_an_error(variable: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown variable {variable} in the environment; did you mean {near}"
    ):
        config.load(env={variable: "1GiB"})


def test_a_variable_of_a_known_section_is_an_error_however_little_it_resembles() -> None:
    with pytest.raises(ConfigError, match="unknown variable MOONPOOL_LOG_ZZZ in the environment"):
        config.load(env={"MOONPOOL_LOG_ZZZ": "1"})


def test_variables_that_are_not_settings_are_left_alone() -> None:
    config.load(
        env={
            "MOONPOOL_CACHE": "/somewhere",
            "MOONPOOL_DEBUG": "1",
            "MOONPOOL_RUNTIME_DIR": "/x",
            "MOONPOOL_VLLM_PYTHON": "/v/bin/python",
            "MOONPOOL_NODE_SERVICE_HOST": "10.0.0.1",
            "MOONPOOL_NODE_PORT": "tcp://10.0.0.1:7710",
            "MOONPOOL_NODE_PORT_7710_TCP_ADDR": "10.0.0.1",
        }
    )


def test_text_of_a_variable_becomes_the_type_of_the_key() -> None:
    made = config.load(
        env={
            "MOONPOOL_UP_NODE": '[{"name": "a", "dram": "2GiB"}, {}]',
            "MOONPOOL_UP_MASTER": "no",
            "MOONPOOL_UP_GRACE_S": "200ms",
            "MOONPOOL_UP_START_ATTEMPTS_MAX": "5",
            "MOONPOOL_NODE_OBJECT_SHARE_MAX": "0.5",
            "MOONPOOL_PROXY_ENGINES": "http://a:1, b=http://b:2",
            "MOONPOOL_NODE_TENANTS": "a=1GiB,b=2",
            "MOONPOOL_UP_ENGINE": '[{"model": "m", "port": 1}]',
        }
    )
    assert made.up.node == [sections.UpNode(name="a", dram=2 << 30), sections.UpNode()]
    assert made.up.master is False
    assert config.load(env={"MOONPOOL_UP_NODE": "no"}).up.node is False
    assert made.up.grace_s == 0.2
    assert made.up.start_attempts_max == 5
    assert made.node.object_share_max == 0.5
    assert made.proxy.engines == ["http://a:1", "b=http://b:2"]
    assert made.node.tenants == {"a": 1 << 30, "b": 2}
    assert made.up.engine == [sections.Engine(model="m", port=1)]


@pytest.mark.parametrize(
    "env",
    [
        {"MOONPOOL_UP_NODE": "perhaps"},
        {"MOONPOOL_UP_START_ATTEMPTS_MAX": "many"},
        {"MOONPOOL_NODE_TENANTS": "a"},
        {"MOONPOOL_UP_ENGINE": "[1"},
        {"MOONPOOL_NODE_OBJECT_SHARE_MAX": "2"},
    ],
)
def test_text_that_is_no_value_is_an_error_that_names_the_variable(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        config.load(env=env)


def test_the_token_environment_beats_the_file_and_an_argument_beats_both(runtime: Path) -> None:
    secret = runtime / "secret"
    secret.touch(0o600)
    secret.write_text("of-the-file")
    file = written(runtime, f'[cluster]\ntoken_file = "{secret}"\n')
    env = {"MOONPOOL_CLUSTER_TOKEN": "of-env"}
    assert config.load(file, env={}).read_token() == b"of-the-file"
    assert config.load(file, env=env).read_token() == b"of-env"
    assert config.load(env=env, arguments={"cluster.token_file": str(secret)}).read_token() == b"of-the-file"
    with pytest.raises(ConfigError, match="unset one of them"):
        config.load(env=env | {"MOONPOOL_CLUSTER_TOKEN_FILE": str(secret)}).read_token()
    assert config.load(env={}).token_is_configured is False
    assert config.load(env=env).token_is_configured is True
    assert config.load(file, env={}).token_is_configured is True


def test_the_admin_token_has_the_same_sources_and_a_file_of_its_own(runtime: Path) -> None:
    made_here = config.load(env={}).read_admin_token()
    assert (runtime / "admin-token").read_bytes().strip() == made_here
    assert (runtime / "admin-token").stat().st_mode & 0o777 == 0o600
    assert made_here != config.load(env={}).read_token()
    env = {"MOONPOOL_CLUSTER_ADMIN_TOKEN": "of-env"}
    assert config.load(env=env).read_admin_token() == b"of-env"
    assert "of-env" not in str(list(config.load(env=env).rows()))
    file = runtime / "open"
    file.touch(0o644)
    with pytest.raises(ConfigError, match=f"the admin token file {file} can be read by others"):
        config.load(env={"MOONPOOL_CLUSTER_ADMIN_TOKEN_FILE": str(file)}).read_admin_token()
    with pytest.raises(ConfigError, match=r"cluster.admin_token must not stand in the config file"):
        config.load(written(runtime, '[cluster]\nadmin_token = "x"\n'), env={})


def test_rows_do_not_show_the_password_of_a_store(runtime: Path) -> None:
    url, variable = "redis://:s3@cret@h:1/2", "MOONPOOL_CLUSTER_METADATA"
    loaded = config.load(env={variable: url, f"{variable}_PASSWORD": "s3cret"})
    rows = {key: value for key, value, _ in loaded.rows()}
    assert rows["cluster.metadata"] == '"redis://***@h:1/2"'
    assert rows["cluster.metadata_password"] == "(set)"
    assert loaded.cluster.metadata == url


def test_rows_show_all_keys_and_never_the_secret(runtime: Path) -> None:
    rows = list(config.load(env={"MOONPOOL_CLUSTER_TOKEN": "s3cret", "MOONPOOL_NODE_DRAM": "1536MiB"}).rows())
    assert "s3cret" not in str(rows)
    assert ("cluster.token", "(set)", "environment MOONPOOL_CLUSTER_TOKEN") in rows
    assert ("node.dram", '"1.5GiB"', "environment MOONPOOL_NODE_DRAM") in rows
    assert ("up.grace_s", '"15s"', "default") in rows


def test_every_key_has_a_help_text() -> None:
    for kind in (*sections.SECTIONS.values(), *sections.TABLES.values()):
        assert [each.name for each in setting.settings_of(kind) if not each.help] == []


def test_the_schema_knows_units_choices_and_no_secret() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(sections.SECTIONS)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["node"]["properties"]["dram"]["type"] == ["integer", "string"]
    assert schema["properties"]["node"]["additionalProperties"] is False
    assert not {"token", "admin_token"} & set(schema["properties"]["cluster"]["properties"])
    assert schema["$defs"]["Engine"]["properties"]["engine"]["enum"] == ["vllm", "sglang", "mock"]
    assert schema["$defs"]["UpNode"]["properties"]["dram"]["type"] == ["integer", "string"]
    msgspec.json.encode(schema)


@pytest.mark.parametrize(
    ("example", "nodes", "engines"),
    [
        ("up.toml", True, {"left": "both", "right": "both"}),
        ("disaggregated.toml", True, {"prefill": "prefill", "decode": "decode"}),
        ("cluster.toml", ["a", "b"], {"left": "both", "right": "both"}),
    ],
)
def test_the_examples_are_valid_configurations(example: str, nodes: object, engines: dict[str, str]) -> None:
    made = config.load(Path(__file__).parents[2] / "examples" / example, env={})
    assert {engine.name: engine.role for engine in made.up.engine} == engines
    found = made.up.node
    assert (found if isinstance(found, bool) else [node.name for node in found]) == nodes


def test_the_documentation_has_every_key_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert page.endswith(markdown() + "\n"), "update it with: moonpool config schema --markdown"


def test_an_embedded_node_has_the_defaults_of_the_configuration() -> None:
    made = config.load(env={})
    assert node_settings() == node_settings(made.node)
    assert node_settings()["connections_max"] == made.node.connections_max
    assert master_settings(keys_max=7) == master_settings(made.master) | {"keys_max": 7}


@pytest.mark.parametrize("kind", ["node", "master"])
def test_a_native_server_takes_each_of_its_settings_and_no_other(kind: str) -> None:
    def make(settings: dict[str, object]) -> object:
        if kind == "node":
            return _native.Server("", [("default", 1 << 20)], b"token", settings)
        return _native.MasterServer(["127.0.0.1:0"], b"token", settings)

    whole = node_settings() if kind == "node" else master_settings()
    make(whole)
    for name in whole:
        with pytest.raises(InvalidArgument, match=f"the setting {name} is missing"):
            make({key: value for key, value in whole.items() if key != name})
        with pytest.raises(InvalidArgument, match=f"the setting {name} cannot be None"):
            make(whole | {name: None})
    with pytest.raises(InvalidArgument, match="there is no setting more"):
        make(whole | {"more": 1})


def test_the_proxy_runs_with_the_settings_of_its_section() -> None:
    from moonpool.disagg_proxy.events.settings import PoolSettings
    from moonpool.disagg_proxy.from_config import proxy_settings
    from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings

    engines = {"proxy.engines": ["a=http://h:1"]}
    assert proxy_settings(config.load(env={}, arguments=engines)) == ProxySettings(
        engines=(EngineSpec("a", "http://h:1"),)
    )
    two = {"proxy.engines": ["a=http://h:1", "b=http://h:2"]}
    assert proxy_settings(config.load(env={}, arguments=two)).pool == PoolSettings()
    none = config.load(env={}, arguments={**two, "proxy.pool": "none"})
    assert proxy_settings(none).pool is None
    changed = {
        "proxy.engines": ["http://h:1"],
        "proxy.head_s": 3,
        "proxy.health_path": "/x",
        "proxy.retries_max": 0,
        "proxy.queue_max": 7,
        "proxy.ttft_slo": 2.5,
        "proxy.silent_engine_s": 7,
        "proxy.breaker_failures_max": 9,
        "proxy.relay_paths": ["/v1/x"],
    }
    made = proxy_settings(config.load(env={}, arguments=changed))
    assert (made.admission.queue_max, made.admission.ttft_slo, made.policy) == (7, 2.5, "conductor")
    assert (made.deadlines.head_s, made.health.path, made.limits.retries_max) == (3.0, "/x", 0)
    assert (made.deadlines.silent_engine_s, made.breaker.failures_max, made.relay_paths) == (7, 9, ["/v1/x"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("body_bytes_max", 0),
        ("address_share", 1.5),
        ("head_s", 0),
        ("drain_s", -1),
        ("health_timeout_s", 0),
        ("breaker_open_s", 0),
        ("discovery_grace_s", -1),
        ("processes", 65),
        ("handover", "x"),
    ],
)
def test_a_setting_of_the_proxy_has_bounds(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"proxy.{key} = .* \(argument --.*\) is wrong"):
        config.load(env={}, arguments={f"proxy.{key}": value})


@pytest.mark.parametrize("key", ["drain_s", "retries_max", "idle_upstreams_max", "queue_max"])
def test_these_may_be_0(key: str) -> None:
    made = config.load(env={}, arguments={f"proxy.{key}": 0})
    assert {name: value.strip('"s') for name, value, _ in made.rows()}[f"proxy.{key}"] == "0"


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({}, "round_robin"),
        ({"proxy.prefill": ["http://h:2"], "proxy.decode": ["http://h:3"]}, "conductor"),
        ({"proxy.events": ["a=tcp://h:5557"]}, "conductor"),
        ({"proxy.pool_events": ["node=tcp://h:5557"]}, "conductor"),
        ({"proxy.discovery": ["http"]}, "conductor"),
        ({"cluster.master": "127.0.0.1:7700"}, "conductor"),  # there is a pool
        ({"cluster.master": "127.0.0.1:7700", "proxy.pool": "none"}, "round_robin"),
        ({"proxy.events": ["a=tcp://h:5557"], "proxy.policy": "least_load"}, "least_load"),
    ],
)
def test_the_policy_follows_from_what_there_is_unless_it_is_named(
    arguments: dict[str, object], policy: str, runtime: Path
) -> None:
    from moonpool.disagg_proxy.from_config import proxy_settings

    engines = {"proxy.engines": ["a=http://h:1"]}
    assert proxy_settings(config.load(env={}, arguments=engines | arguments)).policy == policy


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("512 MB", 512 * 10**6),
        ("1.5KiB", 1536),
        ("7", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XB", "1e9", "2GiB2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        units.parse_size(text)


def test_durations() -> None:
    assert units.parse_duration("200ms") == 0.2
    assert units.parse_duration("1.5") == 1.5
    assert units.parse_duration("2min") == 120.0
    with pytest.raises(ValueError, match="is no duration"):
        units.parse_duration("soon")


def test_numbers_for_people() -> None:
    assert [units.format_size(size) for size in (0, 1023, 1536, 2 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "2.0 GiB",
        "5.0 TiB",
    ]
    assert [units.format_duration(s) for s in (0.35, 12.5, 200, 7500)] == [
        "350 ms",
        "12.5 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
