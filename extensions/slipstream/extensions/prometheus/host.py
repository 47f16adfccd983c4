"""Metrics of what a process needs of its host: main memory, and certificates that are valid.

Consumes: the machine's counts, the files that `security` names. Produces: metrics. It waits for
nothing.
"""

from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from slipstream.core.errors import ConfigError
from slipstream.core.machine.description import free_memory
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.tokens import read_secret

# Settings that name files of certificates.
CERTIFICATES = ("tls_certificate", "tls_ca", "tls_client_ca")


class HostMemoryUse:
    """A collector of the main memory that the machine, or the process's control group, has."""

    def collect(self) -> Iterator[Metric]:
        """Yields free and total memory in bytes."""
        free, total = free_memory()
        meaning = "Main memory of the machine, or of the control group that leaves least."
        yield GaugeMetricFamily("slipstream_memory_size_bytes", meaning, total)
        yield GaugeMetricFamily("slipstream_memory_free_bytes", "Memory that is not used.", free)


class CertificateEnds:
    """A collector of the ends of the certificates with which this process was started.

    A new file counts from the next start on, as it does for TLS itself.
    """

    def __init__(self, security: SecuritySection) -> None:
        """Reads the files; raises ConfigError for one that holds no certificate."""
        paths = {name: getattr(security, name) for name in CERTIFICATES}
        self._ends = {name: _first_end(name, path) for name, path in paths.items() if path}

    def collect(self) -> Iterator[Metric]:
        """Yields a time of Unix for each setting, that of the certificate which ends first."""
        meaning = "When the first certificate of the file that a setting names is no longer valid."
        name = "slipstream_certificate_end_timestamp_seconds"
        family = GaugeMetricFamily(name, meaning, labels=["setting"])
        for setting, end_s in self._ends.items():
            family.add_metric([f"security.{setting}"], end_s)
        yield family


def _first_end(name: str, path: Path) -> float:
    setting = f"security.{name}"
    try:
        certificates = x509.load_pem_x509_certificates(read_secret(path, setting))
    except ValueError as error:
        raise ConfigError(f"{setting} {path} holds no certificate in PEM form: {error}") from error
    return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
