"""Bytes of images, their pixels, and the tokens that stand for them."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from slipstream.core.configuration.config_file import check_model, parse_config
from slipstream.core.errors import ConfigError, ProtocolError
from slipstream.core.models.images import (
    MAX_PIXELS,
    data_of_url,
    decoded,
    image_tokens,
    load_processor,
    size_of,
)
from slipstream.core.types import ImagePlace
from slipstream.learner.trainer.tiny_model import make_model as make_text_model
from slipstream.learner.trainer.tiny_model import make_tokenizer as make_text_tokenizer
from slipstream.protocol.codec import decode_trajectory, encode_trajectory
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.tiny_models import make_seeing_model

from deploy.environments.colours import COLOURS, SIDE, square_png

RED = square_png(COLOURS["red"], 0, 0)
IMAGE = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("vision"), "qwen3_vl")


def png(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_an_image_has_the_tokens_of_its_pixels(folder: Path) -> None:
    processor = load_processor(folder)
    for data in (RED, png(112, 56), png(30, 300), png(500, 400)):
        pixels = processor.pixels(data)
        num_tokens = len(processor.tokens(IMAGE, data))
        assert len(pixels.values) == np.prod(pixels.grid) == 4 * num_tokens
        assert num_tokens <= processor.max_tokens
    assert processor.pixels(RED).grid == (1, SIDE // 14, SIDE // 14)


def test_a_transparent_image_stands_on_white() -> None:
    for mode, color in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))):
        file = io.BytesIO()
        image = Image.new(mode, (4, 4), color)
        image.putpixel((1, 1), (0, 0, 0, 255) if mode == "RGBA" else (0, 255))
        image.save(file, "PNG")
        found = decoded(file.getvalue())
        assert found.mode == "RGB"
        assert (found.getpixel((0, 0)), found.getpixel((1, 1))) == (
            (255,) * 3,
            (0,) * 3,
        )


def test_shades_of_16_bits_stay_shades() -> None:
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 257, 40000, 65535]], dtype=np.uint16)).save(
        file, "PNG"
    )
    assert np.asarray(decoded(file.getvalue()))[0, :, 1].tolist() == [0, 1, 155, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_stands_upright_as_viewers_show_it(
    orientation: int, folder: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (280, 56), "black")
    image.paste("white", (0, 0, 140, 28))
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif, quality=95)
    data = file.getvalue()
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(decoded(data)), np.asarray(seen))
    assert size_of(data) == seen.size
    processor = load_processor(folder)
    assert len(processor.pixels(data).values) == 4 * len(processor.tokens(IMAGE, data))


def test_bytes_that_are_no_image_are_refused(folder: Path) -> None:
    processor = load_processor(folder)
    for data in (b"", b"no image", b"GIF89a"):
        with pytest.raises(ValueError, match="an image cannot be read"):
            processor.tokens(IMAGE, data)
    with pytest.raises(ValueError, match="cannot be read"):
        processor.pixels(RED[:-30])
    with pytest.raises(
        ValueError, match=f"at most {MAX_PIXELS} pixels, got 5000 [*] 4000"
    ):
        processor.tokens(IMAGE, png(5000, 4000))


def test_a_token_of_the_template_becomes_those_of_its_image(folder: Path) -> None:
    tokens = image_tokens(folder)
    expanded, placed = tokens.expanded([1, IMAGE, 7, IMAGE, 2], [RED, png(112, 56)])
    assert expanded == [1, *[IMAGE] * 4, 7, *[IMAGE] * 8, 2]
    assert [place.offset for place in placed] == [1, 6]
    with pytest.raises(ValueError, match="once for each of the 1 images, it wrote 2"):
        tokens.expanded([IMAGE, IMAGE], [RED])


def test_a_model_of_text_has_no_tokens_of_images(tmp_path: Path) -> None:
    make_text_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert image_tokens(tmp_path) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/x.png", "as nothing is fetched, got 'http://127"),
        ("file:///etc/passwd", "as nothing is fetched"),
        ("data:image/png,abc", "as nothing is fetched"),
        ("data:image/png;base64,a*b", "is no base64"),
    ],
)
def test_urls_that_hold_no_image_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        data_of_url(url)


def test_a_trajectory_carries_its_images() -> None:
    plain = make_trajectory(12, 3)
    seen = dataclasses.replace(
        plain, images=(RED, b"other"), image_places=(ImagePlace(1, 1), ImagePlace(6, 0))
    )
    trajectory = decode_trajectory(encode_trajectory(seen))
    assert (trajectory.images, trajectory.image_places) == (
        seen.images,
        seen.image_places,
    )
    for places in ([(1, 2)], [(6, 0), (1, 1)], [(15, 0)]):
        wrong = dataclasses.replace(
            seen, image_places=tuple(ImagePlace(*p) for p in places)
        )
        with pytest.raises(ProtocolError, match="image"):
            decode_trajectory(encode_trajectory(wrong))


def table(folder: Path, **sampling: object) -> dict:
    return {
        "run": {"name": "vision", "steps": 1},
        "model": {"path": str(folder)},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 32, **sampling},
    }


def test_images_reserve_their_bytes_in_the_queue(folder: Path) -> None:
    without, with_images = (
        parse_config(
            table(folder, max_images=number, max_image_bytes=1000), source="test"
        )
        for number in (0, 3)
    )
    assert with_images.trajectory_bytes() - without.trajectory_bytes() == 3000


def test_a_model_of_text_is_refused_images(tmp_path: Path) -> None:
    make_text_tokenizer(tmp_path)
    make_text_model(
        tmp_path,
        num_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        seed=0,
    )
    config = parse_config(table(tmp_path, max_images=1), source="test")
    with pytest.raises(
        ConfigError, match="max_images must be 0 for a LlamaForCausalLM"
    ):
        check_model(config)
