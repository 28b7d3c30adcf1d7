"""Files for deployment: that they name what exists, and publish nothing to other machines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from kvpool.cli.commands import COMMANDS
from kvpool.config.loader import load_settings

ROOT = Path(__file__).parents[2]


def test_compose_publishes_to_this_machine_only_and_sets_known_settings(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    assert {"conductor", "node-a", "node-b", "valkey", "prometheus", "grafana"} <= set(services)
    published = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len({port.split(":")[1] for port in published}) == len(published)
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (
                (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
            )
        if service.get("image", "").startswith("kvpool"):
            assert service["command"][0] in COMMANDS
            settings = {name: str(value) for name, value in service["environment"].items()}
            load_settings(None, settings, directory=tmp_path)


def test_every_scrape_target_is_a_service() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    for job in scrape["scrape_configs"]:
        for config in job["static_configs"]:
            assert {target.split(":")[0] for target in config["targets"]} <= set(services)


def test_every_panel_asks_for_metrics_that_some_process_has() -> None:
    known: set[str] = set()
    for package in ("kvpool", "tiers", "conductor", "workers"):
        for source in (ROOT / package).rglob("*.py"):
            known |= set(re.findall(r'"(kvpool_[a-z_]+)"', source.read_text()))
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/kvpool.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"kvpool_[a-z_]+", query)}
    assert asked
    # What Prometheus appends to the name of a counter or a histogram.
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked} <= known
