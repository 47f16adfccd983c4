import pytest
from slipstream.protocol.config import QueueSection
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.queue.redis_connection import RedisConnection
from slipstream.protocol.security import redis_url_with_password


def test_the_password_of_a_file_reaches_the_client_as_it_is(tmp_path):
    file = tmp_path / "password"
    file.write_text("p@ss&w=rd/ +\n")
    url = "rediss://slipstream@queue.example:6380/0?ssl_ca_certs=/run/secrets/tls_ca"
    connection = RedisConnection(
        redis_url_with_password(QueueSection(redis_url=url, redis_password_file=file)), "run"
    )
    options = connection.client.get_connection_kwargs()
    assert options["password"] == "p@ss&w=rd/ +"
    assert options["username"] == "slipstream"
    assert options["ssl_ca_certs"] == "/run/secrets/tls_ca"
    assert connection.name == "rediss://queue.example:6380/0"


def test_a_url_without_a_password_file_stays_as_it_is():
    url = "unix:///run/valkey.sock?password=secret"
    assert redis_url_with_password(QueueSection(redis_url=url)) == url


def test_a_missing_password_file_is_named(tmp_path):
    section = QueueSection(redis_url="rediss://queue", redis_password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"queue.redis_password_file: .*/none: No such file"):
        redis_url_with_password(section)


@pytest.mark.parametrize("url", ["redis://queue:6379", "redis://user:word@10.0.0.1:6379/0"])
def test_another_machine_is_reached_through_tls_only(url):
    with pytest.raises(ConfigError, match="is not loopback: use rediss://"):
        redis_url_with_password(QueueSection(redis_url=url))
