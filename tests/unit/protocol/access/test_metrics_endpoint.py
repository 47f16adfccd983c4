"""The endpoint answers Prometheus, and nobody else who comes to its port."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from slipstream.client.agent_gateway import MAX_HEAD_BYTES
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import free_port
from slipstream.core.run_folder import TARGETS
from slipstream.core.settings.config import Config
from slipstream.extensions.prometheus import endpoint
from slipstream.extensions.prometheus.endpoint import metrics_endpoint
from support.fakes.small_configs import small_config
from support.rigs.fuzz_budget import BUDGET
from support.rigs.waiting import LIMIT_S

TOKEN = "m" * 32


class Weather:
    """A collector with a label that a user named; `fails` makes a scrape fail."""

    fails = False

    def collect(self) -> Iterator[Metric]:
        if self.fails:
            raise RuntimeError("no weather")
        family = GaugeMetricFamily(
            "slipstream_warmth_celsius", "Warmth.", labels=["environment"]
        )
        family.add_metric(['a "b"\n\\c'], 20.5)
        yield family


def metrics_config(
    folder: Path, address: str = "127.0.0.1:0", **security: object
) -> Config:
    return small_config(
        run={"dir": str(folder)}, tracking={"prometheus": address}, security=security
    )


def target_of(config: Config, name: str = "controller") -> tuple[str, int]:
    (entry,) = json.loads((config.run.dir / TARGETS / f"test@{name}.json").read_text())
    host, _, port = entry["targets"][0].rpartition(":")
    return host, int(port)


async def said(
    config: Config, request: bytes, context: ssl.SSLContext | None = None
) -> bytes:
    """All that the endpoint answers before it ends the connection."""
    reader, writer = await asyncio.open_connection(*target_of(config), ssl=context)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def get(path: str = "/metrics", *, host: str = "localhost", **headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_every_sample_has_the_run_and_its_own_labels(tmp_path):
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", [Weather()]):
        head, _, body = (await said(config, get())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    (warmth,) = families["slipstream_warmth_celsius"].samples
    assert warmth.labels == {"run": "test", "environment": 'a "b"\n\\c'}
    assert warmth.value == 20.5
    assert families["process_cpu_seconds"].samples[0].labels == {"run": "test"}
    assert not list((config.run.dir / TARGETS).iterdir())


async def test_a_file_of_targets_that_cannot_be_written_is_told_and_ends_nothing(
    tmp_path, caplog
):
    config = metrics_config(tmp_path)
    (config.run.dir / TARGETS).touch()
    async with metrics_endpoint(config, "controller", [Weather()]):
        (messages,) = [line for line in caplog.messages if "cannot be written" in line]
    path = config.run.dir / TARGETS / "test@controller.json"
    assert messages.startswith(
        f"{path} cannot be written: File exists; Prometheus does not find "
    )


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/"), b"404"),
        (get("/metrics?name=x"), b"200"),
        (get().replace(b"GET", b"POST"), b"405"),
        (get().replace(b"GET", b"HEAD"), b"200"),
        (get(host="127.0.0.1:9400"), b"200"),
        (get(host="[::1]"), b"200"),
        (get(host="rebound.example:9400"), b"403"),
        (get(host="rebound.example"), b"403"),
        (get(host=""), b"403"),
        (get(host="a b:1"), b"403"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"403"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET /" + b"x" * (MAX_HEAD_BYTES + 1), b""),
    ],
    ids=range(14),
)
async def test_only_metrics_are_there_and_only_under_a_name_of_loopback(
    tmp_path, request_bytes, status
):
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", [Weather()]):
        answer = await said(config, request_bytes)
    assert answer[9:12] == status
    if request_bytes.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")


async def test_openmetrics_are_spoken_to_who_accepts_them(tmp_path):
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", [Weather()]):
        answer = await said(
            config, get(Accept="application/openmetrics-text;version=1.0.0")
        )
    assert b"content-type: application/openmetrics-text; version=1.0.0" in answer
    assert answer.endswith(b"# EOF\n")


async def test_a_token_is_asked_for_where_there_is_one(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    config = metrics_config(tmp_path, metrics_token_file=str(tmp_path / "token"))
    async with metrics_endpoint(config, "controller", [Weather()]):
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}):
            answer = await said(config, get(**wrong))
            assert answer[9:12] == b"401"
            assert b"celsius" not in answer
        right = await said(
            config, get(host="any.example", Authorization=f"Bearer {TOKEN}")
        )
        assert right[9:12] == b"200"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 "
        "-nodes -days 2 -subj /CN=m"
    )
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = [*make.split(), *names, "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return {
        "tls_certificate": str(folder / "cert.pem"),
        "tls_key": str(folder / "key.pem"),
    }


# Controller and rollout server have the second one.
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.process
def test_with_the_runs_certificate_it_speaks_tls_alone(run, tmp_path, pair):
    config = metrics_config(tmp_path, **pair)
    trusting = ssl.create_default_context(cafile=pair["tls_certificate"])

    async def asked() -> None:
        async with metrics_endpoint(config, "controller", [Weather()]):
            assert b"slipstream_warmth_celsius" in await said(config, get(), trusting)
            assert await said(config, get()) == b""
            with pytest.raises(ssl.SSLError):
                await said(config, get(), ssl.create_default_context())
            assert b"slipstream_warmth_celsius" in await said(config, get(), trusting)

    run(asked())


@pytest.mark.process
async def test_it_tells_when_its_certificate_ends(tmp_path, pair):
    config = metrics_config(tmp_path, **pair)
    trusting = ssl.create_default_context(cafile=pair["tls_certificate"])
    async with metrics_endpoint(config, "controller", []):
        answer = await said(config, get(), trusting)
    families = text_string_to_metric_families(answer.partition(b"\r\n\r\n")[2].decode())
    (end,) = next(f.samples for f in families if "certificate_end" in f.name)
    assert end.labels["setting"] == "security.tls_certificate"
    command = ["openssl", "x509", "-enddate", "-noout", "-in", pair["tls_certificate"]]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert end.value == ssl.cert_time_to_seconds(
        shown.strip().removeprefix("notAfter=")
    )


async def test_a_last_word_waits_for_a_scraper_that_was_there_lately(tmp_path):
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", []) as served:
        await said(config, get())
        waiting = asyncio.create_task(served.next_scrape())
        await asyncio.sleep(0)
        assert not waiting.done()
        # Not one of these is a scrape.
        await said(config, get("/"))
        await said(config, get(host="rebound.example"))
        assert not waiting.done()
        await said(config, get())
        await asyncio.wait_for(waiting, LIMIT_S)


async def test_a_last_word_that_nobody_would_hear_waits_for_nobody(
    tmp_path, monkeypatch
):
    # A wait would not end while the test runs.
    monkeypatch.setattr(endpoint, "LAST_SCRAPE_S", 600.0)
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", []) as served:
        await asyncio.wait_for(served.next_scrape(), LIMIT_S)


@pytest.mark.process
async def test_it_asks_for_a_certificate_where_the_controller_does(tmp_path, pair):
    config = metrics_config(tmp_path, tls_client_ca=pair["tls_certificate"], **pair)
    trusting = ssl.create_default_context(cafile=pair["tls_certificate"])
    async with metrics_endpoint(config, "controller", [Weather()]):
        # The refusal may come as an alert, or with the end of the connection.
        with contextlib.suppress(ssl.SSLError):
            assert await said(config, get(), trusting) == b""
        trusting.load_cert_chain(pair["tls_certificate"], pair["tls_key"])
        assert b"slipstream_warmth_celsius" in await said(config, get(), trusting)


@pytest.mark.process
def test_off_loopback_it_needs_a_certificate_and_a_token_of_its_own(tmp_path, pair):
    (tmp_path / "token").write_text(TOKEN)

    async def opened(**security: str) -> None:
        async with metrics_endpoint(
            metrics_config(tmp_path, "10.1.2.3:9400", **security), "controller", []
        ):
            pass

    with pytest.raises(ConfigError, match=r"set security\.tls_certificate and tls_key"):
        asyncio.run(opened(metrics_token_file=str(tmp_path / "token")))
    # The run's own token opens much more than a scraper should.
    with pytest.raises(ConfigError, match=r"set security\.metrics_token_file"):
        asyncio.run(opened(token_file=str(tmp_path / "token"), **pair))


async def has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_silent_connection_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "LIMIT_S", 0.2)
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", [Weather()]):
        reader, writer = await asyncio.open_connection(*target_of(config))
        assert await has_ended(reader)
        writer.close()


async def test_the_oldest_silent_connection_makes_room(tmp_path, monkeypatch):
    # No connection ends by itself while the test runs.
    monkeypatch.setattr(endpoint, "LIMIT_S", 600.0)
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 4)
    config = metrics_config(tmp_path)
    async with metrics_endpoint(config, "controller", [Weather()]):
        silent = [await asyncio.open_connection(*target_of(config)) for _ in range(8)]
        assert (await said(config, get()))[9:12] == b"200"
        assert all([await has_ended(reader) for reader, _ in silent[:5]])
        assert not any(reader.at_eof() for reader, _ in silent[5:])
        for _, writer in silent:
            writer.close()


async def test_a_scrape_that_fails_harms_no_later_one(tmp_path, caplog):
    config = metrics_config(tmp_path)
    weather = Weather()
    async with metrics_endpoint(config, "controller", [weather]):
        weather.fails = True
        assert (await said(config, get()))[9:12] == b"500"
        assert "no weather" in caplog.text
        weather.fails = False
        assert (await said(config, get()))[9:12] == b"200"


@BUDGET.readings
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_no_fuzzed_request_ends_the_endpoint(tmp_path_factory, parts):
    config = metrics_config(tmp_path_factory.mktemp("fuzzed"))

    async def talk() -> bytes:
        async with metrics_endpoint(config, "controller", [Weather()]):
            _, writer = await asyncio.open_connection(*target_of(config))
            for part in parts:
                writer.write(part)
            writer.write_eof()
            answer = await said(config, get())
            writer.close()
            return answer

    assert asyncio.run(talk())[9:12] == b"200"


async def test_each_process_of_a_host_finds_a_port_of_its_own(tmp_path):
    port = free_port("127.0.0.1")
    config = metrics_config(tmp_path, f"127.0.0.1:{port}")
    async with (
        metrics_endpoint(config, "controller", []),
        metrics_endpoint(config, "rollout_server", [], server="one"),
        metrics_endpoint(config, "rollout_server", [], server="two"),
    ):
        names = ("controller", "one", "two")
        ports = [target_of(config, name)[1] - port for name in names]
        # Other programs may hold a port between them.
        assert ports[0] == 0 < ports[1] < ports[2] < 129
        with pytest.raises(
            ConfigError, match=f"controller cannot listen on port {port}: Address"
        ):
            async with metrics_endpoint(config, "controller", []):
                pass
    assert not list((config.run.dir / TARGETS).iterdir())


def test_a_port_without_room_for_the_others_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"prometheus must have a port up to 65407, got 65408"
    ):
        metrics_config(tmp_path, "127.0.0.1:65408")
