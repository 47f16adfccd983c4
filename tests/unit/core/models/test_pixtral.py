"""Images of Mistral 3: rows of tokens with ends, and pixels as transformers makes them."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from slipstream.core.errors import ConfigError
from slipstream.core.models.vision import PixtralProcessor, image_tokens, load_processor
from support.fakes.tiny_models import make_seeing_model

IMAGE, BREAK, END = 5, 6, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("pixtral"), "mistral3")


def png(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_rows_of_an_image_end_with_tokens_of_their_own(folder: Path) -> None:
    tokens = image_tokens(folder, max_images=1)
    assert tokens is not None
    found, placed = tokens.expanded([1, IMAGE, 2, IMAGE], [png(84, 50), png(9, 9)])
    row = [IMAGE] * 3
    assert found == [1, *row, BREAK, *row, END, 2, IMAGE, END]
    assert [place.offset for place in placed] == [1, 10]


def test_without_images_the_model_reads_their_tokens_as_text(folder: Path) -> None:
    assert image_tokens(folder, max_images=0) is None


@pytest.mark.parametrize(
    ("width", "height"), [(28, 28), (29, 28), (112, 56), (9, 100), (300, 113), (113, 300), (500, 7)]
)
def test_an_image_has_the_pixels_of_transformers_and_their_tokens(width, height, folder):
    processor, data = load_processor(folder), png(width, height)
    assert isinstance(processor, PixtralProcessor)
    with Image.open(io.BytesIO(data)) as image:
        expected = processor.inner(images=[image], patch_size=28, return_tensors="np")
    whole = processor.image(data)
    np.testing.assert_array_equal(whole, expected["pixel_values"][0])
    values, (_, rows, columns) = processor.pixels(data)
    assert whole.shape == (3, rows * 14, columns * 14)
    for place in (0, columns - 1, columns, rows * columns - 1):
        top, left = 14 * (place // columns), 14 * (place % columns)
        patch = whole[:, top : top + 14, left : left + 14]
        np.testing.assert_array_equal(values[place], patch.ravel())
    tokens = processor.tokens(IMAGE, data)
    has_features = processor.has_features(rows // 2, columns // 2)
    assert [token == IMAGE for token in tokens] == has_features.tolist()
    assert has_features.sum() == rows * columns // 4
    assert len(tokens) <= processor.max_tokens


def test_a_processor_may_lie_in_the_file_of_the_whole_processor(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    names = json.loads((tmp_path / "processor_config.json").read_text())
    whole = {**names, "image_processor": settings, "processor_class": "PixtralProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    data = png(300, 113)
    np.testing.assert_array_equal(
        load_processor(tmp_path).pixels(data).values, load_processor(folder).pixels(data).values
    )


def test_an_image_that_would_lose_its_last_row_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="longer side is made 112, got 1000 [*] 7"):
        load_processor(folder).tokens(IMAGE, png(1000, 7))


def test_a_tokenizer_without_these_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    names = {"image_break_token": "[IMG_BREAK]"}
    (tmp_path / "processor_config.json").write_text(json.dumps(names))
    with pytest.raises(ConfigError, match=r"lacks the token '\[IMG_BREAK\]', which stands between"):
        load_processor(tmp_path)


def test_a_folder_may_name_the_token_of_images_as_transformers_does(folder, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    values = json.loads((folder / "config.json").read_text())
    values["image_token_id"] = values.pop("image_token_index")
    (other / "config.json").write_text(json.dumps(values))
    tokens = image_tokens(other, max_images=1)
    assert tokens is not None and tokens.token_id == IMAGE
