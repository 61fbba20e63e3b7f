"""Metrics and traces: they tell what happened, and dashboard and alert rules ask for what there is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import moored
import promql_parser
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_access import make_token
from test_http import get
from test_http_clients import send
from waiting import wait_until

from service import ROOT, Service

Simulate = Callable[..., Service]
DOCS = ROOT / "docs/metrics"


def samples(
    service: Service, **headers: str
) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """What a scrape tells: by name, the values by labels."""
    status, text = get(service, "/metrics", **headers)
    assert status == 200
    told: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return told


def value(told: dict[str, Any], name: str, **labels: str) -> float:
    """The sum over all samples that have these labels."""
    wanted = set(labels.items())
    return sum(one for of, one in told.get(name, {}).items() if wanted <= set(of))


def test_a_picture_and_its_refusal_are_counted(simulate: Simulate) -> None:
    service = simulate("sim:24GiB")
    with service.client() as client:
        client.generate_image("a boat", model="small", width=64, height=64, steps=3)
        client.generate_image("a boat", model="small", width=64, height=64, steps=3)
        with pytest.raises(moored.ModelNotFound):
            client.generate_image("a boat", model="missing")
        assert get(service, "/v1/models/missing")[0] == 404
        client.unload("small")
    told = samples(service)
    assert value(told, "moored_jobs_accepted_total", call="GenerateImage") == 2
    assert value(told, "moored_jobs_ended_total", end="done") == 2
    assert value(told, "moored_job_duration_seconds_count", call="GenerateImage") == 2
    assert value(told, "moored_steps_total") == 6
    assert value(told, "moored_stages_total", stage="encode_text", cached="false") == 1
    assert value(told, "moored_stages_total", stage="encode_text", cached="true") == 1
    assert value(told, "moored_stage_duration_seconds_count", stage="denoise", phase="run") == 2
    assert value(told, "moored_stage_scratch_ratio_count", stage="decode") == 2
    loaded = value(told, "moored_loaded_bytes_total")
    assert value(told, "moored_loads_total") >= 3
    assert value(told, "moored_unloaded_bytes_total") == loaded > 0
    assert value(told, "moored_unload_left_bytes_total") == 0
    for protocol in ("grpc", "http"):
        refused = value(
            told, "moored_calls_refused_total", protocol=protocol, reason="MODEL_NOT_FOUND"
        )
        assert refused == 1, protocol
    accounts = {
        dict(of)["account"]: of_card for of, of_card in told["moored_card_memory_bytes"].items()
    }
    assert sum(accounts.values()) == value(told, "moored_card_capacity_bytes")


def test_calls_without_the_right_token_are_counted(simulate: Simulate, tmp_path: Path) -> None:
    token = make_token(tmp_path / "state-0", "olga", role="observe")
    service = simulate("sim:24GiB")
    headers = {"Authorization": f"Bearer {token}"}
    assert get(service, "/v1/models")[0] == 401
    assert get(service, "/v1/models", **headers)[0] == 200
    assert (
        send(service, "POST", "/v1/images/generations", {"prompt": "a boat"}, headers).status == 403
    )
    told = samples(service, **headers)
    for method, reason, calls in (
        ("GET /v1/models", "UNAUTHENTICATED", 2),
        ("POST /v1/images/generations", "ROLE_REQUIRED", 1),
    ):
        of = {"protocol": "http", "method": method}
        assert value(told, "moored_calls_refused_total", reason=reason, **of) == 1
        assert value(told, "moored_calls_total", **of) == calls


def test_what_is_resident_is_told_by_tier(simulate: Simulate) -> None:
    service = simulate("sim:24GiB")
    with service.client() as client:
        client.load("small")
    told = samples(service)
    on_card = value(told, "moored_component_bytes", tier="card")
    assert on_card == value(told, "moored_loaded_bytes_total") > 0


def names_in(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    promql_parser.parse(expression)  # it is one
    return set(re.findall(r"\bmoored_\w+", expression))


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((DOCS / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert {"summary", "action"} <= set(rule["annotations"]), rule["alert"]
            yield rule["alert"], rule["expr"]


def test_the_dashboard_and_the_alerts_ask_for_what_there_is() -> None:
    documented = set(re.findall(r"`(moored_\w+)`", (ROOT / "docs/METRICS.md").read_text()))
    found = list(expressions())
    assert len(found) > 20
    for where, expression in found:
        for name in names_in(expression):
            base = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert base in documented, f"{where}: {name}"


class Collector:
    """A collector of OpenTelemetry, which keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.came = threading.Condition()
        handler = grpc.method_handlers_generic_handler(
            "opentelemetry.proto.collector.trace.v1.TraceService",
            {
                "Export": grpc.unary_unary_rpc_method_handler(
                    self.export,
                    request_deserializer=ExportTraceServiceRequest.FromString,
                    response_serializer=ExportTraceServiceResponse.SerializeToString,
                )
            },
        )
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def export(self, request: Any, _context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.stop(None)


def test_a_job_is_a_trace_from_the_call_to_the_stage(
    simulate: Simulate, collector: Collector
) -> None:
    service = simulate(
        "sim:24GiB", arguments=("--set", f"log.otlp=http://127.0.0.1:{collector.port}")
    )
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"prompt": "a boat", "model": "small", "size": "64x64", "steps": 2}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert send(service, "POST", "/v1/images/generations", body, headers).status == 200
    wait_until(
        lambda: any(span.name == "GenerateImage" for span in collector.spans), "its trace came"
    )
    by_name = {span.name: span for span in collector.spans}
    job = by_name["GenerateImage"]
    assert (job.trace_id.hex(), job.parent_span_id.hex()) == (trace, parent)
    attributes = {one.key: one.value.string_value for one in job.attributes}
    assert attributes["gen_ai.request.model"].startswith("small")
    assert attributes["gen_ai.output.type"] == "image"
    for stage in ("encode_text", "denoise", "decode"):
        span = by_name[stage]
        assert span.parent_span_id == job.span_id
        assert job.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= job.end_time_unix_nano
    assert by_name["denoise"].start_time_unix_nano >= by_name["encode_text"].end_time_unix_nano


def test_a_collector_that_is_not_there_holds_nothing_up(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate("sim:24GiB", arguments=("--set", "log.otlp=http://127.0.0.1:9"))
    with service.client() as client:
        client.generate_image("a boat", model="small", width=64, height=64)
    service.stop()
