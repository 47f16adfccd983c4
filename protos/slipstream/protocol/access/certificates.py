"""Checks TLS files before somebody else refuses them."""

from __future__ import annotations

import ssl

from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, SecuritySection, address_parts


def check_certificates(security: SecuritySection) -> None:
    """Raises ConfigError if TLS files cannot be loaded, or certificate and key do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key, authority = security.tls_certificate, security.tls_key, security.tls_ca
    files = f"security.tls_certificate {certificate} and tls_key {key}"
    try:
        if certificate is not None:
            # An empty password, since no person is there to type one.
            context.load_cert_chain(certificate, key, password=lambda: "")
        for name, file in (("tls_ca", authority), ("tls_client_ca", security.tls_client_ca)):
            if file is not None:
                files = f"security.{name} {file}"
                context.load_verify_locations(file)
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM file").lower().replace("_", " ")
        raise ConfigError(f"{files} cannot be used: {reason}") from error


def check_own_certificate(config: Config) -> None:
    """Raises ConfigError if clients would refuse this machine's certificate as the controller's.

    Clients verify the host of `controller.address` and the signature by `security.tls_ca`. Without
    this check the trainer ranks would wait for a controller that each of them refuses.
    """
    security, address = config.security, config.controller.address
    check_certificates(security)
    if not address.startswith("unix:"):
        check_shown(security, address)


def check_shown(security: SecuritySection, address: str | None) -> None:
    """Raises ConfigError if clients would refuse this machine's certificate.

    Without `address`, the controller's, any name in the certificate is fine.
    """
    if security.tls_certificate is None:
        return
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(security.tls_certificate, security.tls_key, password=lambda: "")
    client = ssl.create_default_context(cafile=security.tls_ca or security.tls_certificate)
    # gRPC takes any certificate in the file for an authority.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if security.tls_client_ca is not None:
        # Trainer ranks show the controller's own certificate.
        client.load_cert_chain(security.tls_certificate, security.tls_key, password=lambda: "")
        server.verify_mode = ssl.CERT_REQUIRED
        server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        server.load_verify_locations(security.tls_client_ca)
    client.check_hostname = address is not None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    host = address_parts(address)[0] if address is not None else None
    asking = client.wrap_bio(back, there, server_hostname=host)
    answering = server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking, answering):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            judge = f"every client of controller.address {address}" if address else "every client"
            if end is answering:
                judge = f"security.tls_client_ca {security.tls_client_ca}, where ranks show it"
            raise ConfigError(
                f"security.tls_certificate {security.tls_certificate} is refused by {judge}: "
                f"{error.verify_message.rstrip('.')}; make_certificates.sh issues a new one"
            ) from None
