"""Messages with images, as environments write them."""

import base64
import os
from pathlib import Path

import pytest
from slipstream.client.conversion import observation
from slipstream.client.environment import Environment
from slipstream.core.errors import EnvironmentFailed

from deploy.environments.colours import COLOURS, Colours, square_png

RED = square_png(COLOURS["red"], 0, 0)


def parts_of(content: object) -> list:
    (message,) = observation(
        [{"role": "user", "content": content}], Environment()
    ).messages
    assert message.content == ""
    return [
        part.image if part.HasField("image") else part.text for part in message.parts
    ]


def test_images_come_as_data_urls_bytes_and_files(tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    assert parts_of(
        [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "a"},
            {"type": "image", "data": RED},
            {"type": "image", "path": file},
            {"type": "image", "path": str(file)},
        ]
    ) == [RED, "a", RED, RED, RED]


def test_an_image_is_read_from_a_file_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        EnvironmentFailed, match="an image cannot be read: .* it is a pipe"
    ):
        parts_of([{"type": "image", "path": tmp_path / "pipe"}])
    (tmp_path / "red.png").write_bytes(RED)
    # Caches of data sets have links.
    (tmp_path / "link.png").symlink_to("red.png")
    assert parts_of([{"type": "image", "path": tmp_path / "link.png"}]) == [RED]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (7, "content must be a text or a list of parts, got 7"),
        ([], "content must be a text or a list of parts"),
        (
            [{"type": "text", "text": "a"}] * 257,
            "parts must have at most 256 elements, got 257",
        ),
        ([{"type": "video", "path": "x"}], 'a part must be {"type": "text"'),
        (
            [{"type": "text", "text": "a", "size": 1}],
            "a part of type 'text' has no field 'size'",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}],
            "a part of type 'image_url' has no field 'detail'",
        ),
        (
            [{"type": "image", "path": "/no/such.png"}],
            "an image cannot be read: .*such.png",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "http://h/x"}}],
            "as nothing is fetched",
        ),
    ],
)
def test_other_content_is_refused_by_name(content: object, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        observation([{"role": "user", "content": content}], Environment())


def test_the_colour_of_a_square_is_judged() -> None:
    game = Colours(num_tasks=8)
    assert {colour for colour, _, _ in game.tasks()} == set(COLOURS)
    (message,) = game.reset(("blue", 14, 0))
    assert message.content[0]["data"] == square_png(COLOURS["blue"], 14, 0)
    assert [game.step(reply).reward for reply in ("blue red", "red", "")] == [
        1.0,
        0.0,
        0.0,
    ]
