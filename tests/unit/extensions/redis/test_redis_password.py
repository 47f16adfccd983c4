import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import QueueSection
from slipstream.extensions.redis.connection import RedisConnection
from slipstream.protocol.access.security import redis_url_of
from support.fakes.small_configs import small_config


def table(user, file):
    return {"user": user, "password_file": file}


def test_a_url_without_a_users_table_stays_as_it_is():
    url = "unix:///run/valkey.sock?password=secret"
    assert redis_url_of(QueueSection(redis_url=url), "controller") == url


def test_a_missing_password_file_is_named(tmp_path):
    section = QueueSection(
        redis_url="rediss://queue", controller=table("a", tmp_path / "none")
    )
    with pytest.raises(
        ConfigError, match=r"queue.controller.password_file: .*/none: No such file"
    ):
        redis_url_of(section, "controller")


@pytest.mark.parametrize(
    "url", ["redis://queue:6379", "redis://user:word@10.0.0.1:6379/0"]
)
def test_another_machine_is_reached_through_tls_only(url):
    with pytest.raises(ConfigError, match="is not loopback: use rediss://"):
        redis_url_of(QueueSection(redis_url=url), "controller")


def test_each_end_of_the_queue_has_the_user_of_its_table(tmp_path):
    for user in ("reader", "writer"):
        (tmp_path / user).write_text(f"{user}'s p@ss&w=rd/ +\n")
    section = QueueSection(
        redis_url="rediss://queue.example:6380/0?ssl_ca_certs=ca.pem",
        controller=table("reader", tmp_path / "reader"),
        rollout_server=table("writer", tmp_path / "writer"),
    )
    for end, user in (("controller", "reader"), ("rollout_server", "writer")):
        connection = RedisConnection(redis_url_of(section, end), "run")
        options = connection.client.connection_pool.connection_kwargs
        assert (options["username"], options["password"]) == (
            user,
            f"{user}'s p@ss&w=rd/ +",
        )
        assert options["ssl_ca_certs"] == "ca.pem"
        assert connection.user == user
        assert connection.name == "rediss://queue.example:6380/0"


@pytest.mark.parametrize(
    ("password", "end", "refusal"),
    [
        ("password", "rollout_server", "queue.rollout_server is needed"),
        ("", "controller", "queue.controller.password_file: .*/file is empty"),
    ],
    ids=["an end without a table does not enter as the other", "an empty file"],
)
def test_an_end_without_a_user_or_password_is_refused(tmp_path, password, end, refusal):
    (tmp_path / "file").write_text(f"{password}\n")
    user = table("reader", tmp_path / "file")
    section = QueueSection(redis_url="rediss://queue", controller=user)
    with pytest.raises(ConfigError, match=refusal):
        redis_url_of(section, end)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "the table controller needs redis_url"),
        ({"redis_url": "rediss://user@queue"}, "the table controller names a user"),
    ],
)
def test_a_user_is_named_in_one_place(settings, rule):
    with pytest.raises(ValueError, match=rule):
        QueueSection(**settings, controller=table("reader", "file"))


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=False"])
def test_a_url_that_lets_anybody_answer_is_refused(option):
    with pytest.raises(ConfigError, match=r"would let anybody answer as queue"):
        redis_url_of(QueueSection(redis_url=f"rediss://queue/0?{option}"), "controller")
    here = f"rediss://127.0.0.1/0?{option}"
    assert redis_url_of(QueueSection(redis_url=here), "controller") == here


@pytest.mark.parametrize(
    "url",
    [
        "rediss://:hun/ter2@queue:6379/0",
        "rediss://user:12/hunter2@queue:6379/0",
        "rediss://:hun?ter2@queue/0",
        "rediss://:hun#ter2@queue/0",
        "unix://:hun/ter2@/run/v.sock",
        "rediss://:hunter2@queue:port/0",
        "http://:hunter2@queue",
        "redis://",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(url):
    with pytest.raises(
        ConfigError, match=r"redis_url must be redis://HOST:PORT/DB, "
    ) as caught:
        small_config(queue={"kind": "redis", "redis_url": url})
    for part in ("hun", "ter2", "12"):
        assert part not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://[::1]:6379/0?protocol=2",
        "rediss://user:p%2Fw:@x@queue.example:6380/1?ssl_ca_certs=a/b.pem",
        "unix://user:word@/run/v.sock?db=1",
    ],
)
def test_addresses_of_redis_are_taken(url):
    assert QueueSection(redis_url=url).redis_url == url
