"""Settings: which source wins, what is refused with which message, and what stays secret."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.config.loader import (
    LoadedSettings,
    Override,
    as_environment,
    load_settings,
    parse_bytes,
    parse_override,
    shown,
)
from kvpool.config.settings import NodeConfig, Settings, each_setting, split_address
from kvpool.config.strict_yaml import MAX_FILE_BYTES
from kvpool.errors import ConfigError


def load(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None, sets: tuple[str, ...] = ()
) -> LoadedSettings:
    path = None
    if text:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
    return load_settings(path, env or {}, [parse_override(s) for s in sets], directory=tmp_path)


def refusal(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None, sets: tuple[str, ...] = ()
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env, sets)
    return str(caught.value)


# ---------------------------------------------------------------- sources


def test_an_advanced_setting_may_be_given_by_every_source(tmp_path: Path) -> None:
    text = "node: {quotas: {acme: 0.5}, advanced: {lease_s: 5, grace_s: 1, drain_s: 9}}"
    env = {"KVPOOL_NODE__ADVANCED__GRACE_S": "3", "KVPOOL_NODE__QUOTAS": "bolt=0.25"}
    loaded = load(tmp_path, text, env, ("node.advanced.drain_s=8",))
    node = loaded.settings.node
    assert (node.advanced.lease_s, node.advanced.grace_s, node.advanced.drain_s) == (5, 3, 8)
    assert node.quotas == {"bolt": 0.25}  # a table is replaced, not merged
    sources = [loaded.provenance[f"node.advanced.{key}"] for key in ("lease_s", "grace_s")]
    assert sources[0].startswith("file ")
    assert sources[1] == "environment KVPOOL_NODE__ADVANCED__GRACE_S"


def test_each_source_beats_the_one_before_and_is_named(tmp_path: Path) -> None:
    text = "node: {dram_bytes: 3GiB, advanced: {slab_bytes: 32MiB, lease_s: 5}}"
    env = {"KVPOOL_NODE__DRAM_BYTES": "4GiB", "KVPOOL_NODE__ADVANCED__SLAB_BYTES": "16MiB"}
    loaded = load(tmp_path, text, env, ("node.dram_bytes=5GiB",))
    node = loaded.settings.node
    assert node.dram_bytes == 5 << 30
    assert (node.advanced.slab_bytes, node.advanced.lease_s) == (16 << 20, 5.0)
    assert node.advanced.grace_s == NodeConfig().advanced.grace_s
    assert loaded.provenance["node.dram_bytes"] == "--set node.dram_bytes"
    assert (
        loaded.provenance["node.advanced.slab_bytes"]
        == "environment KVPOOL_NODE__ADVANCED__SLAB_BYTES"
    )
    assert loaded.provenance["node.advanced.lease_s"] == f"file {tmp_path / 'settings.yaml'}"
    assert loaded.provenance["node.advanced.grace_s"] == "default"


def test_of_two_flags_for_one_key_the_last_wins(tmp_path: Path) -> None:
    loaded = load(tmp_path, sets=("node.wire_port=1", "node.wire_port=2"))
    assert loaded.settings.node.wire_port == 2


def test_values_of_flags_need_not_be_text(tmp_path: Path) -> None:
    flags = [
        Override("node.transports", ["nixl"], "--transports"),
        Override("node.data_dir", tmp_path, "--data-dir"),
        Override("node.conductor", None, "--alone"),
    ]
    loaded = load_settings(None, {}, flags, directory=tmp_path)
    node = loaded.settings.node
    assert (node.transports, node.data_dir, node.conductor) == (("nixl",), tmp_path, None)
    assert loaded.provenance["node.conductor"] == "--alone"


def test_only_the_environment_that_is_passed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_LOG__LEVEL", "debug")
    monkeypatch.setenv("NODE.LEASE_S", "7")  # a flag's spelling
    monkeypatch.setenv("LOG", '{"level": "debug"}')
    assert (
        load(tmp_path).settings
        == Settings()
        == load(tmp_path, sets=("node.advanced.lease_s=30",)).settings
    )


def test_the_environment_is_named_as_it_is_written(tmp_path: Path) -> None:
    loaded = load(tmp_path, env={"KVPOOL_log__Level": "debug"})
    assert loaded.settings.log.level == "debug"
    assert loaded.provenance["log.level"] == "environment KVPOOL_log__Level"


def test_the_file_is_found_by_flag_then_environment_then_directory(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("flag.yaml", "env.yaml", "kvpool.yaml")}
    for name, path in zip(("debug", "warning", "error"), paths.values(), strict=True):
        path.write_text(f"log: {{level: {name}}}")
    env = {"KVPOOL_CONFIG": str(paths["env.yaml"])}

    def level(path: Path | None, env: dict[str, str], directory: Path) -> str:
        return load_settings(path, env, directory=directory).settings.log.level

    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    assert level(paths["flag.yaml"], env, tmp_path) == "debug"
    assert level(None, env, tmp_path) == "warning"
    assert level(None, {}, tmp_path) == "error"
    assert level(None, {}, elsewhere) == "info"


def test_every_setting_has_a_source(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert list(loaded.provenance) == [setting.key for setting in each_setting(loaded.settings)]


def test_text_from_the_environment_becomes_lists_booleans_and_nothing(tmp_path: Path) -> None:
    env = {
        "KVPOOL_NODE__TRANSPORTS": "nixl, shm",
        "KVPOOL_NODE__ADVANCED__WRITE_THROUGH": "false",
        "KVPOOL_NODE__CONDUCTOR": "none",
        "KVPOOL_NODE__NODE_ID": "",
        "KVPOOL_NODE__DATA_DIR": "~/pool",
    }
    node = load(tmp_path, env=env).settings.node
    assert node.transports == ("nixl", "shm")
    assert node.advanced.write_through is False
    assert node.conductor is None
    assert node.node_id is None
    assert node.data_dir == Path.home() / "pool"


def test_variables_that_kubernetes_injects_are_left_alone(tmp_path: Path) -> None:
    env = {
        "KVPOOL_CONDUCTOR_PORT": "tcp://10.0.0.1:7800",
        "KVPOOL_CONDUCTOR_PORT_7800_TCP_ADDR": "10.0.0.1",
        "KVPOOL_SERVICE_HOST": "10.0.0.1",
        "KVPOOL_CONDUCTOR": "10.0.0.1",
        "OTHER_NODE__DRAM_BYTES": "1",
    }
    assert set(load(tmp_path, env=env).provenance.values()) == {"default"}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "env", "sets", "parts"),
    [
        (
            "node: {dram_byte: 1GiB}",
            {},
            (),
            ("node.dram_byte ", "settings.yaml", "node.dram_bytes?"),
        ),
        ("nodes: {dram_bytes: 1GiB}", {}, (), ("nodes", "settings.yaml", "did you mean node?")),
        (
            "",
            {"KVPOOL_NODE__DRAMBYTES": "1"},
            (),
            ("node.drambytes", "KVPOOL_NODE__DRAMBYTES", "node.dram_bytes?"),
        ),
        ("", {"KVPOOL_NODES__HOST": "a"}, (), ("nodes.host", "KVPOOL_NODES__HOST", "node.host?")),
        ("", {"KVPOOL_NODE__HOST__A": "a"}, (), ("node.host.a", "KVPOOL_NODE__HOST__A")),
        ("", {"KVPOOL__NODE__HOST": "a"}, (), ("KVPOOL__NODE__HOST", "node.host?")),
        ("NODE: {host: a}", {}, (), ("NODE", "settings.yaml")),
        ("nodes:", {}, (), ("nodes", "did you mean node?")),
        ("node: {Host: a}", {}, (), ("node.Host", "node.host?")),
        ("1: {host: a}", {}, (), ("unknown setting 1 ",)),
        ("", {}, ("Node.host=a",), ("Node.host", "node.host?")),
        ("", {}, ("node=1",), ("unknown setting node ",)),
        ("", {"KVPOOL_NODE_DRAM_BYTES": "1"}, (), ("did you mean KVPOOL_NODE__DRAM_BYTES?",)),
        ("", {}, ("node.drambytes=1",), ("--set node.drambytes", "node.dram_bytes?")),
        ("", {}, ("client.salt=x",), ("client.salt", "did you mean")),
        ("", {}, ("zzz=1",), ("zzz", "sections: conductor, node")),
        ("node: {lease_s: 1}", {}, (), ("node.lease_s ", "did you mean node.advanced.lease_s?")),
        ("", {}, ("node.leases_s=1",), ("did you mean node.advanced.lease_s?",)),
        ("", {}, ("node.advanced.dram_bytes=1",), ("did you mean node.dram_bytes?",)),
        ("", {"KVPOOL_NODE__LEASE_S": "1"}, (), ("did you mean node.advanced.lease_s?",)),
        ("", {"KVPOOL_NODE__ADVANCED_LEASE_S": "1"}, (), ("node.advanced.lease_s?",)),
        ("", {"KVPOOL_NODE_ADVANCED_LEASE_S": "1"}, (), ("KVPOOL_NODE__ADVANCED__LEASE_S?",)),
        ("node: {advanced: {lease: 1}}", {}, (), ("node.advanced.lease ", "advanced.lease_s?")),
        ("node: {advancd: {lease_s: 1}}", {}, (), ("unknown setting node.advancd ",)),
        ("", {}, ("node.advanced=1",), ("set node.advanced.KEY",)),
    ],
)
def test_unknown_keys_are_refused_with_source_and_nearest_key(
    tmp_path: Path, text: str, env: dict[str, str], sets: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text, env, sets)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "setting",
    [
        "node.dram_bytes=0",
        "node.dram_bytes=-1",
        "node.dram_bytes=100TiB",
        "node.dram_bytes=lots",
        "node.dram_bytes=1.5",
        "node.wire_port=65536",
        "node.wire_port=http",
        "node.advanced.lease_s=0",
        "node.advanced.lease_s=nan",
        "node.advanced.lease_s=inf",
        "node.advanced.high_watermark=1.01",
        "node.transports=[]",
        "node.transports=rdma",
        "node.advanced.fsync=sometimes",
        "node.conductor=localhost",
        "node.host=",
        "conductor.advanced.max_prompt_tokens=0",
        "conductor.advanced.max_body_bytes=1TiB",
        "worker.role=both of them",
        "client.timeout_s=-3",
        "log.level=loud",
    ],
)
def test_absurd_values_are_refused_naming_key_and_source(tmp_path: Path, setting: str) -> None:
    key = setting.partition("=")[0]
    message = refusal(tmp_path, sets=(setting,))
    assert message.startswith(f"{key}: ")
    assert f"from --set {key}" in message


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("node.advanced.low_watermark=0.96", "below high_watermark"),
        ("node.advanced.slab_bytes=100001", "multiple of 4096"),
        ("node.advanced.slab_bytes=4GiB", "less than one slab"),
        ("node.nvme_bytes=1GiB", "set together"),
        ("node.nvme_directories=/x", "set together"),
        ("node.nvme_directories=/x,/y", "set together"),
        ("node.nvme_directories=/x,/x", "names one twice"),
        ("node.http_port=7810", "a port of its own"),
        ("conductor.advanced.heartbeat_s=3", "heartbeat_s < suspect_after_s"),
        ("conductor.advanced.dead_after_s=2", "suspect_after_s < dead_after_s"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    tmp_path: Path, setting: str, part: str
) -> None:
    message = refusal(tmp_path, sets=(setting,))
    assert part in message
    assert f"from --set {setting.partition('=')[0]}" in message


def test_nvme_is_on_one_directory_or_on_several(tmp_path: Path) -> None:
    nvme = ("node.nvme_bytes=4GiB",)
    one = load(tmp_path, sets=(*nvme, "node.nvme_directories=/x")).settings.node
    assert one.nvme_directories == (Path("/x"),)
    two = load(tmp_path, sets=(*nvme, "node.nvme_directories=/x, ~/y")).settings.node
    assert two.nvme_directories == (Path("/x"), Path.home() / "y")
    small = ("node.nvme_bytes=100MiB", "node.nvme_directories=/x,/y")
    assert "one slab of 67108864 on each" in refusal(tmp_path, sets=small)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, sets=("node.wire_port=x", "log.level=loud"))
    assert "node.wire_port" in message
    assert "log.level" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("node: [1, 2]", "node is a section, not a list"),
        ("node: {advanced: [1, 2]}", "node.advanced is a section, not a list"),
        ("- 1", "not a list"),
        ("just text", "not a text"),
        ("node: {lease_s: 1, lease_s: 2}", "given twice"),
        ("node: {", "not valid YAML"),
        ("node: {lease_s: 2026-13-45}", "not valid YAML"),
        ("node: {? [a] : 1}", "not valid YAML"),
        ("[" * 20_000, "not valid YAML"),
        ("#" * (MAX_FILE_BYTES + 1), f"exceeds {MAX_FILE_BYTES} bytes"),
        ("node: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path: Path, text: str, part: str) -> None:
    message = refusal(tmp_path, text)
    assert part in message
    assert "settings.yaml" in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml.*No such file"):
        load_settings(tmp_path / "absent.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_settings(tmp_path / "binary.yaml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(tmp_path, {})


def test_the_file_may_be_a_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"log: {level: debug}")
    os.close(write)
    try:
        assert load_settings(Path(f"/dev/fd/{read}"), {}).settings.log.level == "debug"
    finally:
        os.close(read)


def test_an_empty_file_or_section_means_defaults(tmp_path: Path) -> None:
    (tmp_path / "kvpool.yaml").write_text("# nothing\n")
    assert load(tmp_path).settings == Settings()
    assert load(tmp_path, "node:\n").settings == Settings()
    assert load(tmp_path, "node: {advanced: }\n").settings == Settings()


@pytest.mark.parametrize("text", ["node.x", "=3", ""])
def test_a_set_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_override(text)


# ---------------------------------------------------------------- values


def test_everything_binds_to_the_local_host_by_default() -> None:
    settings = Settings()
    assert {s.host for s in (settings.conductor, settings.node, settings.worker)} == {"127.0.0.1"}


def test_default_ports_of_all_roles_differ() -> None:
    settings = Settings()
    ports = [
        value
        for section in (settings.conductor, settings.node, settings.worker)
        for key, value in section
        if key.endswith("_port")
    ]
    assert len(set(ports)) == len(ports) == 8


def test_port_zero_may_be_used_for_every_service(tmp_path: Path) -> None:
    sets = ("node.wire_port=0", "node.http_port=0", "node.grpc_port=0")
    assert load(tmp_path, sets=sets).settings.node.grpc_port == 0


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().node.wire_port = 1  # type: ignore[misc]


def test_a_salt_is_kept_but_never_shown(tmp_path: Path) -> None:
    loaded = load(tmp_path, env={"KVPOOL_WORKER__SALT": "hunter2"})
    assert loaded.settings.worker.salt.get_secret_value() == "hunter2"
    assert shown(loaded.settings)["worker"]["salt"] == "***"
    assert shown(Settings())["worker"]["salt"] == ""
    assert "hunter2" not in json.dumps(shown(loaded.settings)) + repr(loaded)


def test_a_salt_does_not_appear_in_a_refusal(tmp_path: Path) -> None:
    message = refusal(tmp_path, "worker: {salt: [hunter2]}")
    assert "worker.salt" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        (17, 17),
        ("64k", 64 << 10),
        ("64KiB", 64 << 10),
        (" 2 GiB ", 2 << 30),
        ("1.5gib", 3 << 29),
        ("1TB", 10**12),
        ("0.5MB", 500_000),
        ("3B", 3),
    ],
)
def test_sizes_are_read_with_their_units(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1GiB", "1 parsec", "1.3B", "1e9", 1.5, True, None, []]
)
def test_what_is_no_size_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"size|whole number"):
        parse_bytes(bad)


@given(st.integers(0, 2**50), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_whole_sizes_are_exact_however_large(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count}{unit[0]}") == count << unit[1]


def test_addresses_are_split() -> None:
    assert split_address("a.b:1") == ("a.b", 1)
    assert split_address("[::1]:7800") == ("::1", 7800)
    for bad in ("a", "a:", ":1", "a:0", "a:65536", "a:x", "::1:7800", ""):
        with pytest.raises(ValueError, match=r"host:port|brackets"):
            split_address(bad)


def test_settings_survive_the_way_to_a_child_process(tmp_path: Path) -> None:
    config = NodeConfig(
        node_id="n",
        token="kvp_secret",
        quotas={"acme": 0.25, "bolt": 1 << 20},
        nvme_directories=(tmp_path / "a", tmp_path / "b"),
        nvme_bytes=1 << 30,
        conductor=None,
        drain_on_stop=True,
        transports=("shm",),
        advanced={"lease_s": 7, "numa_nodes": (0, 1), "runtime_dir": tmp_path},
    )
    for expected in (config, NodeConfig()):
        env = as_environment("node", expected)
        assert load_settings(None, env, directory=tmp_path).settings.node == expected


@pytest.mark.parametrize("section", ["client", "node", "worker", "conductor"])
def test_a_token_is_never_shown(section: str, tmp_path: Path) -> None:
    name = f"KVPOOL_{section.upper()}__TOKEN"
    loaded = load_settings(None, {name: "kvp_secret"}, directory=tmp_path)
    assert "kvp_secret" not in f"{shown(loaded.settings)} {loaded}"
    assert shown(loaded.settings)[section]["token"] == "***"
    both = {name: "kvp_secret", f"KVPOOL_{section.upper()}__TLS_CERT": "x.pem"}
    with pytest.raises(ConfigError) as caught:
        load_settings(None, both, directory=tmp_path)
    assert "kvp_secret" not in str(caught.value)
